"""A new object of any size in an object store, in bounded memory. Imports ``backend`` alone of hsformat."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

from hsformat.store.backend import Data

__all__ = ["PART_BYTES", "ObjectSink", "Uploads"]

PART_BYTES = 8 * 1024 * 1024
"""Bytes of a part: 10,000 of them, the most that S3 takes, are 80 GB."""


class Uploads(Protocol):
    """What a sink needs of its backend."""

    def size(self, key: str) -> int | None:
        """Return the size of an object; None if there is none."""
        ...

    def write(self, key: str, data: Data) -> None:
        """Write a whole object. FileExistsError if there is one."""
        ...

    def upload(self, key: str, parts: Iterator[bytes]) -> None:
        """Write an object in parts; whatever ``parts`` raises gives up the upload, and is raised."""
        ...


class ObjectSink:
    """An object that is being written; nothing is visible of it before it is closed.

    Up to :data:`PART_BYTES` it is one put-if-absent. A larger one is a multipart upload by a thread of its own, which
    holds at most a handful of parts: no client library can make its completion conditional, so that an object of this
    name is looked for at the beginning and once more right before it. Between that and the completion another one could
    be replaced, if two writers wrote one key: those of this library never do, since each has a random prefix, and what
    commits a segment is always put-if-absent.
    """

    def __init__(self, backend: Uploads, key: str) -> None:
        self._backend, self._key = backend, key
        self._buffer = bytearray()
        self._upload: _Upload | None = None

    def write(self, data: Data) -> None:
        """Keep a copy, and hand over parts that are full."""
        view = memoryview(data) if isinstance(data, bytes) else data.data
        while len(view):
            room = PART_BYTES - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == PART_BYTES and len(view):
                self._hand_over()

    def _hand_over(self) -> None:
        self._upload = self._upload or _Upload(self._backend, self._key)
        part, self._buffer = bytes(self._buffer), bytearray()
        self._upload.put(part)

    def close(self) -> None:
        """Write what is left, and make the object visible."""
        if self._upload is None:
            self._backend.write(self._key, bytes(self._buffer))
        else:
            self._hand_over()
            if self._backend.size(self._key) is not None:
                self._upload.end(_Mark.GIVE_UP)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._key)
            self._upload.end(_Mark.COMPLETE)
            self._upload.check()
        self._buffer = bytearray()

    def abort(self) -> None:
        """Give the upload up, so that the service forgets its parts."""
        self._buffer = bytearray()
        if self._upload is not None:
            self._upload.end(_Mark.GIVE_UP)


class _Mark(Enum):
    COMPLETE = 1
    GIVE_UP = 2


class _GivenUp(Exception):
    pass


class _Upload:
    """A multipart upload in a thread, fed by a short queue."""

    def __init__(self, backend: Uploads, key: str) -> None:
        self._backend, self._key = backend, key
        self._queue: queue.Queue[bytes | _Mark] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._last: _Mark | None = None
        self._thread = threading.Thread(target=self._run, name="hsformat-upload", daemon=True)
        self._thread.start()

    def put(self, part: bytes) -> None:
        """Add a part; raise what the upload failed with."""
        self.check()
        self._queue.put(part)

    def check(self) -> None:
        """Raise what the upload failed with."""
        if self._error is not None:
            raise self._error

    def end(self, mark: _Mark) -> None:
        """Complete the upload or give it up; nothing happens if it has ended."""
        if self._thread.is_alive():
            self._queue.put(mark)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._backend.upload(self._key, self._parts())
        except BaseException as e:  # raised in the thread that writes
            self._error = e
            while self._last is None:  # so that nobody waits for room in the queue
                self._next()

    def _parts(self) -> Iterator[bytes]:
        """Yield parts; asked by the client library in the middle of its work, so that no request may be made here."""
        while isinstance(item := self._next(), bytes):
            yield item
        if item is _Mark.GIVE_UP:
            raise _GivenUp

    def _next(self) -> bytes | _Mark:
        item = self._queue.get()
        if isinstance(item, _Mark):
            self._last = item
        return item
