"""Where the bytes of a store are: the only module of the store that touches a file system.

A backend is a flat name space of immutable objects under keys such as ``segments/0a-0/zarr.json``. It promises
what the format needs and no more: an object is written whole and durably, and one object can be *published*, which
makes it appear under its key complete or not at all, and never in place of another. Object stores have this as
put-if-absent; a local disk has it as a hard link to a finished file. Imports ``problems`` alone of hsformat.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from hsformat.problems import StoreError, problem

__all__ = ["Backend", "CountedSource", "Data", "LocalBackend", "Place", "Source", "backend_for", "free_bytes"]

Data = bytes | npt.NDArray[np.uint8]
"""What is written: bytes, or an array of them, which need not be copied."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


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

        FileExistsError, and nothing is removed, if it was: if there is a ``zarr.json`` directly under the key.
        """
        ...


Place = str | os.PathLike[str] | Backend
"""Where a store is: a path, or a backend that somebody else wrote (``hsformat.testing.StoreConformance`` tests it)."""


def backend_for(path: Place) -> Backend:
    """Return the backend of a path; a backend is returned as it is.

    Raises
    ------
    StoreError
        HS501: an address of a scheme that is not supported, or text that is no path.
    TypeError
        It is neither a path nor a backend.
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "location"):
            raise TypeError(f"a store is at a path or in a Backend, not in {type(path).__name__}")
        return path
    text = os.fspath(path)
    if "://" in text or "\0" in text or not text:
        raise StoreError(
            problem(
                "HS501",
                where=repr(text),
                got="an address" if "://" in text else "no path",
                expected="the path of a folder on a local or mounted disk",
                fix="give such a path",
            )
        )
    return LocalBackend(text)


def free_bytes(path: Place) -> int | None:
    """Return the bytes that can be written at a place; None: it is no local folder, or its file system does not say.

    Raises
    ------
    StoreError
        As :func:`backend_for`.
    """
    backend = backend_for(path)
    return backend.free_bytes() if isinstance(backend, LocalBackend) else None


class LocalBackend:
    """A folder on a local or mounted disk."""

    def __init__(self, path: str) -> None:
        self._location = path
        self._root = Path(os.path.abspath(path))

    @property
    def location(self) -> str:
        """The path as given."""
        return self._location

    def free_bytes(self) -> int | None:
        """Return the bytes that this user can write to the file system; None: it does not say."""
        try:
            usage = shutil.disk_usage(next(p for p in (self._root, *self._root.parents) if p.exists()))
        except OSError:
            return None
        return usage.free if usage.total else None  # network file systems that count nothing report 0 of 0

    def state(self) -> Literal["absent", "empty", "file", "folder"]:
        """Return what is at the path."""
        if self._root.is_dir():
            with os.scandir(self._root) as entries:
                return "folder" if any(not _is_leftover(e.name) for e in entries) else "empty"
        return "file" if os.path.lexists(self._root) else "absent"

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file."""
        with (self._root / key).open("rb", buffering=0) as f:
            if start:
                f.seek(start)
            if length is None:
                return f.read()
            parts = []
            while length and (part := f.read(length)):  # a raw read may be short
                parts.append(part)
                length -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, key: str) -> int | None:
        """Return the size of a regular file; None if there is none."""
        path = self._root / key
        try:
            return path.stat().st_size if path.is_file() else None
        except FileNotFoundError:
            return None

    def folders(self, key: str) -> list[str]:
        """Return the names of the folders under a key, sorted."""
        try:
            with os.scandir(self._root / key) as entries:
                return sorted(e.name for e in entries if e.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write(self, key: str, data: Data) -> None:
        """Write a new file and flush it to the disk."""
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_new(path, data)

    def settle(self, key: str) -> None:
        """Flush the folders under a key; :meth:`publish` flushes those that lead to it."""
        for folder, _, _ in os.walk(self._root / key, topdown=False):
            _sync_folder(Path(folder))

    def publish(self, key: str, data: bytes) -> None:
        """Write the file under another name, then link it to its own: it appears whole or not at all."""
        path = self._root / key
        top = next(p for p in (self._root.parent, *self._root.parent.parents) if p.is_dir())  # what is below may be new
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            _write_new(temporary, data)
            _link_new(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        for folder in path.parents:
            _sync_folder(folder)
            if folder == top:
                break

    def discard(self, key: str) -> None:
        """Remove files, then folders, deepest first; nothing if the commit record is there or may be."""
        published = self._root / key / "zarr.json"
        with contextlib.suppress(FileNotFoundError):
            published.lstat()
            raise FileExistsError(errno.EEXIST, "published, and not removed", str(published))
        for folder, _, files in os.walk(self._root / key, topdown=False):
            for name in files:
                with contextlib.suppress(OSError):
                    (Path(folder) / name).unlink()
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


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
        with self._lock:  # zarr reads in threads
            self.bytes_read += len(data)
            self._tick(self.bytes_read)
        return data


def _is_leftover(name: str) -> bool:
    """Whether a file is what a writer that was killed in :meth:`LocalBackend.publish` left behind."""
    return name.startswith(".zarr.json.") and name.endswith((".partial", ".guard"))


def _write_new(path: Path, data: Data) -> None:
    view = memoryview(data) if isinstance(data, bytes) else data.data
    with path.open("xb", buffering=0) as f:
        while view:
            view = view[f.write(view) :]
        os.fsync(f.fileno())


def _link_new(temporary: Path, path: Path) -> None:
    try:
        path.hardlink_to(temporary)
    except OSError as e:
        if e.errno in _NO_LINKS:
            _rename_new(temporary, path)
        elif not _is_link(temporary, path):
            raise


def _is_link(temporary: Path, path: Path) -> bool:
    """Whether a link was made although the answer says otherwise: NFS repeats a request whose answer was lost."""
    try:
        return path.samefile(temporary)
    except OSError:
        return False


def _rename_new(temporary: Path, path: Path) -> None:
    """Rename if there is nothing yet, on a file system without hard links; the lock ends with its process."""
    if os.name == "nt":  # where a rename replaces nothing
        temporary.rename(path)
        return
    import fcntl

    guard = path.with_name(f".{path.name}.guard")
    with contextlib.ExitStack() as stack:
        while True:
            lock = stack.enter_context(guard.open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(guard.stat(), os.fstat(lock.fileno())):
                    break  # nobody has removed it while this process waited
        try:
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            temporary.rename(path)
        finally:
            guard.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # cannot open a folder there, and need not
        return
    try:
        fd = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder above the store that may be entered and not read
        return
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EROFS}:  # some mounted disks cannot flush folders
            raise
    finally:
        os.close(fd)
