"""The conformance suite passes for local folders, and fails for every place of bytes that breaks a promise."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hsformat.store import building
from hsformat.store.backend import Backend, BufferedSink, Entry
from hsformat.store.local import LocalBackend
from hsformat.testing import StoreConformance, assert_same_bytes
from hsformat.testing.store import MIB


class TestLocalBackend(StoreConformance):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path):
        self.root = tmp_path

    def place(self, name):
        return LocalBackend(str(self.root / name))


class TestInMemory(StoreConformance):
    """A place of another kind, which has no folders, as object stores."""

    examples = 5

    @pytest.fixture(autouse=True)
    def _objects(self):
        self.places: dict[str, dict[str, bytes]] = {}

    def place(self, name):
        return InMemory(name, self.places.setdefault(name, {}))


class InMemory:
    def __init__(self, name: str, objects: dict[str, bytes]) -> None:
        self.location, self.objects = f"memory:{name}", objects

    def state(self):
        return "folder" if self.objects else "absent"

    def read(self, key, start=0, length=None):
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key][start : None if length is None else start + length]

    def size(self, key):
        data = self.objects.get(key)
        return None if data is None else len(data)

    def folders(self, key):
        inside = [k.removeprefix(f"{key}/") for k in list(self.objects) if k.startswith(f"{key}/")]
        return sorted({k.split("/")[0] for k in inside if "/" in k})

    def write(self, key, data):
        if self.objects.setdefault(key, new := bytes(data)) is not new:
            raise FileExistsError(key)

    def publish(self, key, data):
        if self.objects.setdefault(key, new := bytes(bytearray(data))) is not new:  # a copy: interned b"" is no winner
            raise FileExistsError(key)

    def create(self, key):
        if key in self.objects:
            raise FileExistsError(key)
        return BufferedSink(self.write, key)

    def listing(self, key):
        under = f"{key}/" if key else ""
        return [Entry(k, len(v), time.time()) for k, v in sorted(self.objects.items()) if k.startswith(under)]

    def remove(self, key):
        if self.objects.pop(key, None) is None:
            raise FileNotFoundError(key)

    def settle(self, key):
        pass

    def discard(self, key):
        for k in [k for k in self.objects if k.startswith(f"{key}/")]:
            del self.objects[k]


class PublishOverwrites(LocalBackend):
    def publish(self, key, data):
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{os.urandom(4).hex()}.tmp")
        temporary.write_bytes(data)
        temporary.rename(path)


class PublishInPlace(LocalBackend):
    """Put-if-absent, but visible before it is whole."""

    def publish(self, key, data):
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as f:
            f.write(data[: len(data) // 2])
            f.flush()
            time.sleep(0.05)  # long enough to be seen
            f.write(data[len(data) // 2 :])


class CheckThenWrite(LocalBackend):
    """Looks whether there is something, then replaces what has come since."""

    def publish(self, key, data):
        if self.size(key) is not None:
            raise FileExistsError(key)
        time.sleep(0.05)  # long enough to be seen
        PublishOverwrites.publish(self, key, data)


class PublishSilently(LocalBackend):
    def publish(self, key, data):
        if self.size(key) is None:
            super().publish(key, data)


class WriteOverwrites(LocalBackend):
    def write(self, key, data):
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class LazyWriter(LocalBackend):
    """Keeps small objects to itself until they are settled."""

    def write(self, key, data):
        self.kept = {**getattr(self, "kept", {}), key: bytes(data)}

    def read(self, key, start=0, length=None):
        if key in getattr(self, "kept", {}):
            return self.kept[key][start : None if length is None else start + length]
        return super().read(key, start, length)

    def size(self, key):
        return len(self.kept[key]) if key in getattr(self, "kept", {}) else super().size(key)


class ReadsAll(LocalBackend):
    def read(self, key, start=0, length=None):
        return super().read(key)


class ShortReads(LocalBackend):
    def read(self, key, start=0, length=None):
        return super().read(key, start, 65536 if length is None else min(length, 65536))


class ZerosAtTheEnd(LocalBackend):
    def read(self, key, start=0, length=None):
        data = super().read(key, start, length)
        return data if length is None else data.ljust(length, b"\0")


class EmptyForMissing(LocalBackend):
    def read(self, key, start=0, length=None):
        return super().read(key, start, length) if self.size(key) is not None else b""


class SizeOfFolders(LocalBackend):
    def size(self, key):
        path = self._root / key
        return path.stat().st_size if path.exists() else None


class ListsByPrefix(LocalBackend):
    def folders(self, key):
        found = super().folders(key)
        alike = [d for d in super().folders(".") if d.startswith(key)]
        return sorted({*found, *(n for d in alike for n in LocalBackend.folders(self, d))})


class ListsFiles(LocalBackend):
    def folders(self, key):
        path = self._root / key
        return sorted(p.name for p in path.iterdir()) if path.is_dir() else []


class DiscardsByPrefix(LocalBackend):
    def discard(self, key):
        folder, _, name = key.rpartition("/")
        for found in self.folders(folder):
            if found.startswith(name):
                super().discard(f"{folder}/{found}")


class DiscardsNothing(LocalBackend):
    def discard(self, key):
        pass


class CreatesOnLooking(LocalBackend):
    def __init__(self, path):
        super().__init__(path)
        (Path(path) / "segments" / "a-0").mkdir(parents=True, exist_ok=True)


class ForgetsWhatItPublished(LocalBackend):
    """Puts each writer's first commit record where nobody looks."""

    def publish(self, key, data):
        super().publish(f"{key}.lost" if key.endswith("-0/zarr.json") else key, data)


