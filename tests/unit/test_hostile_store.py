"""Stores made to harm whoever reads them: each gets its code, and little memory is taken before it does.

Every damage is sealed again: checksums, sizes and CRCs are right, as somebody with bad intent would leave them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.independent_reader import crc32c
from conformance.tamper import edit_array, edit_commit, edit_index, edit_root, list_again, read_json, segment
from factories import build_store, tiny_contract, tiny_record
from numcodecs import blosc

import hsformat as hs
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import MAX_JSON_BYTES
from hsformat.store.segment import SegmentReader

FIELD = {"name": "w", "axis": "record", "dtype": "float32", "shape": [2], "must_understand": False}
BIG = 2**28
"""Bytes of a bomb: more than a validation of these stores may take."""

HARM: dict[str, tuple[Callable[[Path], None], set[str]]] = {}


def gets(*codes: str):
    def register(harm: Callable[[Path], None]) -> Callable[[Path], None]:
        HARM[harm.__name__] = harm, set(codes)
        return harm

    return register


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """Return a chunk of a few kilobytes that decodes to BIG bytes, with its CRC-32C."""
    frame = blosc.compress(np.ones(BIG, np.uint8), b"zstd", 9, blosc.NOSHUFFLE, BIG)
    assert len(frame) < BIG / 1000
    return frame + crc32c(frame).to_bytes(4, "little")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    contract = tiny_contract(fields=[FIELD])
    w = np.ones(2, np.float32)
    records = [tiny_record(contract, f"r{i}", tokens=20, fields={"w": w}) for i in range(3)]
    return build_store(tmp_path_factory.mktemp("sound") / "s", contract, records)


def sparse(path: Path, size: int) -> None:
    """Make a file as long as it says that takes no space."""
    path.touch()
    os.truncate(path, size)


def claim(store: Path, tokens: int) -> None:
    """Let a segment of one record claim so many tokens, everywhere where it is said."""

    def edit(commit: dict[str, Any]) -> None:
        commit.update(tokens=[tokens, 20, 20], states=[tokens, 20, 20])

    edit_commit(store, edit)
    for name in ("input_ids", "loss_mask", "hidden/d1", "hidden/d2", "hidden/d3", "hidden/d4"):

        def grow(meta: dict[str, Any]) -> None:
            meta["shape"][0] = tokens + 40
            rows = meta["codecs"][0]["configuration"]["chunk_shape"][0]
            meta["chunk_grid"]["configuration"]["chunk_shape"][0] = -(-meta["shape"][0] // rows) * rows

        edit_array(store, name, grow)


@gets("HS507")
def more_tokens_than_any_memory_holds(store: Path) -> None:
    claim(store, 2**40)


@gets("HS108", "HS504")
def more_tokens_than_there_are(store: Path) -> None:
    claim(store, 2**28)  # within the limits of the format


@gets("HS504")
def chunk_that_explodes(store: Path) -> None:
    path = segment(store) / "id_offsets/c/0"
    path.write_bytes(BOMB[0])
    list_again(store, "id_offsets/c/0")


@gets("HS504")
def inner_chunk_that_explodes(store: Path) -> None:
    path = segment(store) / "hidden/d2/c/0/0"
    path.write_bytes(BOMB[0] + path.read_bytes()[-20:])
    list_again(store, "hidden/d2/c/0/0")

    def edit(index: np.ndarray) -> None:
        index[0] = 0, len(BOMB[0])

    edit_index(store, "hidden/d2", edit)


@gets("HS504")
def shard_that_is_nearly_all_hole(store: Path) -> None:
    path = segment(store) / "hidden/d2/c/0/0"
    data = path.read_bytes()
    with path.open("r+b") as f:
        f.truncate(BIG)
        f.seek(BIG - 20)
        f.write(data[-20:])
    list_again(store, "hidden/d2/c/0/0")


@gets("HS501")
def endless_root(store: Path) -> None:
    sparse(store / "zarr.json", 2**40)


@gets("HS504")
def endless_commit_record(store: Path) -> None:
    sparse(segment(store) / "zarr.json", 2**40)


@gets("HS507")
def long_metadata(store: Path) -> None:
    path = segment(store) / "hidden/d2/zarr.json"
    path.write_bytes(path.read_bytes() + b" " * MAX_JSON_BYTES)
    list_again(store, "hidden/d2/zarr.json")


@gets("HS501")
def root_that_is_a_device(store: Path) -> None:
    (store / "zarr.json").unlink()
    (store / "zarr.json").symlink_to("/dev/zero")


@gets("HS503")
def commit_record_that_is_a_pipe(store: Path) -> None:
    (segment(store) / "zarr.json").unlink()
    os.mkfifo(segment(store) / "zarr.json")


@gets("HS503")
def array_that_is_a_device(store: Path) -> None:
    path = segment(store) / "loss_mask/c/0"
    path.unlink()
    path.symlink_to("/dev/zero")


@gets("HS504")
def brackets_without_end(store: Path) -> None:
    (segment(store) / "zarr.json").write_text("[" * 1_000_000)


@gets("HS504")
def commit_record_that_says_two_things(store: Path) -> None:
    path = segment(store) / "zarr.json"
    path.write_text(path.read_text().replace('"attributes"', '"attributes": {"hsformat": {}}, "attributes"', 1))


def field_shape(store: Path, shape: list[int]) -> None:
    edit_root(store, lambda a: a["contract"]["fields"][0].update(shape=shape))

    def edit(meta: dict[str, Any]) -> None:
        meta["shape"] = meta["chunk_grid"]["configuration"]["chunk_shape"] = [3, *shape]

    edit_array(store, "fields/w", edit)


@gets("HS507")
def field_beyond_any_memory(store: Path) -> None:
    field_shape(store, [2**50, 2**50])


@gets("HS502")
def field_of_a_hundred_dimensions(store: Path) -> None:
    field_shape(store, [1] * 99 + [2])  # NumPy has 64 at most


@gets("HS507")
def states_wider_than_any_memory(store: Path) -> None:
    edit_root(store, lambda a: a["contract"]["target"].update(hidden_size=2**45))
    for key in ("d1", "d2", "d3", "d4"):

        def edit(meta: dict[str, Any]) -> None:
            meta["shape"][1] = meta["chunk_grid"]["configuration"]["chunk_shape"][1] = 2**45
            meta["codecs"][0]["configuration"]["chunk_shape"] = [1, 2**45]

        edit_array(store, f"hidden/{key}", edit)


@gets("HS507")
def codec_that_unpickles(store: Path) -> None:
    """An array of objects would be unpickled by the codec of that name (Zarr 2 has it)."""

    def edit(meta: dict[str, Any]) -> None:
        meta["codecs"] = [{"name": "numcodecs.pickle", "configuration": {}}]

    edit_array(store, "loss_mask", edit)


BOMB: list[bytes] = []


@pytest.fixture
def harmed(sound, bomb, tmp_path):
    BOMB[:] = [bomb]

    def make(name: str) -> Path:
        store = shutil.copytree(sound, tmp_path / name)
        HARM[name][0](store)
        return store

    return make


@pytest.mark.parametrize("name", HARM)
def test_harm_has_its_code(harmed, name):
    store = harmed(name)
    assert {p.code for p in hs.validate_store(store)} == HARM[name][1]


def test_harm_takes_no_memory(harmed, sound):
    """All of them in one process, whose peak of memory is compared with that of validating the sound store."""
    script = (
        "import resource, sys, hsformat as hs\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "for path in sys.argv[1:]:\n"
        "    hs.validate_store(path)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )

    def peak(*stores: Path) -> int:
        run = subprocess.run(
            [sys.executable, "-c", script, *map(str, stores)], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    usual = peak(sound)
    assert peak(*map(harmed, HARM)) < usual + 0.75 * BIG / 2**20


def test_a_file_that_vanishes_while_it_is_read_is_never_fill_values(sound, tmp_path, monkeypatch):
    """zarr 3.4 takes a file that is not found for a shard that was never written."""
    store = hs.open(shutil.copytree(sound, tmp_path / "s"), decoder="zarr")
    assert store["r0"].id == "r0"  # its arrays are open now
    read = LocalBackend.read

    def gone(self, key, start=0, length=None):
        if "/hidden/" in key:
            raise FileNotFoundError(2, "No such file or directory", key)
        return read(self, key, start, length)

    monkeypatch.setattr(LocalBackend, "read", gone)
    with pytest.raises(hs.StoreError) as e:
        store["r1"]
    assert [(p.code, p.id) for p in e.value.problems] == [("HS503", "r1")]


def test_blocks_of_states_are_bounded_by_what_they_become(tmp_path, monkeypatch):
    """Compressed chunks may be as small as somebody liked: thousands of them fit into what is read at once."""
    contract = tiny_contract()
    hidden = {key: np.ones((20_000, 8), np.float32) for key in contract.keys}
    path = build_store(tmp_path / "s", contract, [tiny_record(contract, tokens=20_000, hidden=hidden)])
    (commit,) = hs.open(path).segments
    monkeypatch.setattr("hsformat.store.native._DECODED", 2**15)
    blocks = SegmentReader(LocalBackend(str(path)), contract, commit).stream("hidden/d2", lambda data: None)
    sizes = [block.nbytes for block in blocks]
    assert sum(sizes) == 20_000 * 16
    assert max(sizes) <= 2**15


def test_nothing_is_written_that_a_reader_would_refuse(tmp_path, monkeypatch):
    """The writer keeps to the limits: a segment ends before its commit record or its small arrays are too large."""
    monkeypatch.setattr("hsformat.store.pending.MAX_JSON_BYTES", 2**20 + 8_000)
    monkeypatch.setattr("hsformat.store.metadata.MAX_JSON_BYTES", 8_000)
    contract = tiny_contract()
    with hs.create(tmp_path / "s", contract) as writer:
        for i in range(60):
            writer.append(tiny_record(contract, f"r{i}"))
        much = hs.Provenance(template_kwargs={"tools": "x" * 9_000})
        with pytest.raises(hs.StoreError) as e:
            writer.append(tiny_record(contract, "much", provenance=much))
        assert [(p.code, p.id) for p in e.value.problems] == [("HS501", "much")]
        with pytest.raises(ValueError, match="at most 1048576"):
            writer.producer = {"log": "x" * 2**20}
    store = hs.open(tmp_path / "s")
    assert store.ids == [f"r{i}" for i in range(60)]
    assert len(store.segments) > 1
    assert all(len(json.dumps(read_json(p))) <= 8_000 for p in (tmp_path / "s/segments").glob("*/zarr.json"))
    assert hs.validate_store(tmp_path / "s", level="full") == []
