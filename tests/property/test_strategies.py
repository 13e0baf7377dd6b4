"""The published strategies draw what is valid, all of it, and what is broken in one way."""

from __future__ import annotations

from typing import get_args

import pytest
from factories import tiny_contract, tiny_record
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import hsformat as hs
from hsformat.checks import check_record
from hsformat.contract import FieldDtype, StateDtype, parse_contract
from hsformat.problems import Severity
from hsformat.testing import (
    BREAKS,
    broken_records,
    build_store,
    contracts,
    layouts,
    record_lists,
    records,
    token_samples,
)

EVERY = contracts()
FIND = settings(max_examples=3000, database=None, deadline=None, derandomize=True, phases=[Phase.generate])
REACHED = {
    "depth 0": lambda c: c.captures[0].depth == 0,
    "norm final": lambda c: c.captures[-1].norm == "final",
    "both last captures": lambda c: len({k.norm for k in c.captures if k.depth == c.target.num_layers}) == 2,
    "no last": lambda c: c.layout.last is None,
    "aux out of order": lambda c: list(c.layout.aux) != sorted(c.layout.aux),
    "softcap": lambda c: c.target.head.softcap is not None,
    "quantization": lambda c: c.target.quantization is not None,
    "two kinds of rope": lambda c: len(c.target.rope) == 2,
    "no rope": lambda c: c.target.rope == (),
    "padded vocabulary": lambda c: c.target.head.padded_vocab > c.target.vocab_size,
    "field of a record with a shape": lambda c: any(f.axis == "record" and len(f.shape) == 2 for f in c.fields),
    "field of a token": lambda c: any(f.axis == "token" and not f.shape for f in c.fields),
    **{f"states in {d}": lambda c, d=d: any(k.dtype == d for k in c.captures) for d in get_args(StateDtype)},
    **{f"field in {d}": lambda c, d=d: any(f.dtype == d for f in c.fields) for d in get_args(FieldDtype)},
}
RECORDS = {
    "T - 1 states": lambda r: r.num_states == r.num_tokens - 1,
    "sampled": lambda r: r.provenance.generation.mode == "sampled",
    "positions": lambda r: r.position_ids is not None and r.position_ids[-1] > 2**31,
    "id beyond ASCII": lambda r: not r.id.isascii(),
    "id of 1,024 bytes": lambda r: len(r.id.encode()) == 1024,
    "one token": lambda r: r.num_tokens == 1,
}


@pytest.mark.parametrize("name", REACHED)
def test_contracts_reach(name):
    find(EVERY, REACHED[name], settings=FIND)


@pytest.mark.parametrize("name", RECORDS)
def test_records_reach(name):
    find(records(tiny_contract()), RECORDS[name], settings=FIND)


@given(EVERY)
def test_contracts_are_contracts(contract):
    assert parse_contract(contract.to_json(), where="test") == contract


@given(st.data())
def test_records_are_valid(data):
    contract = data.draw(EVERY)
    problems, _ = check_record(contract, data.draw(records(contract)))
    assert [p for p in problems if p.severity is Severity.ERROR] == []


@given(st.data())
def test_layouts_can_be_served(data):
    contract = data.draw(EVERY)
    layout = data.draw(layouts(contract))
    assert {p.code for p in hs.compare(contract, layout)} <= {"HS401", "HS402", "HS405"}
    assert hs.compare(contract, contract.layout) == []


@given(token_samples(vocab_size=50))
def test_samples_have_something_to_train_on(sample):
    assert sample.loss_mask.any()
    assert len(sample) == len(sample.loss_mask)


@given(st.data())
def test_broken_records_are_refused_with_their_code(data):
    contract = data.draw(EVERY)
    record, code = data.draw(broken_records(contract))
    problems, _ = check_record(contract, record)
    assert code in {p.code for p in problems if p.severity is Severity.ERROR}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.name)
def test_each_way_to_break_a_record_is_one_problem(broken, tmp_path):
    field = {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": True}
    contract = tiny_contract(fields=[field])
    record = broken.apply(contract, tiny_record(contract))
    assert record is not None
    with hs.create(tmp_path / "s", contract) as writer, pytest.raises(hs.InvalidRecord) as e:
        writer.append(record)
    assert {p.code for p in e.value.problems} == {broken.code}


def test_every_code_of_a_record_is_broken_by_something():
    assert {b.code for b in BREAKS} == {
        "HS101", "HS102", "HS103", "HS104", "HS105", "HS106", "HS107", "HS109", "HS201", "HS202", "HS207", "HS409",
    }  # fmt: skip


@pytest.mark.parametrize(("segments", "writers"), [(1, 1), (3, 2), (5, 5)])
def test_a_store_has_the_segments_and_writers_that_were_asked_for(tmp_path, segments, writers):
    contract = tiny_contract()
    written = [tiny_record(contract, id=f"r{i}") for i in range(5)]
    path = build_store(tmp_path / "s", contract, written, segments, writers=writers)
    store = hs.open(path)
    assert len(store.segments) == segments
    assert len({s.writer for s in store.segments}) == writers
    assert len(store) == 5


@pytest.mark.parametrize(("segments", "writers"), [(0, 1), (1, 0)])
def test_a_store_of_no_segments_or_writers_is_refused(tmp_path, segments, writers):
    with pytest.raises(ValueError, match="above 0"):
        build_store(tmp_path / "s", tiny_contract(), [], segments, writers=writers)


@given(record_lists(tiny_contract(), min_size=2))
def test_lists_of_records_have_different_ids(found):
    assert len({r.id for r in found}) == len(found) >= 2