class OneByteFlipped(LocalBackend):
    def write(self, key, data):
        data = bytes(data)
        super().write(key, data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 5 else data)


class _Sink:
    def __init__(self, sink):
        self.sink = sink

    def __getattr__(self, name):
        return getattr(self.sink, name)


class KeepsReferences(LocalBackend):
    """Writes what the arrays hold when the object is closed."""

    def create(self, key):
        class Late(_Sink):
            parts: ClassVar[list] = []

            def write(self, data):
                self.parts = [*self.parts, data]

            def close(self):
                for part in self.parts:
                    self.sink.write(part)
                self.sink.close()

        return Late(super().create(key))


class CreateOverwrites(LocalBackend):
    def create(self, key):
        (self._root / key).unlink(missing_ok=True)
        return super().create(key)


class StaysAfterAbort(LocalBackend):
    """What is given up is written by another name, which nobody discards."""

    def create(self, key):
        other = self._root / "s/b-0/x"

        class Stays(_Sink):
            def abort(self):
                self.sink.abort()
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_bytes(b"")

        return Stays(super().create(key))


class ListsOneLevel(LocalBackend):
    def listing(self, key):
        return [e for e in super().listing(key) if "/" not in e.key.removeprefix(f"{key}/")]


class RemovesQuietly(LocalBackend):
    def remove(self, key):
        (self._root / key).unlink(missing_ok=True)


class ReadsAcross(LocalBackend):
    """Fills arrays beyond the end of the object."""

    def open_object(self, key):
        real = super().open_object(key)

        class Across:
            def read_into(self, start, parts):
                for part in parts:
                    part[...] = 0
                return real.read_into(start, parts)

        return Across()


