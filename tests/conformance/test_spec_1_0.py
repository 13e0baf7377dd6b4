"""Every MUST of docs/spec/1.0.md has a check and a failing case, and each case gives the code that the rule names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from conformance import record_breaches, root_breaches, segment_breaches
from conformance.breaches import FIELD, Case
from conformance.segment_breaches import BIG, LITTLE, SHARD, put
from conformance.tamper import (
    edit_array,
)
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.problems import CODES
from hsformat.spec.v1_0 import contract_schema, problems_document, rules

ROOT = Path(__file__).parents[2]
CASES = [c for module in (root_breaches, record_breaches, segment_breaches) for c in module.breaks.cases]
SPEC = (ROOT / "docs" / "spec" / "1.0.md").read_text(encoding="utf-8")


@pytest.fixture
def store(tmp_path) -> Path:
    contract = tiny_contract()
    path = tmp_path / "data.hs.zarr"
    with hs.create(path, contract) as writer:
        for i in range(4):
            writer.append(tiny_record(contract, id=f"r{i}", tokens=5 + i, seed=i))
    assert hs.validate_store(path, level="full") == []
    return path


def test_every_legal_spelling_is_read(store):
    """Zarr v3: a name alone is an object without configuration; what is left out has its default."""
    before = [r.hidden["d2"].tobytes() for r in hs.open(store)]
    for array, path, value in [
        ("hidden/d2", "data_type", {"name": "bfloat16"}),
        ("hidden/d2", "chunk_key_encoding", "default"),
        ("hidden/d2", "attributes", {"note": [1]}),
        ("hidden/d2", "dimension_names", ["state", None]),
        ("hidden/d2", "fill_value", 0),
        ("hidden/d2", "storage_transformers", []),
        ("hidden/d2", "surprise", {"must_understand": False}),
        ("hidden/d2", f"{SHARD}.index_location", ...),
        ("hidden/d2", f"{SHARD}.codecs.2", "crc32c"),
        ("hidden/d2", f"{SHARD}.index_codecs.1", {"name": "crc32c", "configuration": {}}),
        (
            "hidden/d2",
            f"{SHARD}.codecs.1.configuration",
            {"cname": "lz4", "clevel": 9, "shuffle": "noshuffle", "blocksize": 0},
        ),
        ("loss_mask", f"{SHARD}.codecs.0", "bytes"),
        ("loss_mask", f"{SHARD}.codecs.0", {"name": "bytes", "configuration": {}}),
        ("ids", "codecs.0", LITTLE),
        ("input_ids", "attributes", ...),
    ]:
        edit_array(store, array, lambda meta, path=path, value=value: put(meta, path, value))
    assert hs.validate_store(store, level="full") == []
    assert [r.hidden["d2"].tobytes() for r in hs.open(store)] == before


def test_clauses_are_named(store):
    edit_array(store, "hidden/d2", lambda m: put(m, f"{SHARD}.index_location", "start"))
    edit_array(store, "input_ids", lambda m: put(m, f"{SHARD}.codecs.0", BIG))
    problems = hs.validate_store(store, level="sample")
    assert [p.where.rsplit(": ")[-1] for p in problems if p.code == "HS507"] == [
        "codecs[0].configuration.codecs[0].configuration.endian",
        "codecs[0].configuration.index_location",
    ]


def test_zero_row_of_the_embedding_is_a_note(tmp_path):
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (0, 1, 2, 3, 4)]
    contract = tiny_contract(captures=captures)
    states = np.ones((7, 8), np.float32)
    states[[0, 1, 2, 3, 4, 5]] = 0
    with hs.create(tmp_path / "s", contract) as writer:
        writer.append(tiny_record(contract, hidden={"d0": states}))
    problems = hs.validate_store(tmp_path / "s", level="full")
    assert [(p.code, p.severity) for p in problems] == [("HS202", "note")]


MUSTS = {r.id: r for r in rules(SPEC) if r.level == "MUST"}


def _name(case: tuple[str, Case]) -> str:
    return f"{case[0]}-{case[1].__name__}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_breach_is_reported_with_the_code_of_its_rule(case, store):
    rule, break_it = case
    problems = break_it(store)
    if problems is None:
        problems = hs.validate_store(store, level="full")
    assert MUSTS[rule].code in {p.code for p in problems}
    for p in problems:
        assert p.where
        assert p.got != p.expected
        assert p.fix


def test_every_must_has_a_failing_case():
    assert {rule for rule, _ in CASES} == set(MUSTS)


def test_rule_numbers_are_unique_and_codes_known():
    ids = [r.id for r in rules(SPEC)]
    assert len(ids) == len(set(ids))
    assert len(ids) == len(re.findall(r"^- \*\*[A-Z]-", SPEC, re.MULTILINE))
    assert {r.code for r in MUSTS.values()} <= set(CODES)


def test_schema_is_the_committed_one_and_agrees_with_the_model():
    committed = (ROOT / "docs" / "spec" / "1.0.schema.json").read_text(encoding="utf-8")
    schema = json.loads(committed)
    assert schema == json.loads(contract_schema()), "run make docs"
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    validator(schema).validate(tiny_contract(fields=[FIELD]).to_json())
    wrong = {**tiny_contract().to_json(), "surprise": 1}
    assert list(validator(schema).iter_errors(wrong))


def test_problem_codes_document_is_the_committed_one():
    assert (ROOT / "docs" / "problems.md").read_text(encoding="utf-8") == problems_document(), "run make docs"
