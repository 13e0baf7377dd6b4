"""Any valid records under any contract, cut into any segments and chunks by any writers, come back bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import hsformat as hs
from hsformat.testing import assert_same_record, build_store, contracts, record_lists


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    contract = data.draw(contracts())
    written = data.draw(record_lists(contract))
    segments, writers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    chunk_tokens = data.draw(st.sampled_from((1, 7, 256)))
    with tempfile.TemporaryDirectory() as folder:
        path = build_store(Path(folder) / "s", contract, written, segments, writers=writers, chunk_tokens=chunk_tokens)
        store = hs.open(path, understands=[f.name for f in contract.fields])
        assert sorted(store.ids) == sorted(r.id for r in written)
        if writers == 1:
            assert store.ids == [r.id for r in written]
        for record in written:
            assert_same_record(store[record.id], record)
        # Any numbers may be drawn, those of an embedding where a layer is expected (HS203) among them.
        assert [p for p in hs.validate_store(path, level="full") if p.code != "HS203"] == []
