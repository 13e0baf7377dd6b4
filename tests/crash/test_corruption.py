"""Random damage of every kind of file: harmless, which is proved, or reported with the records that it touches.

Nightly (``HYPOTHESIS_PROFILE=nightly``) 1,000 flipped bits and 200 cuts, by a seed of the day; otherwise a tenth.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from factories import assert_same_record, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.problems import ExitCode, Problem, Severity, StoreError, exit_code
from hsformat.validate import validate_store

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
FLIPS, CUTS = (500, 100) if NIGHTLY else (50, 10)  # of each codec
SEED = int(time.time()) // 86_400 if NIGHTLY else 4
FIELDS = [{"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": False}]
CONTRACT = tiny_contract(fields=FIELDS)
DECODERS = ("native", "zarr")


def record(i: int) -> Any:
    made = tiny_record(CONTRACT, f"r{i}", tokens=9 + i, seed=i)
    made.position_ids = np.arange(9 + i) + i
    return made


RECORDS = {f"r{i}": record(i) for i in range(4)}


@pytest.fixture(scope="module", params=["compact", "fast"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of two segments, several chunks an array of states; tests put back what they break."""
    path = tmp_path_factory.mktemp("store") / request.param
    with hs.create(path, CONTRACT, codec=request.param, chunk_tokens=4) as writer:
        for i, r in enumerate(RECORDS.values()):
            writer.append(r)
            if i % 2:
                writer.flush()
    assert judge(path) == []
    return path


def kinds(path: Path) -> dict[str, list[Path]]:
    """Return the files of a store by kind: its key without the name of the segment, and of the capture."""
    out = defaultdict(list)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        kind = re.sub(r"segments/[0-9a-z]+-\d+/", "segments/*/", file.relative_to(path).as_posix())
        out[re.sub(r"/d\d+n?/", "/*/", kind)].append(file)
    return dict(out)


def read(path: Path, decoder: Any) -> dict[str, list[Problem]]:
    """Read every record: what can be read is what was written. Return the problems of those that cannot, by id."""
    try:
        opened = hs.open(path, decoder=decoder)
    except StoreError as e:
        return dict.fromkeys(RECORDS, e.problems)
    assert opened.contract.model_copy(update={"codec": CONTRACT.codec}) == CONTRACT
    assert sorted(opened.ids) == sorted(RECORDS), "a record that was committed is not there, and nobody says so"
    lost = {}
    for record_id, wanted in RECORDS.items():
        try:
            assert_same_record(opened[record_id], wanted)
        except StoreError as e:
            lost[record_id] = e.problems
    return lost


def judge(path: Path) -> list[Problem]:
    """Read by every path and validate: whatever cannot be read is reported, with the records that it touches."""
    found = [p for p in validate_store(path, level="full") if p.severity is Severity.ERROR]
    assert all(p.code.startswith("HS5") for p in found), [str(p) for p in found]
    for decoder in DECODERS:
        for record_id, problems in read(path, decoder).items():
            assert all(p.code.startswith("HS5") for p in problems)
            assert any(names(p, record_id) for p in found), (decoder, record_id, [str(p) for p in found])
    return found


def plainly_read(path: Path) -> int:
    """Read every array of every segment by plain Zarr, and return how many records there are."""
    segments = [group for _, group in zarr.open_group(path / "segments", mode="r").groups()]
    for _, array in (member for group in segments for member in group.members(max_depth=None)):
        if isinstance(array, zarr.Array):
            array[...]
    return sum(group["token_offsets"].shape[0] - 1 for group in segments)  # type: ignore[union-attr]  # an array


def names(p: Problem, record_id: str) -> bool:
    """Whether a problem of validation names a record, or something that all records of the segment hang on."""
    whole = p.where.split(":")[0].endswith("/zarr.json") and "/hidden/" not in p.where
    return p.record == record_id or repr(record_id) in p.got or whole or p.code in ("HS501", "HS502")


def damaged(path: Path, n: int, seed: int) -> Iterator[tuple[str, Path, bytes, np.random.Generator]]:
    """Yield (kind, file, its bytes, random numbers) n times, each kind as often; what is done to the file is undone."""
    rng, of_kind = np.random.default_rng(seed), kinds(path)
    for i in range(n):
        kind = sorted(of_kind)[i % len(of_kind)]
        file = of_kind[kind][int(rng.integers(len(of_kind[kind])))]
        good = file.read_bytes()
        yield kind, file, good, rng
        file.write_bytes(good)


def test_flipped_bits(store: Path) -> None:
    """Of a file of a segment every one is found: the commit record has its checksum. What is not found does no harm."""
    for kind, file, good, rng in damaged(store, FLIPS, SEED):
        at, bit = int(rng.integers(len(good))), int(rng.integers(8))
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        file.write_bytes(bad)
        found = judge(store)
        if not found:
            assert plainly_read(store) == len(RECORDS), (kind, at, bit)
        if kind.count("/") > 2:
            assert {p.code for p in found} == {"HS504"}, (kind, at, bit, [str(p) for p in found])


def test_cuts(store: Path) -> None:
    """A file that is shorter is found, whatever it is; the root, its group and commit records are JSON."""
    for kind, file, good, rng in damaged(store, CUTS, SEED + 1):
        at = int(rng.integers(len(good)))
        file.write_bytes(good[:at])
        found = judge(store)
        assert exit_code(found) == (ExitCode.UNABLE if kind == "zarr.json" else ExitCode.PROBLEMS), (kind, at)
        if kind.count("/") > 2:
            assert {p.code for p in found} == {"HS505"}, (kind, at)


def test_deleted_files(store: Path, tmp_path: Path) -> None:
    """Of every kind: HS503 by every path, and never zeros. Without its commit record a segment does not exist."""
    for kind, files in kinds(store).items():
        copy = shutil.copytree(store, tmp_path / "copy")
        (copy / files[0].relative_to(store)).unlink()
        if kind == "segments/*/zarr.json":
            assert [p.code for p in validate_store(copy)] == ["HS506"]
            assert all(len(hs.open(copy, decoder=d)) == 2 for d in DECODERS)  # type: ignore[arg-type]  # text
        elif kind == "zarr.json":
            assert {p.code for p in judge(copy)} == {"HS501"}
        elif kind == "segments/zarr.json":
            assert judge(copy) == []
        else:
            assert {p.code for p in judge(copy)} == {"HS503"}, kind
        if "*/hidden/*" in kind or kind.endswith(("input_ids/c/0", "loss_mask/c/0", "weight/c/0")):
            for decoder in DECODERS:
                lost = read(copy, decoder)
                assert len(lost) == 2, (kind, decoder)
                assert {p.code for problems in lost.values() for p in problems} == {"HS503"}
        shutil.rmtree(copy)
