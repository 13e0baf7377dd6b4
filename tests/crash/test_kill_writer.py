"""A writer killed at any point: readers see whole segments alone, and the rest can be appended.

One process imports the store once and forks a writer for each point; the writer kills itself with SIGKILL inside a call
of the backend, in the middle of the bytes where there are any.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from factories import assert_same_record, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.record import Record

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=5 + i, seed=i) for i in range(8)]
PER_SEGMENT = 2
CHUNK_TOKENS = 4  # so that chunks are written while records are appended
WRITES = (
    24  # small files of a segment of this contract but its commit record; random points are spread over all segments
)
PARTS = 60  # writes to files of a segment, at least

POINTS = {
    "create-before": ("publish", 0, "before"),
    "create-root": ("publish", 0, "half"),
    "create-root-linked": ("publish", 0, "linked"),
    "create-groups": ("publish", 1, "half"),
    "created": ("publish", 1, "after"),
    "first-file": ("create", 0, "before"),
    "first-chunk": ("part", 2, "half"),
    "files-begun": ("create", 5, "after"),
    "first-end": ("write", 0, "half"),
    "unsettled": ("settle", 1, "before"),
    "commit-before": ("publish", 3, "before"),
    "commit-half-written": ("publish", 3, "half"),
    "commit-linked": ("publish", 3, "linked"),
    "commit-after": ("publish", 3, "after"),
    **{f"write-{n}": ("write", n, "half") for n in np.random.default_rng(7).integers(1, 4 * WRITES, 5).tolist()},
    **{f"part-{n}": ("part", n, "half") for n in np.random.default_rng(8).integers(1, 4 * PARTS, 6).tolist()},
}


def main(folder: str) -> None:
    """Fork a writer for each point; wait for it to be killed."""
    for name, point in POINTS.items():
        pid = os.fork()
        if pid == 0:
            die_at(*point)
            write_all(Path(folder) / name)
            os._exit(1)  # the point was never reached
        _, status = os.waitpid(pid, 0)
        print(name, os.WIFSIGNALED(status) and os.WTERMSIG(status))


def write_all(path: Path) -> None:
    """Write the records that are not there yet, a few a segment; make the store if need be."""
    options = {"chunk_tokens": CHUNK_TOKENS, "threads": 2}
    with hs.append(path, **options) if hs.exists(path) else hs.create(path, CONTRACT, **options) as writer:
        for record in RECORDS:
            if record.id not in writer.ids:
                writer.append(record)
                if int(record.id[1:]) % PER_SEGMENT == 1:
                    writer.flush()


def die_at(method: str, number: int, where: str) -> None:
    """Arm the backend: die in the ``number``-th call of a method, of any thread; ``part`` is one write to a file."""
    from hsformat.store import local

    def die(*_args: object, **_kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    owner = local.LocalSink if method == "part" else local.LocalBackend
    method = "write" if method == "part" else method
    real, write, calls = getattr(owner, method), local.LocalSink.write, iter(range(10_000))

    def write_half(sink: local.LocalSink, data: Any) -> None:
        write(sink, data[: len(data) // 2])
        die()

    def dying(self: Any, *args: Any) -> Any:
        if next(calls) != number:
            return real(self, *args)
        if where == "before":
            die()
        if where == "half":
            local.LocalSink.write = write_half  # type: ignore[method-assign]  # replaced
            write_half(self, *args) if owner is local.LocalSink else None
        if where == "linked":  # the name exists, the temporary one does still
            Path.unlink = die  # type: ignore[assignment, method-assign]  # replaced
        done = real(self, *args)
        die()
        return done

    setattr(owner, method, dying)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which a writer was killed at every point."""
    folder = tmp_path_factory.mktemp("killed")
    roots = [str(Path(__file__).parents[n]) for n in (1, 2)]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{name} {int(signal.SIGKILL)}" for name in POINTS], done.stderr
    return folder


@pytest.mark.parametrize("name", POINTS)
def test_kill_anywhere(killed: Path, name: str) -> None:  # Model-Optimizer PR#2080, zarr-python PR#3413
    path = killed / name
    if not hs.exists(path):
        assert name in ("create-before", "create-root")
        write_all(path)  # what is left there is no obstacle
    wanted = {r.id: r for r in RECORDS}
    store = hs.open(path)
    assert [p.code for p in store.problems] in ([], ["HS506"])
    assert all(s.records == PER_SEGMENT for s in store.segments)
    if name.startswith("commit"):
        assert len(store) == PER_SEGMENT * (2 if name in ("commit-linked", "commit-after") else 1)
    same(store, wanted)
    before = {p: p.stat().st_mtime_ns for s in store.segments for p in (path / s.prefix).rglob("*") if p.is_file()}
    write_all(path)
    store = hs.open(path)
    assert sorted(store.ids) == sorted(wanted)
    same(store, wanted)
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    segments = zarr.open_group(path / "segments", mode="r")
    assert sum(segments[s.name]["token_offsets"].shape[0] - 1 for s in store.segments) == len(RECORDS)  # type: ignore[index, union-attr]  # zarr's unions


def same(store: hs.Store, wanted: dict[str, Record]) -> None:
    for record_id in store.ids:
        assert_same_record(store[record_id], wanted[record_id])


if __name__ == "__main__":
    main(sys.argv[1])
