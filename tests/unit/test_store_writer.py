"""Writing that fails: what is committed stays, nothing is overwritten, and the user is told how to go on."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import assert_same_record, tiny_contract, tiny_record
from failing_writes import code_of, fail_after

import hsformat.store as hs
from hsformat.problems import Severity, StoreError
from hsformat.record import Record
from hsformat.store import local
from hsformat.store.backend import BufferedSink, Entry
from hsformat.store.commit import load_commit
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import group_json, root_attribute, segment_names

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", seed=i) for i in range(6)]


def write_block(out: hs.Writer, records: list[Record]) -> None:
    with out:
        for record in records:
            out.append(record)
        out.flush()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize(("method", "calls"), [("write", 0), ("write", 9), ("settle", 0), ("publish", 0)])
def test_failed_write_keeps_what_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, calls: int, number: int
) -> None:  # Model-Optimizer PR#2080
    out = hs.create(tmp_path / "s", CONTRACT)
    out.append(RECORDS[0])
    out.flush()
    with monkeypatch.context() as m:
        fail_after(m, method, calls, number)
        with pytest.raises(StoreError) as e:
            write_block(out, RECORDS[1:3])
    (p,) = e.value.problems
    assert (p.code, p.severity) == ("HS506", Severity.ERROR)
    assert os.strerror(number) in p.got
    assert "'r1', 'r2'" in p.got
    assert "committed 1 record" in p.expected
    assert set(out.ids) == {"r0"}
    assert code_of(lambda: out.append(RECORDS[3])) == "HS506"
    store = hs.open(tmp_path / "s")
    assert (store.ids, store.problems) == (["r0"], [])  # the half of a segment is gone
    with hs.append(tmp_path / "s") as again:
        for record in RECORDS:
            if record.id not in again.ids:
                again.append(record)
    store = hs.open(tmp_path / "s")
    assert store.ids == [r.id for r in RECORDS]
    for record in RECORDS:
        assert_same_record(store[record.id], record)


def test_failure_after_the_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = hs.create(tmp_path / "s", CONTRACT)
    real = LocalBackend.publish

    def publish(self: LocalBackend, key: str, data: bytes) -> None:
        real(self, key, data)
        raise OSError(errno.EIO, "Input/output error")

    out.append(RECORDS[0])
    with monkeypatch.context() as m:
        m.setattr(LocalBackend, "publish", publish)
        assert code_of(out.flush) == "HS506"
    assert set(out.ids) == {"r0"}
    assert hs.open(tmp_path / "s").ids == ["r0"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT be KeyboardInterrupt, also where a background job of a shell has it ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def interrupt_main() -> None:
    """Press Ctrl-C, and give it time: a signal comes to the main thread alone."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(0.1)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("after_commit", [False, True])
def test_interrupt_inside_a_commit_writes_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after_commit: bool
) -> None:
    real = LocalBackend.publish

    def publish(self: LocalBackend, key: str, data: bytes) -> None:
        if after_commit:
            real(self, key, data)
        interrupt_main()
        if not after_commit:
            real(self, key, data)

    out = hs.create(tmp_path / "s", CONTRACT)
    monkeypatch.setattr(LocalBackend, "publish", publish)
    with pytest.raises(KeyboardInterrupt):
        write_block(out, RECORDS[:1])
    store = hs.open(tmp_path / "s")
    assert (store.ids, store.problems) == (["r0"], [])
    assert out.records_committed == 1


def test_commit_of_unknown_fate_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, down = LocalBackend.publish, OSError(errno.EIO, "Input/output error")

    def publish(self: LocalBackend, key: str, data: bytes) -> None:
        real(self, key, data)
        for method in ("read", "size"):
            m.setattr(LocalBackend, method, unreachable)
        raise down

    def unreachable(self: LocalBackend, *_: Any) -> None:
        raise down

    out = hs.create(tmp_path / "s", CONTRACT)
    out.append(RECORDS[0])
    with monkeypatch.context() as m:
        m.setattr(LocalBackend, "publish", publish)
        with pytest.raises(StoreError, match="unknown state") as e:
            out.flush()
    (p,) = e.value.problems
    assert (p.code, p.severity) == ("HS506", Severity.ERROR)
    assert "hs.append" in p.fix
    assert code_of(lambda: out.append(RECORDS[1])) == "HS506"
    store = hs.open(tmp_path / "s")
    assert_same_record(store["r0"], RECORDS[0])
    with hs.append(tmp_path / "s") as again:
        assert set(again.ids) == {"r0"}


