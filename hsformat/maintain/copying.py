"""One segment copied into another store: byte for byte, verified on the way, its commit record last and unchanged."""

from __future__ import annotations

from collections.abc import Callable

from hsformat.digests import Checksum
from hsformat.problems import Severity, StoreError, problem
from hsformat.store.backend import Backend, Source
from hsformat.store.commit import CommitRecord, FileEntry, load_commit
from hsformat.store.metadata import MAX_JSON_BYTES

__all__ = ["copy_segment"]

_BLOCK = 8 * 1024 * 1024
"""Bytes in memory."""


def copy_segment(source: Source, commit: CommitRecord, target: Backend, tick: Callable[[int], None]) -> None:
    """Copy a committed segment to a place where it is not committed; what an earlier copy left whole is kept.

    Parameters
    ----------
    tick
        Called with the number of bytes that were copied or found to be there, after each block.

    Raises
    ------
    StoreError
        HS503, HS504, HS505: the segment is damaged, and its copy is removed. HS506 (error): it cannot be written.
    """
    for key in commit.files:
        path = f"{commit.prefix}/{key}"
        if not _is_there(target, path, commit.files[key]):
            _copy_file(source, path, commit.files[key], target, tick)
        else:
            tick(commit.files[key].size)
    key = f"{commit.prefix}/zarr.json"
    raw = _read(source, key, 0, MAX_JSON_BYTES + 1)
    try:
        target.settle(commit.prefix)
        target.publish(key, raw)
    except OSError as e:
        if load_commit(target, commit.name)[0] is None:
            raise _unwritten(target, key, e) from e


def _is_there(target: Backend, path: str, entry: FileEntry) -> bool:
    """Whether a file is there as it should be; one that is there otherwise is removed."""
    try:
        size = target.size(path)
        if size is None:
            return False
        if size == entry.size:
            total = Checksum()
            for start in range(0, size, _BLOCK):
                total.update(target.read(path, start, _BLOCK))
            if str(total) == entry.checksum:
                return True
        target.remove(path)
    except OSError as e:
        raise _unwritten(target, path, e) from e
    return False


def _copy_file(source: Source, path: str, entry: FileEntry, target: Backend, tick: Callable[[int], None]) -> None:
    where = f"{source.location}/{path}"
    try:
        size = source.size(path)
    except OSError as e:
        raise _unread(where, e) from e
    if size != entry.size:
        code, got = ("HS503", "no file") if size is None else ("HS505", f"{size} bytes")
        raise StoreError(problem(code, where=where, got=got, expected=f"a file of {entry.size} bytes"))
    total = Checksum()
    try:
        sink = target.create(path)
    except OSError as e:
        raise _unwritten(target, path, e) from e
    try:
        for start in range(0, entry.size, _BLOCK):
            data = _read(source, path, start, _BLOCK)
            total.update(data)
            try:
                sink.write(data)
            except OSError as e:
                raise _unwritten(target, path, e) from e
            tick(len(data))
        if (found := str(total)) != entry.checksum:
            raise StoreError(problem("HS504", where=where, got=found, expected=entry.checksum))
        try:
            sink.close()
        except OSError as e:
            raise _unwritten(target, path, e) from e
    finally:
        sink.abort()


def _read(source: Source, path: str, start: int, length: int) -> bytes:
    try:
        return source.read(path, start, length)
    except OSError as e:
        raise _unread(f"{source.location}/{path}", e) from e


def _unread(where: str, e: OSError) -> StoreError:
    return StoreError(problem("HS503", where=where, got=f"cannot be read: {e.strerror or e}", expected="a file"))


def _unwritten(target: Backend, path: str, e: OSError) -> StoreError:
    return StoreError(
        problem(
            "HS506",
            where=f"{target.location}/{path}",
            severity=Severity.ERROR,
            got=e.strerror or str(e),
            expected="a segment written whole; those that were copied before stay",
            fix="free space or restore access, then run the command again: it copies what is missing",
        )
    )
