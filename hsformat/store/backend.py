"""Where the bytes of a store are: what a reader and a writer need of a place.

A backend is a flat name space of immutable objects under keys such as ``segments/0a-0/zarr.json``. It promises
what the format needs and no more: an object is written whole and durably, and one object can be *published*, which
makes it appear under its key complete or not at all, and never in place of another. Object stores have this as
put-if-absent; a local disk has it as a hard link to a finished file (``local``). Imports nothing of hsformat.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Backend",
    "BufferedSink",
    "Bytes",
    "CountedSource",
    "Data",
    "Distant",
    "Entry",
    "HasFolders",
    "Locks",
    "OpenObject",
    "Opens",
    "Part",
    "Place",
    "RangedObject",
    "Sink",
    "Source",
    "open_object",
]

Bytes = npt.NDArray[np.uint8]
"""One axis of bytes."""

Part = Bytes | memoryview
"""Where bytes are read to."""

Data = bytes | Bytes
"""What is written: bytes, or an array of them, which need not be copied."""


class Entry(NamedTuple):
    """One object in a listing: its key, its size in bytes, when it was last written in seconds since 1970."""

    key: str
    size: int
    modified: float


class OpenObject(Protocol):
    """An object that is read in many places; it is let go when nobody refers to it."""

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        """Fill arrays, one after another, with the bytes from ``start`` on; return how many there were (OSError)."""
        ...


@runtime_checkable
class Opens(Protocol):
    """What a source may have beside: an object once opened is read in place, without copies. May be left out."""

    def open_object(self, key: str) -> OpenObject:
        """Open an object. FileNotFoundError if there is none."""
        ...


@runtime_checkable
class Distant(Protocol):
    """What a source may have beside where each answer takes its time. May be left out."""

    requests_at_once: int
    """Small objects that are worth reading at once, in threads."""


@runtime_checkable
class HasFolders(Protocol):
    """What a place may have beside where a folder may be there without an object in it. May be left out."""

    def touched(self, key: str) -> float | None:
        """Return when anything was last made in a folder or below it, in seconds since 1970; None: there is none."""
        ...


@runtime_checkable
class Locks(Protocol):
    """What a place may have beside where processes can keep each other out. May be left out; writers need it not."""

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Hold an object until the end of the block or of the process; nobody who only reads or writes is kept out.

        BlockingIOError: somebody else holds it. Where that cannot be done, nothing is held.
        """
        ...


class Sink(Protocol):
    """A new object that is written from its beginning to its end, and never by two threads at once. OSError."""

    def write(self, data: Data) -> None:
        """Add bytes, all of them; the array may be changed afterwards."""
        ...

    def close(self) -> None:
        """Make the object whole and durable, as :meth:`Backend.write` does."""
        ...

    def abort(self) -> None:
        """Let it go, after an error or twice; what becomes of its bytes is for :meth:`Backend.discard`."""
        ...


class Source(Protocol):
    """What a reader needs of a place. Every method may raise OSError; keys have ``/`` between parts."""

    @property
    def location(self) -> str:
        """The path or address, as the user gave it."""
        ...

    def state(self) -> Literal["absent", "empty", "file", "folder"]:
        """Return what is at the location: ``folder`` is one that holds something."""
        ...

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return ``length`` bytes from ``start`` (fewer at the end), or all. FileNotFoundError if there is none."""
        ...

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if there is none."""
        ...

    def folders(self, key: str) -> list[str]:
        """Return the names of the folders directly under a key, sorted; empty if there is nothing."""
        ...


class Backend(Source, Protocol):
    """What a writer needs of a place, too."""

    def write(self, key: str, data: Data) -> None:
        """Write a new object whole and durably. FileExistsError if there is one: nothing is overwritten."""
        ...

    def create(self, key: str) -> Sink:
        """Begin a new object, of any size, in bounded memory. FileExistsError if there is one, here or at its end.

        A place that has nothing like it returns ``BufferedSink(self.write, key)``.
        """
        ...

    def settle(self, key: str) -> None:
        """Return when the names of all objects under a key are durable, too."""
        ...

    def publish(self, key: str, data: bytes) -> None:
        """Make an object appear whole, durably, if there is none. FileExistsError if there is one.

        The names that lead to it are durable, too.
        """
        ...

    def discard(self, key: str) -> None:
        """Remove everything under a key, as far as that is possible; for what was never published.

        FileExistsError, and nothing is removed, if it was: if there is a ``zarr.json`` directly under the key. Where
        links are, they are removed, and nothing that they lead to.
        """
        ...

    def listing(self, key: str) -> list[Entry]:
        """Return all objects under a key, however deep, sorted by key; empty if there is nothing.

        Those of the whole place if the key is empty. A link to a folder is one object, alone under its own key.
        """
        ...

    def remove(self, key: str) -> None:
        """Remove one object durably, published or not. FileNotFoundError if there is none."""
        ...


Place = str | os.PathLike[str] | Backend
"""Where a store is: a path, or a backend that somebody else wrote (``hsformat.testing.StoreConformance`` tests it)."""


class BufferedSink:
    """A sink that holds everything until it is closed, for places that write whole objects alone."""

    def __init__(self, write: Callable[[str, bytes], None], key: str) -> None:
        self._write, self._key, self._data = write, key, bytearray()

    def write(self, data: Data) -> None:
        """Keep a copy."""
        self._data += data if isinstance(data, bytes) else data.data

    def close(self) -> None:
        """Write the object."""
        self._write(self._key, bytes(self._data))

    def abort(self) -> None:
        """Forget everything."""
        self._data.clear()


def open_object(source: Source, key: str) -> OpenObject:
    """Open an object of any source for reading in place; one that does not open objects is asked for each range."""
    return source.open_object(key) if isinstance(source, Opens) else RangedObject(source, key)


class RangedObject:
    """An object of a source that reads ranges alone: each is copied to where it is wanted."""

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, key

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        """Read one range, and cut it up."""
        data = self._source.read(self._key, start, sum(map(len, parts)))
        at = 0
        for part in parts:
            piece = data[at : at + len(part)]
            (part.data if isinstance(part, np.ndarray) else part)[: len(piece)] = piece
            at += len(piece)
        return at


class CountedSource:
    """Another source of which the bytes that are read are counted; ``tick`` is told after each read."""

    def __init__(self, source: Source, tick: Callable[[int], None]) -> None:
        self._source, self._tick, self._lock = source, tick, threading.Lock()
        self.bytes_read = 0
        self.location = source.location
        self.state, self.size, self.folders = source.state, source.size, source.folders

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes, and count them."""
        data = self._source.read(key, start, length)
        self.count(len(data))
        return data

    def open_object(self, key: str) -> OpenObject:
        """Open an object whose bytes are counted as well."""
        return _Counted(open_object(self._source, key), self.count)

    def count(self, nbytes: int) -> None:
        """Add to what was read."""
        with self._lock:  # zarr reads in threads
            self.bytes_read += nbytes
            self._tick(self.bytes_read)


class _Counted:
    def __init__(self, opened: OpenObject, count: Callable[[int], None]) -> None:
        self._opened, self._count = opened, count

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        n = self._opened.read_into(start, parts)
        self._count(n)
        return n