CAUGHT_BY: dict[type[LocalBackend], set[str]] = {
    PublishOverwrites: {
        "test_publishing_is_put_if_absent", "test_writing_never_overwrites",
        "test_one_of_many_publishers_wins_and_nobody_sees_a_part",
    },
    PublishInPlace: {"test_one_of_many_publishers_wins_and_nobody_sees_a_part"},
    CheckThenWrite: {"test_one_of_many_publishers_wins_and_nobody_sees_a_part"},
    PublishSilently: {"test_publishing_is_put_if_absent"},
    WriteOverwrites: {"test_writing_never_overwrites"},
    LazyWriter: {"test_what_was_written_is_read_whole", "test_drawn_stores_come_back_bit_by_bit"},
    ReadsAll: {"test_ranges_are_read_exactly"},
    ShortReads: {"test_what_was_written_is_read_whole", "test_ranges_are_read_exactly"},
    ZerosAtTheEnd: {"test_ranges_are_read_exactly"},
    EmptyForMissing: {"test_a_place_where_nothing_is"},
    SizeOfFolders: {"test_folders_are_listed_by_name_one_level_deep"},
    ListsByPrefix: {"test_folders_are_listed_by_name_one_level_deep"},
    KeepsReferences: {"test_objects_are_written_in_parts"},
    CreateOverwrites: {"test_objects_are_written_in_parts"},
    StaysAfterAbort: {"test_what_is_given_up_can_be_discarded"},
    ListsOneLevel: {"test_all_objects_are_listed"},
    RemovesQuietly: {"test_removing_takes_one_object"},
    ReadsAcross: {"test_opened_objects_are_read_in_place"},
    ListsFiles: {"test_folders_are_listed_by_name_one_level_deep"},
    DiscardsByPrefix: {"test_discarding_takes_a_folder_and_nothing_else"},
    DiscardsNothing: {"test_discarding_takes_a_folder_and_nothing_else"},
    CreatesOnLooking: {"test_a_place_where_nothing_is", "test_a_store_is_created_once"},
    ForgetsWhatItPublished: {"test_killed_at_any_operation", "test_drawn_stores_come_back_bit_by_bit"},
    OneByteFlipped: {"test_drawn_stores_come_back_bit_by_bit", "test_what_was_written_is_read_whole"},
}  # fmt: skip


def suite_of(place: Any) -> StoreConformance:
    suite = type("Suite", (StoreConformance,), {"shrinks": False})()
    suite.place = place
    return suite


def run(suite: StoreConformance, test: str) -> None:
    getattr(suite, test)(**({"torn": True} if test == "test_killed_at_any_operation" else {}))


@pytest.mark.filterwarnings("ignore:.*was never closed:RuntimeWarning")
@pytest.mark.parametrize(
    ("wrong", "test"),
    [(wrong, test) for wrong, tests in CAUGHT_BY.items() for test in sorted(tests)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_place_that_breaks_a_promise_fails(wrong, test, tmp_path):
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, OSError)):
        run(suite_of(lambda name: wrong(str(tmp_path / name))), test)


def test_megabytes_that_differ_are_told_in_a_line():
    """Where the environment has CI, pytest explained 12 MiB for minutes: a worker was killed by the limit of a test."""
    same, size = b"\0" * (12 * MIB), 12 * MIB
    assert_same_bytes(same, bytes(size))
    other = bytearray(same)
    other[size - 2] = 7
    with pytest.raises(AssertionError, match=rf"^a/x: byte {size - 2} of {size} is 0x00, not 0x07$"):
        assert_same_bytes(same, bytes(other), "a/x")
    with pytest.raises(AssertionError, match=rf"{size} bytes, not {size - 1}"):
        assert_same_bytes(same, same[1:], "a/x")


def test_a_writer_that_commits_before_it_settles_is_found(tmp_path, monkeypatch):
    real = building.Building.commit

    def hasty(self: building.Building, producer: Any) -> int:
        class Hasty:
            def __init__(self, backend: Backend) -> None:
                self.backend = backend

            def __getattr__(self, name: str) -> Any:
                return (lambda _key: None) if name == "settle" else getattr(self.backend, name)

        self._backend = Hasty(self._backend)
        return real(self, producer)

    monkeypatch.setattr(building.Building, "commit", hasty)
    with pytest.raises(AssertionError):
        run(suite_of(lambda n: LocalBackend(str(tmp_path / n))), "test_everything_is_durable_before_the_commit")


def test_every_test_of_the_suite_has_failed_for_some_place():
    tests = {n for n in dir(StoreConformance) if n.startswith("test_")}
    assert {*set().union(*CAUGHT_BY.values()), "test_everything_is_durable_before_the_commit"} == tests
