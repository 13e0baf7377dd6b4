"""The digest of what a store holds: the same however it is stored, another for every change of a record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from factories import tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.record import Record
from hsformat.store.content import record_digest

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=5 + i, seed=i) for i in range(4)]


def test_order_segments_and_codec_do_not_enter(tmp_path: Path) -> None:
    with hs.create(tmp_path / "a", CONTRACT, codec="fast") as writer:
        for record in RECORDS:
            writer.append(record)
    with hs.create(tmp_path / "b", CONTRACT, codec="compact", chunk_tokens=4) as writer:
        for record in reversed(RECORDS):
            writer.append(record)
            writer.flush()
    digests = {hs.content_digest(hs.open(tmp_path / name)) for name in "ab"}
    assert len(digests) == 1
    assert next(iter(digests)).startswith("sha256:")
    with hs.append(tmp_path / "a") as writer:
        writer.append(tiny_record(CONTRACT, "more"))
    assert hs.content_digest(hs.open(tmp_path / "a")) not in digests


def changed(record: Record, name: str) -> Record:
    if name == "id":
        record.id += "x"
    elif name == "position_ids":
        record.position_ids = np.arange(1, record.num_tokens + 1)
    elif name.startswith("d"):
        array = record.hidden[name].copy()
        array.view(np.uint16)[2, 3] ^= 1
        record.hidden[name] = array
    elif name == "swapped":
        record.hidden["d1"], record.hidden["d2"] = record.hidden["d2"], record.hidden["d1"]
    else:
        getattr(record, name)[0] ^= 1
    return record


@pytest.mark.parametrize("name", ["id", "input_ids", "loss_mask", "position_ids", "d1", "d4", "swapped"])
def test_every_part_of_a_record_enters(name: str) -> None:
    assert record_digest(changed(tiny_record(CONTRACT), name)) != record_digest(tiny_record(CONTRACT))


def test_positions_that_count_tokens_are_none() -> None:
    record = tiny_record(CONTRACT)
    record.position_ids = np.arange(record.num_tokens)
    assert record_digest(record) == record_digest(tiny_record(CONTRACT))
