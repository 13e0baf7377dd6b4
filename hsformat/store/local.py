"""A folder on a local or mounted disk as the place of a store. Imports ``backend`` alone of hsformat."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from hsformat.store.backend import Data, Entry, OpenObject, Part, RangedObject

__all__ = ["LocalBackend"]

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
"""What a file system without locks says, or one that does not lock what this user may not write."""


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

    def check_writable(self) -> None:
        """Raise OSError where a store cannot be made, as far as can be told without making anything."""
        with contextlib.suppress(FileNotFoundError):
            os.lstat(self._root)  # a name that is too long, or a file among the folders above
        there = next(p for p in (self._root, *self._root.parents) if p.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))

    def state(self) -> Literal["absent", "empty", "file", "folder"]:
        """Return what is at the path."""
        if self._root.is_dir():
            with os.scandir(self._root) as entries:
                return "folder" if any(not _is_leftover(e.name) for e in entries) else "empty"
        return "file" if os.path.lexists(self._root) else "absent"

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file."""
        with open(self._root / key, "rb", buffering=0, opener=_open_at_once) as f:
            about = os.fstat(f.fileno())
            if not stat.S_ISREG(about.st_mode):  # a link to a device has no end
                raise OSError(errno.EINVAL, "not a regular file", str(self._root / key))
            left = max(0, about.st_size - start)
            left = left if length is None else min(length, left)
            f.seek(start)
            parts = []
            while left and (part := f.read(left)):  # a raw read may be short
                parts.append(part)
                left -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, key: str) -> int | None:
        """Return the size of a regular file; None if there is none."""
        try:
            about = os.stat(self._root / key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            if e.errno == errno.ELOOP:  # links that lead to each other are no file
                return None
            raise  # Path.is_file would say that there is none, in some versions of Python
        return about.st_size if stat.S_ISREG(about.st_mode) else None

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

    def create(self, key: str) -> LocalSink:
        """Begin a new file."""
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        return LocalSink(path)

    def open_object(self, key: str) -> OpenObject:
        """Open a file for reading in place."""
        return LocalFile(self._root / key) if hasattr(os, "preadv") else RangedObject(self, key)

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
        """Remove files and links, then folders, deepest first; nothing if the commit record is there or may be."""
        top = self._inside(key)
        if os.path.islink(top):
            raise _behind(top)
        with contextlib.suppress(FileNotFoundError):
            (top / "zarr.json").lstat()
            raise FileExistsError(errno.EEXIST, "published, and not removed", str(top / "zarr.json"))
        errors: list[OSError] = []
        for folder, folders, files in os.walk(top, topdown=False, onerror=errors.append):
            for name in [*files, *_links(folder, folders)]:
                try:
                    (Path(folder) / name).unlink()
                except OSError as e:
                    errors.append(e)
            try:
                Path(folder).rmdir()
            except OSError as e:
                errors.append(e)
        if left := [e for e in errors if not isinstance(e, FileNotFoundError)]:
            raise left[0]  # those that follow are of the folders that hold what stays

    def listing(self, key: str) -> list[Entry]:
        """Return all files under a folder, and links, none of which is followed."""
        top, out = self._root / key, []
        if key and os.path.islink(top):
            about = top.lstat()
            return [Entry(key, about.st_size, about.st_mtime)]
        for folder, folders, files in os.walk(top, onerror=_raise_unless_gone):
            for name in [*files, *_links(folder, folders)]:
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):  # removed by somebody else meanwhile
                    about = path.lstat()
                    out.append(Entry(path.relative_to(self._root).as_posix(), about.st_size, about.st_mtime))
        return sorted(out)

    def touched(self, key: str) -> float | None:
        """Return when the newest of the folders under a key, and of itself, was changed."""
        times = []
        for folder, _, _ in os.walk(self._root / key, onerror=_raise_unless_gone):
            with contextlib.suppress(FileNotFoundError):
                times.append(os.stat(folder).st_mtime)
        return max(times, default=None)

    def remove(self, key: str) -> None:
        """Remove a file, and flush its folder."""
        path = self._inside(key)
        path.unlink()
        _sync_folder(path.parent)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold a file, on other machines as well where the disk is shared and its file system says so."""
        with contextlib.ExitStack() as stack:
            if (fd := self._open_to_lock(key)) is not None:
                import fcntl

                stack.callback(os.close, fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as e:
                    if e.errno not in _NO_LOCKS:
                        raise
            yield

    def _open_to_lock(self, key: str) -> int | None:
        if os.name == "nt":  # where a lock would keep readers out
            return None
        for flags in (os.O_RDWR, os.O_RDONLY):  # NFS locks what may be written alone
            with contextlib.suppress(OSError):
                return os.open(self._root / key, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        return None

    def _inside(self, key: str) -> Path:
        """Return the path of a key that is in the store's own folder; where a link leads may be anything.

        Raises
        ------
        OSError
            A folder on the way to it is a link.
        """
        path = self._root
        for part in key.split("/")[:-1]:
            path /= part
            if os.path.islink(path):
                raise _behind(path)
        return self._root / key


class LocalSink:
    """A new file that is being written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: Data) -> None:
        """Write all bytes."""
        view = memoryview(data) if isinstance(data, bytes) else data.data
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> None:
        """Flush the file to the disk."""
        with self._file:
            os.fsync(self._file.fileno())

    def abort(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):
            self._file.close()


class LocalFile:
    """An open file. Positions are part of each call, so that threads and forked processes may share it."""

    _MOST = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024)

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        """Fill arrays with one call of the system, as far as it goes."""
        done = 0
        views = [p.data if isinstance(p, np.ndarray) else p for p in parts]
        while views:
            n = os.preadv(self._fd, views if len(views) <= self._MOST else views[: self._MOST], start + done)
            if not n:
                break
            done += n
            i = 0
            while i < len(views) and n >= len(views[i]):
                n -= len(views[i])
                i += 1
            del views[:i]
            if n:
                views[0] = views[0][n:]
        return done

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _behind(link: Path) -> OSError:
    return OSError(errno.ELOOP, "a link: nothing that it leads to is removed", str(link))


def _links(folder: str, names: Sequence[str]) -> list[str]:
    """Return those of the folders in a folder that are links."""
    return [name for name in names if os.path.islink(os.path.join(folder, name))]


def _raise_unless_gone(e: OSError) -> None:
    if not isinstance(e, (FileNotFoundError, NotADirectoryError)):
        raise e


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: opening a pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _is_leftover(name: str) -> bool:
    """Whether a file is what a writer that was killed in :meth:`LocalBackend.publish` left behind."""
    return name.startswith(".zarr.json.") and name.endswith((".partial", ".guard"))


def _write_new(path: Path, data: Data) -> None:
    sink = LocalSink(path)
    try:
        sink.write(data)
        sink.close()
    finally:
        sink.abort()


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
