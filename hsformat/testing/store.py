"""The conformance suite of places of bytes: what a store needs of a disk, an object store or anything else.

::

    class TestMyBackend(StoreConformance):
        def place(self, name: str) -> Backend:
            return MyBackend(f"my://bucket/{name}")

``place`` returns a new handle each time; handles of one name are of one place, which does not exist at first. Whether
bytes survive a power failure cannot be tested from inside the machine: what is tested is that the writer asks for it,
in the right order, and that whatever was done before a kill, at any point, leaves a store that reads as committed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hsformat.contract import Contract
from hsformat.problems import Severity
from hsformat.record import Record
from hsformat.store import append, create
from hsformat.store import open as open_store
from hsformat.store.backend import Backend, Data, Sink, open_object
from hsformat.testing.builders import assert_same_bytes, assert_same_record, tiny_contract, tiny_record
from hsformat.testing.strategies import contracts, record_lists
from hsformat.validate import validate_store

__all__ = ["Killed", "StoreConformance"]

MIB = 1024 * 1024


class Killed(BaseException):
    """Raised in place of an operation that never came to its end; not an Exception, as a kill is none."""


class Spy:
    """Passes every call on to a backend and notes it; dies at the call ``dies_at``, and at every one after it.

    A write that dies has written half its bytes, if ``torn``; a publish that dies has done nothing, or all. Parts and
    the end of an object that is written in parts are calls ``part`` and ``close``.
    """

    CHANGES = ("write", "settle", "publish", "discard", "create", "remove")

    def __init__(self, backend: Backend, *, dies_at: int | None = None, torn: bool = False) -> None:
        self._backend, self._dies_at, self._torn = backend, dies_at, torn
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name not in self.CHANGES:
            return value

        def call(key: str, *rest: Any) -> Any:
            return self.note(name, key, lambda *data: value(key, *data), *rest)

        return call

    def note(self, name: str, key: str, do: Callable[..., Any], *rest: Any) -> Any:
        """Note a call, and make it unless it is dead."""
        with self._lock:  # a writer writes in threads
            self.calls.append((name, key))
            at = len(self.calls) - 1
        if self._dies_at is None or at < self._dies_at:
            done = do(*rest)
            return _SpySink(self, key, done) if name == "create" else done
        if self._torn and at == self._dies_at:
            if name in ("write", "part"):
                do(bytes(memoryview(rest[0]).cast("B"))[: len(rest[0]) // 2])
            elif name == "publish":
                do(*rest)
        raise Killed


class _SpySink:
    """An object that is written in parts, every one of them noted."""

    def __init__(self, spy: Spy, key: str, sink: Sink) -> None:
        self._spy, self._key, self._sink = spy, key, sink

    def write(self, data: Data) -> None:
        self._spy.note("part", self._key, self._sink.write, data)

    def close(self) -> None:
        self._spy.note("close", self._key, self._sink.close)

    def abort(self) -> None:
        self._sink.abort()


@pytest.mark.filterwarnings("ignore:.*was never closed:RuntimeWarning")  # one that is killed here
class StoreConformance:
    """What every place of bytes must do, as tests. Subclasses override :meth:`place`.

    Attributes
    ----------
    examples
        Of the round trip: how many drawn stores are written and read.
    shrinks
        Whether a failing one is made smaller, which takes a minute.
    kill_step
        A writer is killed at each operation; for a slow place at every so many, and at the last.
    """

    examples: ClassVar[int] = 20
    shrinks: ClassVar[bool] = True
    kill_step: ClassVar[int] = 1

    def place(self, name: str) -> Backend:
        """Return a new handle of the place of this name."""
        raise NotImplementedError("override place()")

    def fresh(self) -> Callable[[], Backend]:
        """Return what opens handles of a place that does not exist yet."""
        name = f"p{secrets.token_hex(8)}"
        return lambda: self.place(name)

    # Bytes.

    def test_a_place_where_nothing_is(self) -> None:
        """Nothing is there, and asking creates nothing."""
        handle = self.fresh()
        for _ in range(2):
            backend = handle()
            assert backend.state() in ("absent", "empty")
            assert backend.size("zarr.json") is None
            assert backend.folders("segments") == []
            with pytest.raises(FileNotFoundError):
                backend.read("zarr.json")
            backend.discard("segments/a-0")

    def test_what_was_written_is_read_whole(self) -> None:
        """Bytes and arrays, of no byte, one and many, by this handle and another."""
        handle = self.fresh()
        writer = handle()
        many = np.random.default_rng(0).integers(0, 256, 5 * MIB + 1, dtype=np.uint8)
        for key, data in (("a/none", b""), ("a/one", b"\0"), ("a/b/many", many), ("a/text", "ü四".encode())):
            writer.write(key, data)
            for backend in (writer, handle()):
                assert backend.size(key) == len(data)
                assert_same_bytes(backend.read(key), bytes(data), key)

    def test_ranges_are_read_exactly(self) -> None:
        """From anywhere, of any length; fewer bytes at the end, never more, never zeros."""
        backend = self.fresh()()
        data = bytes(range(256)) * 5000
        backend.write("a/x", data)
        for start, length in ((0, 0), (0, 1), (1, 255), (7, MIB), (len(data) - 3, 3), (len(data) - 3, 10), (300, None)):
            stop = None if length is None else start + length
            assert_same_bytes(backend.read("a/x", start, length), data[start:stop], (start, length))

    def test_opened_objects_are_read_in_place(self) -> None:
        """Any range, into several arrays one after another; at the end fewer bytes, and nothing else is touched."""
        backend = self.fresh()()
        data = np.random.default_rng(0).integers(0, 256, 3 * MIB + 5, dtype=np.uint8)
        backend.write("a/x", data)
        opened = open_object(backend, "a/x")
        for start, sizes in ((0, (1,)), (7, (0, 3, MIB, 4)), (0, (5,) * 1500), (len(data) - 10, (4, 6)), (3, (MIB,))):
            parts = [np.zeros(n, np.uint8) for n in sizes]
            assert opened.read_into(start, parts) == sum(sizes)
            assert np.array_equal(np.concatenate(parts), data[start : start + sum(sizes)]), (start, sizes[:5])
        parts = [np.full(n, 7, np.uint8) for n in (4, 4, 4)]
        assert opened.read_into(len(data) - 6, parts) == 6
        assert np.concatenate(parts).tolist() == [*data[-6:].tolist(), *[7] * 6]
        assert opened.read_into(len(data) + 3, parts) == 0
        with pytest.raises(FileNotFoundError):
            open_object(backend, "a/none").read_into(0, [np.zeros(1, np.uint8)])

    def test_objects_are_written_in_parts(self) -> None:
        """Of any sizes, bytes and arrays that change afterwards; an object that is there is never overwritten."""
        handle = self.fresh()
        data = np.random.default_rng(0).integers(0, 256, 12 * MIB + 3, dtype=np.uint8)
        sink, buffer = handle().create("a/b/x"), np.empty(MIB, np.uint8)
        for start in range(0, len(data), MIB):
            part = data[start : start + MIB]
            buffer[: len(part)] = part
            sink.write(buffer[: len(part)])
            sink.write(b"")
        sink.close()
        assert handle().size("a/b/x") == len(data)
        assert_same_bytes(handle().read("a/b/x"), data.tobytes(), "a/b/x")
        with pytest.raises(FileExistsError):
            self._replace(handle(), "a/b/x")
        assert handle().read("a/b/x", 0, 5) == data[:5].tobytes()
        empty = handle().create("a/empty")
        empty.close()
        assert handle().read("a/empty") == b""

    def test_what_is_given_up_can_be_discarded(self) -> None:
        """In the middle of an object, twice: whatever is there of it goes with its folder."""
        backend = self.fresh()()
        sink = backend.create("s/a-0/x")
        sink.write(b"x" * MIB)
        sink.abort()
        sink.abort()
        backend.discard("s/a-0")
        assert backend.folders("s") == []
        assert backend.size("s/a-0/x") is None

    def _replace(self, backend: Backend, key: str) -> None:
        sink = backend.create(key)
        try:
            sink.write(b"other")
            sink.close()
        finally:
            sink.abort()

    def test_all_objects_are_listed(self) -> None:
        """However deep, with size and age, sorted; those of a similar name are not. Under no key: all."""
        backend, before = self.fresh()(), time.time()
        for key, n in (("s/a-1/x", 3), ("s/a-1/h/d/c/0/0", MIB), ("s/a-10/x", 1), ("s/zarr.json", 2)):
            backend.write(key, b"x" * n)
        found = backend.listing("s/a-1")
        assert [(e.key, e.size) for e in found] == [("s/a-1/h/d/c/0/0", MIB), ("s/a-1/x", 3)]
        assert all(before - 5 < e.modified < time.time() + 5 for e in found)
        assert [e.key for e in backend.listing("s")] == ["s/a-1/h/d/c/0/0", "s/a-1/x", "s/a-10/x", "s/zarr.json"]
        assert [e.key for e in backend.listing("")] == [e.key for e in backend.listing("s")]
        assert backend.listing("nothing") == []

    def test_removing_takes_one_object(self) -> None:
        """Published ones too; what is not there is an error."""
        handle = self.fresh()
        for key in ("s/a-1/zarr.json", "s/a-1/x", "s/a-1/x2"):
            handle().publish(key, b"x")
        handle().remove("s/a-1/zarr.json")
        handle().remove("s/a-1/x")
        assert [e.key for e in handle().listing("s")] == ["s/a-1/x2"]
        with pytest.raises(FileNotFoundError):
            handle().remove("s/a-1/x")

    def test_writing_never_overwrites(self) -> None:
        """FileExistsError, and the first bytes stay."""
        handle = self.fresh()
        handle().write("a/x", b"first")
        for again in (handle().write, handle().publish):
            with pytest.raises(FileExistsError):
                again("a/x", b"second, longer")
            assert handle().read("a/x") == b"first"

    def test_publishing_is_put_if_absent(self) -> None:
        """The first one wins; the second is told, leaves no trace, and the first bytes stay."""
        handle = self.fresh()
        handle().publish("s/a-0/zarr.json", b"first")
        for again in (handle().publish, handle().write):
            with pytest.raises(FileExistsError):
                again("s/a-0/zarr.json", b"second")
            assert handle().read("s/a-0/zarr.json") == b"first"
        assert handle().state() == "folder"
        assert handle().folders("s") == ["a-0"]

    def test_one_of_many_publishers_wins_and_nobody_sees_a_part(self) -> None:
        """Eight at once, while others look: nothing, or one of the objects whole, and always the same one."""
        for _ in range(5):
            handle = self.fresh()
            handle().write("s/a-0/x", b"x")
            won: Counter[int] = Counter()
            seen: set[bytes] = set()
            start, stop = threading.Barrier(9), threading.Event()

            def publish(i: int, handle: Any = handle, won: Any = won, start: Any = start) -> None:
                start.wait()
                try:
                    handle().publish("s/a-0/zarr.json", bytes([i]) * MIB)
                except FileExistsError:
                    return
                won[i] += 1

            def look(handle: Any = handle, seen: Any = seen, start: Any = start, stop: Any = stop) -> None:
                start.wait()
                while not stop.is_set():
                    try:
                        seen.add(handle().read("s/a-0/zarr.json"))
                    except FileNotFoundError:
                        continue

            threads = [threading.Thread(target=publish, args=(i,)) for i in range(8)]
            reader = threading.Thread(target=look)
            for t in (*threads, reader):
                t.start()
            for t in threads:
                t.join()
            stop.set()
            reader.join()
            assert won.total() == 1, f"{won.total()} publishers were told that they were first"
            (winner,) = won.elements()
            whole = bytes([winner]) * MIB
            assert seen <= {whole}, "a part of an object, or two objects in turn, were seen"
            assert handle().read("s/a-0/zarr.json") == whole

    def test_folders_are_listed_by_name_one_level_deep(self) -> None:
        """Sorted as text; objects are no folders; a folder of a similar name is another one."""
        handle = self.fresh()
        for key in ("s/b-10/x", "s/b-2/x", "s/b-2/y/z", "s/a-0/x", "s/zarr.json", "t/c-0/x", "sx/d-0/x"):
            handle().write(key, b"x")
        assert handle().folders("s") == ["a-0", "b-10", "b-2"]
        assert handle().folders("s/b-2") == ["y"]
        assert handle().folders("s/a-0") == []
        assert handle().folders("nothing") == []
        assert handle().size("s/b-2") is None

    def test_discarding_takes_a_folder_and_nothing_else(self) -> None:
        """``a-1`` is no part of ``a-10``."""
        handle = self.fresh()
        for key in ("s/a-1/x", "s/a-1/h/y", "s/a-10/x", "s/zarr.json"):
            handle().write(key, b"x")
        handle().discard("s/a-1")
        assert handle().folders("s") == ["a-10"]
        assert handle().size("s/a-1/h/y") is None
        assert handle().read("s/a-10/x") == handle().read("s/zarr.json") == b"x"
        handle().write("s/a-1/x", b"again")
        assert handle().read("s/a-1/x") == b"again"

    # Stores.

    def test_drawn_stores_come_back_bit_by_bit(self) -> None:
        """Any contract, any records, several writers and segments; validation at level full finds nothing."""

        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[p for p in Phase if p is Phase.generate or (p is Phase.shrink and self.shrinks)],
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            contract = data.draw(contracts())
            written = data.draw(record_lists(contract))
            handle, writers = self.fresh(), data.draw(st.integers(1, 3))
            first = create(handle(), contract, segment_bytes=data.draw(st.sampled_from((1, 2000, MIB))), chunk_tokens=7)
            opened = [first, *(append(handle()) for _ in range(writers - 1))]
            for i, record in enumerate(written):
                opened[i % writers].append(record)
            for writer in opened:
                writer.close()
            store = open_store(handle(), understands=[f.name for f in contract.fields])
            assert sorted(store.ids) == sorted(r.id for r in written)
            for record in written:
                assert_same_record(store[record.id], record)
            assert not _errors(handle()), [str(p) for p in validate_store(handle(), level="full")]

        run()

    def test_everything_is_durable_before_the_commit(self) -> None:
        """Of each segment: all writes, then ``settle``, then ``publish`` of its ``zarr.json``, and nothing after it."""
        spy = Spy(self.fresh()())
        _write(spy)
        published = [(i, key) for i, (name, key) in enumerate(spy.calls) if name == "publish" and key.count("/") == 2]
        assert len(published) == 2
        for at, key in published:
            prefix = key.removesuffix("zarr.json")
            of_segment = [(i, name) for i, (name, k) in enumerate(spy.calls) if f"{k}/".startswith(prefix)]
            writes = [i for i, name in of_segment if name in ("write", "close")]
            assert any(max(writes) < i < at for i, name in of_segment if name == "settle")
            assert max(i for i, _ in of_segment) == at

    @pytest.mark.parametrize("torn", [False, True])
    def test_killed_at_any_operation(self, torn: bool) -> None:  # noqa: FBT001 - pytest's interface
        """What was committed is whole, what was not does not exist, and another writer goes on and finishes."""
        spy = Spy(self.fresh()())
        _write(spy)
        wanted = {r.id: r for r in _records()}
        committed_counts = set()
        for dies_at in sorted({*range(0, len(spy.calls), self.kill_step), len(spy.calls) - 1}):
            handle = self.fresh()
            dying = Spy(handle(), dies_at=dies_at, torn=torn)
            with pytest.raises(Killed):
                _write(dying)
            if handle().size("zarr.json") is None:  # killed before the store existed
                assert dies_at == 0
                assert not torn
                continue
            store = open_store(handle())
            committed_counts.add(len(store))
            for record_id in store.ids:
                assert_same_record(store[record_id], wanted[record_id])
            assert not _errors(handle())
            with append(handle()) as writer:
                for record in wanted.values():
                    if record.id not in writer.ids:
                        writer.append(record)
            assert sorted(open_store(handle()).ids) == sorted(wanted)
        assert committed_counts == ({0, 2, 4} if torn else {0, 2})

    def test_a_store_is_created_once(self) -> None:
        """The second one is refused and the first is untouched."""
        handle = self.fresh()
        create(handle(), tiny_contract()).close()
        before = handle().read("zarr.json")
        with pytest.raises(ValueError, match="HS501"):
            create(handle(), tiny_contract(codec="fast"))
        assert handle().read("zarr.json") == before


def _contract() -> Contract:
    """Return a contract of one capture: the fewer files, the fewer places to be killed at."""
    capture = {"depth": 4, "norm": "none", "dtype": "bfloat16"}
    return tiny_contract(captures=[capture], layout={"aux": ["d4"], "last": "d4"})


def _records() -> list[Record]:
    return [tiny_record(_contract(), id=f"r{i}", tokens=3 + i, seed=i) for i in range(4)]


def _write(backend: Any) -> None:
    """Create a store of two segments of two records each."""
    writer = create(backend, _contract())
    for i, record in enumerate(_records()):
        writer.append(record)
        if i % 2:
            writer.flush()


def _errors(backend: Backend) -> list[Any]:
    return [p for p in validate_store(backend, level="full") if p.severity is Severity.ERROR]
