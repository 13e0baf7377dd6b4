"""A disk that is full, read-only or broken: HS506 says so, and what was committed stays.

The full disk and the read-only one are tmpfs of their own where this process may mount them.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import assert_same_record, tiny_contract, tiny_record
from small_disk import small_disk

import hsformat.store as hs
from hsformat.problems import Problem, Severity, StoreError
from hsformat.store.local import LocalBackend
from hsformat.validate import validate_store

CONTRACT = tiny_contract(
    captures=[{"depth": 4, "norm": "none", "dtype": "bfloat16"}], layout={"aux": ["d4"], "last": "d4"}
)
MANY = [tiny_record(CONTRACT, f"r{i}", tokens=400, seed=i) for i in range(60)]
FEW = [tiny_record(CONTRACT, f"r{i}", tokens=3 + i, seed=i) for i in range(4)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a small disk of its own."""
    with small_disk(tmp_path / "disk", "1m") as path:
        yield path


def commit(writer: hs.Writer, *records: Any) -> None:
    for record in records:
        writer.append(record)
    writer.flush()


def fill(writer: hs.Writer) -> tuple[StoreError, int]:
    """Append and commit until it fails; return how, and how many records were committed."""
    committed = 0
    known = set(writer.ids)

    def each() -> None:
        nonlocal committed
        for record in MANY:
            if record.id not in known:
                commit(writer, record)
                committed += 1

    with pytest.raises(StoreError) as e:
        each()
    with pytest.raises(StoreError, match="closed after a failed write"):
        writer.append(MANY[0])
    writer.close()
    return e.value, committed


def intact(path: Any, records: list[Any]) -> None:
    """Check that these records are there, whole, and no others."""
    store = hs.open(path)
    assert sorted(store.ids) == sorted(r.id for r in records)
    for record in records:
        assert_same_record(store[record.id], record)
    assert [str(p) for p in validate_store(path, level="full") if p.severity is not Severity.NOTE] == []


def test_full_disk(disk: Path) -> None:
    error, committed = fill(hs.create(disk / "s", CONTRACT, codec="fast"))
    (p,) = error.problems
    assert (p.code, p.severity) == ("HS506", "error")
    assert os.strerror(errno.ENOSPC) in p.got
    assert "free space" in p.fix
    assert 2 < committed < len(MANY)
    intact(disk / "s", MANY[:committed])
    assert [p.name for p in (disk / "s/segments").iterdir() if p.is_dir() and not (p / "zarr.json").exists()] == []
    _, more = fill(hs.append(disk / "s"))  # as full as before, and nothing has become worse
    assert more == 0
    intact(disk / "s", MANY[:committed])


def test_file_that_may_not_grow(tmp_path: Path) -> None:
    """The limit of a user's files, or a file system without large ones."""
    with hs.create(tmp_path / "s", CONTRACT, codec="fast") as writer:
        writer.append(FEW[0])
    writer = hs.append(tmp_path / "s")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(StoreError) as e:
            commit(writer, *MANY[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.code for p in e.value.problems] == ["HS506"]
    assert os.strerror(errno.EFBIG) in e.value.problems[0].got
    intact(tmp_path / "s", FEW[:1])


def test_read_only_disk(disk: Path) -> None:
    with hs.create(disk / "s", CONTRACT, codec="fast") as writer:
        writer.append(FEW[0])
    writer = hs.append(disk / "s")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StoreError) as e:
        commit(writer, FEW[1])
    assert [p.code for p in e.value.problems] == ["HS506"]
    assert os.strerror(errno.EROFS) in e.value.problems[0].got
    intact(disk / "s", FEW[:1])
    with pytest.raises(StoreError) as e:
        hs.create(disk / "new", CONTRACT)
    assert [p.code for p in e.value.problems] == ["HS501"]
    assert os.strerror(errno.EROFS) in e.value.problems[0].got


