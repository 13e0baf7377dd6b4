"""The columns of a commit record in memory, where a store of thousands of segments has all of them.

Numbers are in arrays, digests are bytes, and names of files are there once for all segments that have the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, overload

__all__ = ["Digests", "FileEntry", "Files"]


class FileEntry(NamedTuple):
    """Size in bytes and checksum of one file."""

    size: int
    checksum: str


class Files(Mapping[str, FileEntry]):
    """The files of a segment, by key relative to it: 24 bytes a file, and its name once for all segments."""

    __slots__ = ("_rows", "_sizes", "_sums")

    def __init__(self, files: Mapping[str, FileEntry]) -> None:
        self._rows = _numbered(tuple(files))
        self._sizes = array("q", (f.size for f in files.values()))
        self._sums = b"".join(bytes.fromhex(f.checksum.partition(":")[2]) for f in files.values())

    def __getitem__(self, key: str) -> FileEntry:
        row = self._rows[key]
        return FileEntry(self._sizes[row], f"xxh3-128:{self._sums[16 * row : 16 * row + 16].hex()}")

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes)


@lru_cache(maxsize=64)
def _numbered(keys: tuple[str, ...]) -> dict[str, int]:
    return {key: row for row, key in enumerate(keys)}


class Digests(Sequence[str | None]):
    """Digests or nulls, 33 bytes each."""

    __slots__ = ("_packed",)

    def __init__(self, digests: Iterable[str | None]) -> None:
        self._packed = b"".join(bytes(33) if d is None else b"\1" + bytes.fromhex(d.partition(":")[2]) for d in digests)

    def __len__(self) -> int:
        return len(self._packed) // 33

    @overload
    def __getitem__(self, i: int) -> str | None: ...

    @overload
    def __getitem__(self, i: slice) -> list[str | None]: ...

    def __getitem__(self, i: int | slice) -> str | list[str | None] | None:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        row = range(len(self))[i]
        known, *_ = packed = self._packed[33 * row : 33 * row + 33]
        return f"sha256:{packed[1:].hex()}" if known else None
