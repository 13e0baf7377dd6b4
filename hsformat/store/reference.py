"""Reading an array through zarr-python: what every other reading path is compared with.

It is read through :class:`ArrayFiles`, which never answers "no such key": zarr would show fill values.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from hsformat.problems import StoreError, problem
from hsformat.store.array_json import ArraySpec, Encoding
from hsformat.store.arrays import metadata
from hsformat.store.backend import Source
from hsformat.store.codec import DamagedChunk, index_bytes
from hsformat.store.shards import parse_index
from hsformat.zarr_dtype import BFloat16  # noqa: F401 - registers it

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = ["ArrayFiles", "ReferenceArray"]

_DAMAGED = (ValueError, RuntimeError, SystemError)
"""What zarr-python and numcodecs raise on damaged bytes: checksums, lengths; Blosc; a size below 0 in its header."""


class ReferenceArray:
    """One array of a segment, decoded by zarr-python; as :class:`hsformat.store.native.NativeArray`."""

    def __init__(
        self, source: Source, prefix: str, spec: ArraySpec, encoding: Encoding, sizes: Mapping[str, int]
    ) -> None:
        files = ArrayFiles(source, prefix, metadata(spec, **encoding._asdict()), sizes)
        if spec.sharded:
            files.read_index(spec, encoding.chunk_rows)
        self._array = zarr.open_array(store=files, mode="r", zarr_format=3)

    def read(self, rows: slice, *, verify: bool = True) -> npt.NDArray[Any]:
        """Return rows; zarr-python always verifies."""
        try:
            return _selected(self._array, rows)
        except StoreError:
            raise
        except _DAMAGED as e:
            raise DamagedChunk(str(e).partition("\n")[0] or type(e).__name__) from e


def _selected(array: zarr.Array[Any], rows: slice) -> npt.NDArray[Any]:
    """Return rows of an array, or raise what went wrong by itself: zarr 3.4 raises it in a group."""
    try:
        return np.asarray(array[rows])
    except ExceptionGroup as group:
        first: Exception = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from group


class ArrayFiles(Store):
    """The files of one array as a read-only Zarr store: all bytes that are asked for, or a StoreError.

    Parameters are those of :func:`open_array`.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, source: Source, prefix: str, metadata: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(read_only=True)
        self._source, self._prefix, self._metadata, self._sizes = source, prefix, metadata, sizes
        self._where = f"{source.location}/{prefix}"
        self._index = b""

    def read_index(self, spec: ArraySpec, chunk_rows: int) -> None:
        """Read the index of the array's one shard, and refuse one that leaves a chunk out: zarr shows fill values.

        It is kept, so that zarr need not read it again.
        """
        chunks, size = -(-spec.shape[0] // chunk_rows), self._size(spec.file)
        length = index_bytes(chunks)
        if size < length:
            raise self._error("HS504", f"a shard of {size} bytes", f"at least {length}, those of its index")
        self._index = self._source.read(f"{self._prefix}/{spec.file}", size - length, length)
        data = np.frombuffer(self._index, np.uint8)
        if problems := parse_index(data, chunks=chunks, size=size, where=self._where)[1]:
            raise StoreError(problems)

    def _error(self, code: str, got: str, expected: str) -> StoreError:
        return StoreError(problem(code, where=self._where, got=got, expected=expected))

    def _size(self, key: str) -> int:
        size = self._sizes.get(key)
        if size is None:
            raise self._error("HS503", f"no file {key!r} in the commit record", "every chunk of the array")
        return size

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return bytes of a file; HS503 where zarr would be told that there is none."""
        if key == "zarr.json":
            return prototype.buffer.from_bytes(self._metadata)
        start, length = _span(byte_range, size := self._size(key))
        if self._index and (start, length) == (size - len(self._index), len(self._index)):
            return prototype.buffer.from_bytes(self._index)
        try:
            data = await asyncio.to_thread(self._source.read, f"{self._prefix}/{key}", start, length)
        except FileNotFoundError as e:  # zarr 3.4 takes it for a shard that was never written, and shows fill values
            raise self._error("HS503", f"{key} is gone", "the file that was there a moment ago") from e
        if len(data) != length or not length:  # zarr takes no bytes for no chunk
            raise self._error("HS505", f"{len(data)} bytes at {start} of {key}", f"{max(1, length)} bytes")
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return bytes of several files."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether the commit record names the file."""
        return key == "zarr.json" or key in self._sizes

    async def set(self, key: str, value: Buffer) -> NoReturn:
        """Refuse: segments are immutable."""
        raise NotImplementedError("read-only")

    async def delete(self, key: str) -> NoReturn:
        """Refuse: segments are immutable."""
        raise NotImplementedError("read-only")

    def list(self) -> AsyncIterator[str]:
        """Refuse: what exists is in the commit record."""
        raise NotImplementedError("not listable")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Refuse: what exists is in the commit record."""
        raise NotImplementedError("not listable")

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Refuse: what exists is in the commit record."""
        raise NotImplementedError("not listable")


def _span(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    match byte_range:
        case None:
            return 0, size
        case RangeByteRequest(start, end):
            return start, max(0, end - start)
        case OffsetByteRequest(offset):
            return offset, max(0, size - offset)
        case SuffixByteRequest(suffix):
            return max(0, size - suffix), min(suffix, size)
        case _:
            raise TypeError(f"unknown byte range {byte_range!r}")