class Faulty:
    """Passes calls on, and raises EIO in those that change something from number ``first`` on, ``times`` of them.

    ``done``: the call has done its work before it fails, as when the answer of a server is lost.
    """

    CHANGES = ("write", "settle", "publish", "create", "discard", "remove")

    def __init__(self, backend: Any, *, first: int = 10**9, times: int = 1, done: bool = False) -> None:
        self._backend, self._range, self._done = backend, range(first, first + times), done
        self._lock = threading.Lock()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name not in self.CHANGES:
            return value
        return lambda key, *data: self.call(f"{name} {key}", lambda: value(key, *data))

    def call(self, what: str, do: Callable[[], Any]) -> Any:
        with self._lock:
            self.calls.append(what)
            fails = len(self.calls) - 1 in self._range
        if fails and self._done:
            do()
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), what)
        made = do()
        return FaultySink(self, what, made) if what.startswith("create ") else made


class FaultySink:
    def __init__(self, owner: Faulty, what: str, sink: Any) -> None:
        self._owner, self._what, self._sink = owner, what, sink

    def write(self, data: Any) -> None:
        self._owner.call(f"part of {self._what}", lambda: self._sink.write(data))

    def close(self) -> None:
        self._owner.call(f"close of {self._what}", self._sink.close)

    def abort(self) -> None:
        self._sink.abort()


def write_two_segments(backend: Any) -> None:
    writer = hs.create(backend, CONTRACT) if not hs.exists(backend) else hs.append(backend)
    for i, record in enumerate(FEW):
        if record.id not in writer.ids:
            writer.append(record)
        if i % 2:
            writer.flush()
    writer.close()


def counted(p: Problem) -> int:
    """Return how many records a problem says are committed."""
    found = re.search(r"this writer committed (\d+) record", p.expected)
    assert found is not None, p.expected
    return int(found[1])


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "for-good"])
@pytest.mark.parametrize("done", [False, True], ids=["undone", "done"])
def test_error_at_every_operation(tmp_path: Path, times: int, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of files, and nobody pulls the plug
    counting = Faulty(LocalBackend(str(tmp_path / "whole")))
    write_two_segments(counting)
    intact(tmp_path / "whole", FEW)
    seen = set()
    for first in range(len(counting.calls)):
        path = tmp_path / str(first)
        faulty = Faulty(LocalBackend(str(path)), first=first, times=times, done=done)
        with pytest.raises(StoreError) as e:
            write_two_segments(faulty)
        (p,) = e.value.problems
        failed = faulty.calls[first]
        in_create = failed.startswith("publish ") and "/" not in failed.replace("segments/zarr.json", "")
        assert (p.code, p.severity) == ("HS501" if in_create else "HS506", "error"), failed
        assert os.strerror(errno.EIO) in p.got, failed
        if hs.exists(path):
            n = len(hs.open(path))
            intact(path, FEW[:n])
            if p.code == "HS506":
                assert counted(p) == n, failed
            seen.add(n)
        write_two_segments(LocalBackend(str(path)))
        intact(path, FEW)
    assert seen == ({0, 2, 4} if done else {0, 2})


@pytest.mark.parametrize("decoder", ["native", "zarr"])
def test_error_at_every_reading(tmp_path: Path, decoder: Any) -> None:
    """What cannot be read is HS503 (the root: HS501), and never zeros."""
    write_two_segments(LocalBackend(str(tmp_path / "s")))
    real, count = LocalBackend.read, iter(range(10**9))
    state: dict[str, int] = {"fails": -1}

    class Reading(LocalBackend):
        def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if next(count) == state["fails"]:
                raise OSError(errno.EIO, os.strerror(errno.EIO), key)
            return real(self, key, start, length)

    found, finished = set(), False
    while not finished:
        state["fails"] += 1
        count = iter(range(10**9))
        finished = True
        try:
            store = hs.open(Ranged(Reading(str(tmp_path / "s"))), decoder=decoder)
        except StoreError as e:
            found |= {p.code for p in e.problems}
            finished = False
            continue
        for record in FEW:
            try:
                assert_same_record(store[record.id], record)
            except StoreError as e:
                finished = False
                found |= {p.code for p in e.problems}
    assert state["fails"] > 10
    assert found == {"HS501", "HS503"}


class Ranged:
    """A backend that opens no objects: each range is asked for."""

    def __init__(self, backend: LocalBackend) -> None:
        self.location = backend.location
        self.state, self.read, self.size, self.folders = backend.state, backend.read, backend.size, backend.folders