def test_what_is_published_is_not_discarded(tmp_path: Path) -> None:
    with hs.create(tmp_path / "s", CONTRACT) as out:
        out.append(RECORDS[0])
    prefix = hs.open(tmp_path / "s").segments[0].prefix
    with pytest.raises(FileExistsError):
        LocalBackend(str(tmp_path / "s")).discard(prefix)
    assert_same_record(hs.open(tmp_path / "s")[0], RECORDS[0])


@pytest.mark.usefixtures("ctrl_c")
def test_second_interrupt_writes_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the writer waits for the end of what the first has interrupted."""
    real = LocalBackend.publish

    def publish(self: LocalBackend, key: str, data: bytes) -> None:
        interrupt_main()
        interrupt_main()
        real(self, key, data)

    out = hs.create(tmp_path / "s", CONTRACT)
    out.append(RECORDS[0])
    with monkeypatch.context() as m:
        m.setattr(LocalBackend, "publish", publish)
        with pytest.raises(KeyboardInterrupt):
            out.flush()
        assert (out.records_committed, list(out.ids)) == (1, ["r0"])  # which waits
    out.append(RECORDS[1])  # a notebook goes on
    out.close()
    store = hs.open(tmp_path / "s")
    assert (store.ids, store.problems) == (["r0", "r1"], [])
    assert (out.records_committed, out.segments_committed, out.bytes_written) == (2, 2, store.nbytes)
    for i in range(2):
        assert_same_record(store[i], RECORDS[i])


@pytest.mark.parametrize("full_after", [0, 1, 3])
def test_a_disk_that_fills_up_while_chunks_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_after: int
) -> None:  # Model-Optimizer PR#2080
    """In the threads that encode: the record at hand is refused, or a later one, and what was committed stays."""
    out = hs.create(tmp_path / "s", CONTRACT, chunk_tokens=2, threads=1)
    out.append(RECORDS[0])
    out.flush()
    real, count = local.LocalSink.write, iter(range(10_000))

    def write(self: local.LocalSink, data: Any) -> None:
        if next(count) >= full_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    with monkeypatch.context() as m:
        m.setattr(local.LocalSink, "write", write)
        with pytest.raises(StoreError, match="No space left") as e:
            write_block(out, RECORDS[1:])
    (p,) = e.value.problems
    assert p.code == "HS506"
    assert "'r1'" in p.got
    assert set(out.ids) == {"r0"}
    store = hs.open(tmp_path / "s")
    assert (store.ids, store.problems) == (["r0"], [])


@pytest.mark.parametrize("late", [0.0, 0.2])
@pytest.mark.parametrize("started", [0, 1])
def test_a_process_without_threads_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int, late: float
) -> None:
    """While chunks are handed over, or at the commit: an error with its code, and no waiting for ever.

    Where a thread is there already, it may have done the work by the time that no second one can be started.
    """
    out = hs.create(tmp_path / "s", CONTRACT, chunk_tokens=2, threads=2)
    real, count = threading.Thread.start, iter(range(10_000))

    def start(self: threading.Thread) -> None:
        if "encode" in self.name and next(count) >= started:
            time.sleep(late)
            raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", start)
        with pytest.raises(StoreError, match="can't start new thread") as e:
            write_block(out, RECORDS)
    assert e.value.problems[0].code == "HS506"
    assert hs.open(tmp_path / "s").ids == []


def test_a_record_is_not_taken_later_by_a_thread_that_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if "hsformat-writer" in self.name:
            raise RuntimeError("can't start new thread")
        real(self)

    with hs.create(tmp_path / "s", CONTRACT) as out:
        with monkeypatch.context() as m:
            m.setattr(threading.Thread, "start", start)
            assert code_of(lambda: out.append(RECORDS[0])) == "HS506"
        assert not out.ids
        out.append(RECORDS[0])
    assert hs.open(tmp_path / "s").ids == ["r0"]


def test_memory_does_not_grow_with_the_segment(tmp_path: Path) -> None:
    """A segment of 64 MB passes through a few chunks of 128 KiB."""
    wide = tiny_contract(target={"hidden_size": 256})
    states = {k: np.random.default_rng(0).normal(size=(4096, 256)).astype(h.dtype) for k, h in
              tiny_record(wide, tokens=2).hidden.items()}  # fmt: skip
    records = [tiny_record(wide, f"r{i}", tokens=4096, hidden=states) for i in range(8)]
    with hs.create(tmp_path / "s", wide, codec="fast", threads=2) as out:
        out.append(records[0])
        tracemalloc.start()
        for record in records[1:]:
            out.append(record)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(hs.open(tmp_path / "s").segments) == 1
    assert peak < 40e6, peak  # a record of 8 MB, scanned in blocks of 4 MB as float32


def test_a_segment_is_committed_by_time(tmp_path: Path) -> None:
    with hs.create(tmp_path / "s", CONTRACT, commit_seconds=1e-9) as out:
        out.append(RECORDS[0])
        assert hs.open(tmp_path / "s").ids == ["r0"]


class InMemory:
    """A backend without a disk, so that hundreds of stores are written quickly."""

    def __init__(self) -> None:
        self.location, self.files = "memory", dict[str, bytes]()

    def state(self) -> str:
        return "folder" if self.files else "absent"

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", key)
        return self.files[key][start : None if length is None else start + length]

    def size(self, key: str) -> int | None:
        return len(self.files[key]) if key in self.files else None

    def folders(self, key: str) -> list[str]:
        return sorted({k.split("/")[1] for k in self.files if k.startswith(f"{key}/") and k.count("/") > 1})

    def write(self, key: str, data: Any) -> None:
        if key in self.files:
            raise FileExistsError(errno.EEXIST, "File exists", key)
        self.files[key] = bytes(data)

    publish = write

    def create(self, key: str) -> BufferedSink:
        return BufferedSink(self.write, key)

    def listing(self, key: str) -> list[Entry]:
        under = f"{key}/" if key else ""
        return [Entry(k, len(v), 0.0) for k, v in sorted(self.files.items()) if k.startswith(under)]

    def remove(self, key: str) -> None:
        del self.files[key]

    def settle(self, key: str) -> None:
        pass

    def discard(self, key: str) -> None:
        assert f"{key}/zarr.json" not in self.files
        for k in [k for k in self.files if k.startswith(f"{key}/")]:
            del self.files[k]


WAITS = ("append", "flush", "_do", "_settled", "_ready")


def interrupt(at: int) -> Callable[[Any, str, Any], Any]:
    """Return a trace function that raises KeyboardInterrupt before a line of a writer in the caller's thread."""
    lines = iter(range(10**9))
    codes = {f.__code__ for n, f in vars(hs.Writer).items() if n in WAITS and inspect.isfunction(f)}

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line" and next(lines) == at:
            raise KeyboardInterrupt
        return trace

    return trace


