"""Every store of every released version is read, byte for byte, and is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden.make import contract, expected, records

import hsformat as hs

HERE = Path(__file__).parent
STORES = sorted(HERE.glob("*/*.hs.zarr"))


def test_there_is_one_store_a_codec():
    assert [f"{p.parent.name}/{p.name}" for p in STORES] == ["1.0/compact.hs.zarr", "1.0/fast.hs.zarr"]


@pytest.mark.parametrize("path", STORES, ids=lambda p: p.name)
def test_golden_store_is_read_as_it_was_written(path):
    wanted = json.loads(path.with_name(path.name.replace(".hs.zarr", ".expected.json")).read_text())
    assert hs.validate_store(path, level="full") == []
    store = hs.open(path, understands=["teacher"])
    assert expected(store) == wanted
    by_id = {r.id: r for r in records(contract())}
    for record in store:  # the command beside them still says how they were made
        source = by_id[record.id]
        assert record.input_ids.tolist() == source.input_ids.tolist()
        assert all(record.hidden[k].tobytes() == source.hidden[k].tobytes() for k in record.hidden)
