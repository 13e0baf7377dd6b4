"""The JSON cases of docs/spec/cases/1.0, run against hsformat and, where it can, against the independent reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import hsformat as hs
from hsformat.checks import check_record
from hsformat.contract import Contract, parse_contract
from hsformat.digests import canonical_json, digest_json
from hsformat.dtypes import numpy_dtype
from hsformat.engines import engine_number
from hsformat.layout import parse_capture_key
from hsformat.problems import CODES, Problem, Severity
from hsformat.spec.v1_0 import rules
from hsformat.testing.cases import FOLDER, case_files
from tests.conformance import independent_reader as reader

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/spec/1.0.schema.json").read_text("utf-8"))


def cases(family: str) -> list[Any]:
    return [
        pytest.param(case, id=f"{i}-{case['name']}".encode("ascii", "replace").decode())
        for i, case in enumerate(json.loads((ROOT / FOLDER / f"{family}.json").read_bytes()))
    ]


def codes(problems: list[Problem]) -> list[str]:
    return sorted({p.code for p in problems if p.severity is Severity.ERROR})


def array(data: Any) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(data["hex"]), numpy_dtype(data["dtype"])).reshape(data["shape"])


@pytest.mark.parametrize("case", cases("contracts"))
def test_contracts(case):
    if case["code"] is None:
        contract = parse_contract(case["contract"], where="case")
        reader.check_members(case["contract"], SCHEMA, "contract")
        jsonschema.validate(case["contract"], SCHEMA)
        assert parse_contract(contract.to_json(), where="case") == contract
        return
    with pytest.raises(hs.StoreError) as e:
        parse_contract(case["contract"], where="case")
    assert {p.code for p in e.value.problems} == {case["code"]}
    assert case["member"] in {p.where.rpartition("case: ")[2] for p in e.value.problems}
    if case["rule"] == "C-1":
        with pytest.raises(reader.FormatError, match=rf"HS502.*{case['member'].split('.')[-1]}"):
            reader.check_members(case["contract"], SCHEMA, "contract")


@pytest.mark.parametrize("case", [c for c in cases("digests") if "contract" in c.values[0]])
def test_digests_of_contracts(case):
    contract = parse_contract(case["contract"], where="case")
    assert contract.digest == case["digest"]
    assert contract.compatibility_digest == case["compatibility_digest"]
    assert reader.compatibility_digest(contract.to_json()) == case["compatibility_digest"]


@pytest.mark.parametrize("case", [c for c in cases("digests") if "json" in c.values[0]])
def test_canonical_json(case):
    assert canonical_json(case["json"]).hex() == case["canonical_hex"]
    assert digest_json(case["json"]) == case["digest"]


@pytest.mark.parametrize("case", cases("records"))
def test_records(case, tmp_path):
    contract, data = parse_contract(case["contract"], where="case"), case["record"]
    record = hs.Record(
        id=data["id"],
        input_ids=np.array(data["input_ids"]),
        loss_mask=np.array(data["loss_mask"]),
        position_ids=None if data["position_ids"] is None else np.array(data["position_ids"]),
        hidden={k: array(h) for k, h in data["hidden"].items()},
        fields={k: array(f) for k, f in data["fields"].items()},
        provenance=hs.Provenance.model_validate(data["provenance"]),
        source_digest=data["source_digest"],
    )
    assert codes(check_record(contract, record)[0]) == case["codes"]
    if not case["codes"]:
        with hs.create(tmp_path / "s", contract) as writer:
            writer.append(record)
        _, (found,) = reader.read_store(tmp_path / "s", [f.name for f in contract.fields])
        assert found.id == data["id"]
        for key, want in data["hidden"].items():  # float16 of a float32 record is another array
            if contract.capture(key).dtype == want["dtype"]:
                assert found.hidden[key].tobytes().hex() == want["hex"]


@pytest.mark.parametrize("case", cases("compare"))
def test_compare(case):
    contract = parse_contract(case["contract"], where="case")
    other: hs.Layout | Contract
    if "layout" in case:
        other = hs.Layout.model_validate(case["layout"])
    else:
        other = parse_contract(case["other"], where="case")
        assert (contract.compatibility_digest == other.compatibility_digest) == (not case["codes"])
    assert codes(hs.compare(contract, other)) == case["codes"]


@pytest.mark.parametrize("case", cases("align"))
def test_align(case):
    found = hs.align.supervised(np.array(case["loss_mask"]), case["step"], rule=case["rule"])
    assert np.flatnonzero(found).tolist() == case["indexes"]


@pytest.mark.parametrize("case", cases("captures"))
def test_captures(case):
    if case["depth"] is None:
        with pytest.raises(ValueError, match="not a capture key"):
            parse_capture_key(case["key"])
    else:
        assert parse_capture_key(case["key"]) == (case["depth"], case["norm"] == "final")


@pytest.mark.parametrize("case", cases("engines"))
def test_engines(case):
    found = engine_number(case["engine"], case["architecture"], case["num_layers"], case["key"])
    assert found.number == case["number"]


def test_cases_cover_what_they_are_about():
    spec = (ROOT / "docs/spec/1.0.md").read_text("utf-8")
    of_contracts = {r.id for r in rules(spec) if r.level == "MUST" and r.id.startswith("C-")} - {"C-11"}  # of readers
    invalid = [c.values[0] for c in cases("contracts") if c.values[0]["code"]]
    assert {c["rule"] for c in invalid} == of_contracts
    of_records = {r.code for r in rules(spec) if r.level == "MUST" and r.id.startswith("R-")}
    assert {code for c in cases("records") for code in c.values[0]["codes"]} == of_records
    assert of_records <= set(CODES)


def test_every_file_has_a_test_and_a_row_in_the_readme():
    readme = (ROOT / FOLDER / "README.md").read_text("utf-8")
    for path in case_files():
        assert f"`{path.name}`" in readme
        assert f'cases("{path.stem}")' in Path(__file__).read_text("utf-8")