def test_interrupt_before_any_line_stores_each_record_once() -> None:
    """Whoever catches it goes on with the records whose ids the writer does not know."""
    contract = tiny_contract(
        captures=[{"depth": 4, "norm": "none", "dtype": "float32"}], layout={"aux": ["d4"], "last": None}, codec="fast"
    )
    records = [tiny_record(contract, f"r{i}", tokens=3 + i, seed=i) for i in range(3)]
    options: dict[str, Any] = {"chunk_tokens": 4, "segment_bytes": 2 * records[2].nbytes + 100, "producer": None}
    reached = 0
    for at in range(10_000):
        backend = InMemory()
        backend.publish("zarr.json", group_json(root_attribute(contract)))
        out, interrupted = hs.Writer(backend, contract, (), **options), False
        while True:
            old = sys.gettrace()
            try:
                sys.settrace(None if interrupted else interrupt(at))
                for record in records:
                    if record.id not in out.ids:
                        out.append(record)
                out.flush()
            except KeyboardInterrupt:
                interrupted = True
            else:
                break
            finally:
                sys.settrace(old)
        commits = [load_commit(backend, name)[0] for name in segment_names(backend)]
        store = hs.Store(backend, contract, [c for c in commits if c], [])
        assert sorted(store.ids) == ["r0", "r1", "r2"], at
        assert (out.records_committed, out.segments_committed) == (3, len(store.segments)), at
        assert out.bytes_written == store.nbytes
        for record in records:
            assert_same_record(store[record.id], record)
        if not interrupted:
            reached = at
            break
    assert reached > 50


