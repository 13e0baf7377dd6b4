"""Repair and merge killed at any point: readers see the old state or the new one, and the command given again ends it.

As in ``test_kill_writer``, one process forks a child for each point, which kills itself with SIGKILL there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crash.test_kill_writer import die_at
from factories import assert_same_record, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.maintain import merge_stores, repair_store
from hsformat.problems import Severity
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import segment_names
from hsformat.validate import validate_store

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=16, seed=i) for i in range(8)]
WANTED = {r.id: r for r in RECORDS}
PER_SEGMENT = 3  # r0..r2 lose r0; of r3..r5 the commit record is damaged; r6, r7 are whole

REPAIR = {
    "first-file": ("create", 0, "before"),
    "first-chunk": ("part", 1, "half"),
    "small-file": ("write", 3, "half"),
    "unsettled": ("settle", 0, "before"),
    "commit-before": ("publish", 0, "before"),
    "commit-half": ("publish", 0, "half"),
    "commit-linked": ("publish", 0, "linked"),
    "commit-after": ("publish", 0, "after"),
    "end-before": ("remove", 0, "before"),
    "end-after": ("remove", 0, "after"),
}
MERGE = {
    "root-before": ("publish", 0, "before"),
    "root-linked": ("publish", 0, "linked"),
    "group-half": ("publish", 1, "half"),
    "first-file": ("create", 0, "after"),
    "mid-file": ("part", 9, "half"),
    "unsettled": ("settle", 0, "before"),
    "commit-before": ("publish", 2, "before"),
    "commit-half": ("publish", 2, "half"),
    "commit-linked": ("publish", 2, "linked"),
    "second-segment": ("part", 40, "half"),
    "last-commit": ("publish", 3, "after"),
    "dedupe-write": ("write", 2, "half"),
    "dedupe-before": ("publish", 4, "before"),
    "dedupe-linked": ("publish", 4, "linked"),
}


def build(folder: Path) -> None:
    """Write a damaged store, and two that have r3 in common."""
    with hs.create(folder / "damaged", CONTRACT, chunk_tokens=16) as writer:
        for i, record in enumerate(RECORDS):
            writer.append(record)
            if i % PER_SEGMENT == PER_SEGMENT - 1:
                writer.flush()
    one, two, _ = (folder / "damaged/segments" / n for n in names(folder / "damaged"))
    data = bytearray((one / "hidden/d2/c/0/0").read_bytes())
    data[3] ^= 1
    (one / "hidden/d2/c/0/0").write_bytes(data)
    (two / "zarr.json").write_text("{")
    for name, records in (("a", RECORDS[:4]), ("b", RECORDS[3:])):
        with hs.create(folder / name, CONTRACT) as writer:
            for record in records:
                writer.append(record)


def names(path: Path) -> list[str]:
    return segment_names(LocalBackend(str(path)))


def main(folder: Path) -> None:
    """Fork a child for each point; wait for it to be killed."""
    build(folder)
    for kind, points in (("repair", REPAIR), ("merge", MERGE)):
        for name, point in points.items():
            place = folder / f"{kind}-{name}"
            if kind == "repair":
                shutil.copytree(folder / "damaged", place)
            pid = os.fork()
            if pid == 0:
                die_at(*point)
                if kind == "repair":
                    repair_store(place)
                else:
                    merge_stores([folder / "a", folder / "b"], place, dedupe=True)
                os._exit(1)  # the point was never reached
            _, status = os.waitpid(pid, 0)
            print(place.name, os.WIFSIGNALED(status) and os.WTERMSIG(status))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which both were killed at every point."""
    folder = tmp_path_factory.mktemp("killed")
    roots = [str(Path(__file__).parents[n]) for n in (1, 2)]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*roots, *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = [
        f"{kind}-{name} {int(signal.SIGKILL)}" for kind, p in (("repair", REPAIR), ("merge", MERGE)) for name in p
    ]
    assert done.stdout.splitlines() == wanted, done.stderr
    return folder


def same(store: hs.Store, ids: set[str]) -> None:
    for record_id in ids:
        assert_same_record(store[record_id], WANTED[record_id])


@pytest.mark.parametrize("name", REPAIR)
def test_repair(killed: Path, name: str) -> None:
    path = killed / f"repair-{name}"
    old, new = {"r0", "r1", "r2", "r6", "r7"}, {"r1", "r2", "r6", "r7"}
    store = hs.open(path, damaged="skip")
    assert len(store.ids) == len(set(store.ids))
    after = name in ("commit-linked", "commit-after", "end-before", "end-after")
    assert set(store.ids) == (new if after else old)
    same(store, new)
    report = repair_store(path)
    assert set(report.lost) == (set() if after else {"r0"}) | (set() if name == "end-after" else {"r3", "r4", "r5"})
    store = hs.open(path)
    assert sorted(store.ids) == sorted(new)
    same(store, new)
    assert repair_store(path).segments == []
    assert [p for p in validate_store(path, level="full") if p.severity is Severity.ERROR] == []


@pytest.mark.parametrize("name", MERGE)
def test_merge(killed: Path, name: str) -> None:
    path, inputs = killed / f"merge-{name}", [killed / "a", killed / "b"]
    committed = {}
    if hs.exists(path):
        store = hs.open(path)
        same(store, {i for i in store.ids if not store.is_ambiguous(i)})
        committed = {
            p: p.stat().st_mtime_ns for s in store.segments for p in (path / s.prefix).rglob("*") if p.is_file()
        }
    else:
        assert name == "root-before"
    assert merge_stores(inputs, path, dedupe=True).exit_code == 0
    store = hs.open(path)
    assert sorted(store.ids) == sorted(WANTED)
    same(store, set(WANTED))
    assert all(p.stat().st_mtime_ns == t for p, t in committed.items())
    assert [p for p in validate_store(path, level="full") if p.severity is Severity.ERROR] == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
