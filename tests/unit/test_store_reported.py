"""Troubles that were reported of other stores: growing what is there, zips, opening everything first."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import zarr
from factories import assert_same_record, build_store, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.problems import StoreError
from hsformat.store.commit import seal
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import group_json


def test_appending_changes_nothing_that_was_there(tmp_path: Path) -> None:  # zarr-python#1533
    """Arrays are never resized: not the metadata, not a chunk of an older segment is written again."""
    contract = tiny_contract()
    old = [tiny_record(contract, f"r{i}", tokens=300, seed=i) for i in range(3)]
    build_store(tmp_path / "s", contract, old)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "s").rglob("*") if p.is_file()}
    for i in range(3, 6):
        with hs.append(tmp_path / "s") as writer:
            writer.append(tiny_record(contract, f"r{i}", tokens=300, seed=i))
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before
    store = hs.open(tmp_path / "s")
    assert len(store) == 6
    for record in old:
        assert_same_record(store[record.id], record)


def test_a_zip_is_no_place_to_write_to(tmp_path: Path) -> None:  # zarr-python#3580, zarr-python#2448
    """A zip cannot replace an entry, and gets one name twice; what is in one has to be unpacked."""
    contract = tiny_contract()
    build_store(tmp_path / "s", contract, [tiny_record(contract)])
    path = Path(shutil.make_archive(str(tmp_path / "s"), "zip", tmp_path / "s"))
    data = path.read_bytes()
    for action in (hs.append, hs.open, lambda place: hs.create(place, contract)):
        with pytest.raises(StoreError) as e:
            action(path)
        assert [(p.code, p.got) for p in e.value.problems] == [("HS501", "a file")]
    for action in (hs.append, hs.open):
        with pytest.raises(TypeError, match="not in ZipStore"):
            action(zarr.storage.ZipStore(path, mode="a"))  # type: ignore[arg-type]  # no path
    assert path.read_bytes() == data
    shutil.unpack_archive(path, tmp_path / "again")
    assert_same_record(hs.open(tmp_path / "again")[0], tiny_record(contract))


class Counting(LocalBackend):
    """Counts what is asked of a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.asked: Counter[str] = Counter()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.asked[key.rpartition("/")[2]] += 1
        return super().read(key, start, length)


def test_100_000_records_are_opened_without_reading_their_arrays(tmp_path: Path) -> None:
    """SpecForge#733, PR#732: reading every file before the first step took hours; here it is one file a segment."""
    contract = tiny_contract()
    path = tmp_path / "s"
    (segment,) = hs.open(build_store(path, contract, [tiny_record(contract)])).segments
    template = json.loads((path / segment.prefix / "zarr.json").read_text())["attributes"]["hsformat"]
    records, segments = 1_000, 100
    for n in range(1, segments + 1):
        many = {
            **template, "n": n, "records": records, "ids": [f"r{n}-{i}" for i in range(records)],
            "tokens": [7] * records, "states": [7] * records, "provenance_index": [0] * records,
            "source_digests": [None] * records,
        }  # fmt: skip
        del many["checksum"]
        folder = path / f"segments/{segment.writer}-{n}"
        folder.mkdir()
        (folder / "zarr.json").write_bytes(group_json(seal(many)))
    backend = Counting(path)
    began = time.process_time()
    opened = hs.open(backend)
    seconds = time.process_time() - began
    assert len(opened) == records * segments + 1
    assert backend.asked == {"zarr.json": segments + 2}  # the root, and each segment's
    assert seconds < 2
    assert opened["r0"].id == "r0"