def test_chunk_beyond_two_gigabytes_is_refused(tmp_path: Path) -> None:  # numcodecs#80, zarr-python#487
    wide = tiny_contract(target={"hidden_size": 7168})
    with pytest.raises(StoreError, match=str(2**31 - 17)) as e:
        hs.create(tmp_path / "s", wide, chunk_tokens=65536 * 4)
    assert e.value.problems[0].code == "HS501"
    assert not (tmp_path / "s").exists()
    hs.create(tmp_path / "s", wide).close()
    assert code_of(lambda: hs.append(tmp_path / "s", chunk_tokens=65536 * 4)) == "HS501"


def test_small_arrays_stay_below_the_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = {"name": "top", "axis": "record", "dtype": "float32", "shape": [40], "must_understand": False}
    contract = tiny_contract(fields=[field])
    for module in ("size", "pending"):
        monkeypatch.setattr(f"hsformat.store.{module}.MAX_CHUNK_BYTES", 400)  # of all arrays together but the states
    with hs.create(tmp_path / "s", contract, chunk_tokens=16) as out:
        for i in range(3):
            out.append(tiny_record(contract, f"r{i}", tokens=10))  # 160 bytes of the field each
    assert [s.ids for s in hs.open(tmp_path / "s").segments] == [("r0",), ("r1",), ("r2",)]


@pytest.mark.parametrize("axis", ["token", "record"])
def test_a_field_beyond_two_gigabytes_is_refused(tmp_path: Path, axis: str) -> None:  # numcodecs#80
    field = {"name": "top", "axis": axis, "dtype": "float32", "shape": [2**29], "must_understand": False}
    assert code_of(lambda: hs.create(tmp_path / "s", tiny_contract(fields=[field]))) == "HS501"


def test_sizes_must_be_positive(tmp_path: Path) -> None:
    wrong = ({"segment_bytes": 0}, {"chunk_tokens": -1}, {"chunk_tokens": 1.5}, {"threads": "2"}, {"threads": 0},
             {"commit_seconds": float("nan")})  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match="above 0"):
            hs.create(tmp_path / "s", CONTRACT, **options)  # type: ignore[arg-type]  # a dict
    with pytest.raises(ValueError, match="unsupported"):
        hs.create(tmp_path / "s", CONTRACT, producer={"x": object()})
    assert not (tmp_path / "s").exists()
    out = hs.create(tmp_path / "s", CONTRACT)
    with pytest.raises(ValueError, match="unsupported"):
        out.producer = {"x": object()}


def test_counts_and_closing(tmp_path: Path) -> None:
    out = hs.create(tmp_path / "s", CONTRACT, producer={"name": "test"})
    out.flush()  # nothing to do, no segment
    assert out.append(RECORDS[0]) == []
    out.close()
    out.close()
    assert (out.records_committed, out.segments_committed) == (1, 1)
    store = hs.open(tmp_path / "s")
    assert out.bytes_written == store.nbytes
    assert store.segments[0].producer == {"name": "test"}
    assert code_of(lambda: out.append(RECORDS[1])) == "HS506"
    assert len(segment_names(LocalBackend(str(tmp_path / "s")))) == 1


def test_notes_are_returned(tmp_path: Path) -> None:  # speculators#613
    states = RECORDS[0].hidden["d1"]
    long = np.repeat(states, 40, axis=0)
    long[5] = 0
    hidden = {k: np.repeat(h, 40, axis=0) for k, h in RECORDS[0].hidden.items()} | {"d1": long}
    with hs.create(tmp_path / "s", CONTRACT) as out:
        problems = out.append(tiny_record(CONTRACT, "z", tokens=280, hidden=hidden))
    assert [(p.code, p.severity) for p in problems] == [("HS202", Severity.NOTE)]
