"""Arrays of a segment: what each must be, and how one becomes files and comes back.

zarr-python encodes and decodes. An array is encoded into memory, rooted at itself, so that nothing but its own files
comes out: their sizes and checksums are then known before a byte is on the disk, and no parent group is written too
early. It is read through :class:`ArrayFiles`, which never answers "no such key": zarr would show fill values.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.storage import MemoryStore

from hsformat.contract import Contract
from hsformat.dtypes import BFLOAT16, numpy_dtype
from hsformat.problems import StoreError, problem
from hsformat.store.backend import Backend
from hsformat.zarr_dtype import BFloat16

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = [
    "CHUNK_TOKENS",
    "MAX_CHUNK_BYTES",
    "ArrayFiles",
    "ArraySpec",
    "array_specs",
    "check_chunk",
    "decode_array",
    "encode_array",
    "is_sharded",
]

CHUNK_TOKENS = 256
"""Rows of an inner chunk of states; the unit of reading, compression and checksum."""

MAX_CHUNK_BYTES = 2**31 - 1 - 16
"""Blosc counts bytes in a signed 32-bit integer, its header of 16 bytes included (numcodecs#80)."""

Codec = Literal["compact", "fast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """What an array of a segment must be."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def array_specs(
    contract: Contract,
    *,
    tokens: int,
    states: int,
    records: int,
    id_bytes: int,
    positions: bool,
) -> dict[str, ArraySpec]:
    """Return the arrays of a segment by name; the lengths are sums over its records (docs/spec/1.0.md, section 5)."""
    r = records
    rows: list[tuple[str, tuple[int, ...], str]] = [
        ("input_ids", (tokens,), "int32"),
        ("loss_mask", (tokens,), "uint8"),
        ("token_offsets", (r + 1,), "int64"),
        ("state_offsets", (r + 1,), "int64"),
        ("ids", (id_bytes,), "uint8"),
        ("id_offsets", (r + 1,), "int64"),
    ]
    if positions:
        rows.append(("position_ids", (tokens,), "int64"))
    rows += [(f"hidden/{c.key}", (states, contract.target.hidden_size), c.dtype) for c in contract.captures]
    rows += [(f"stats/{c.key}", (r, 2), "float32") for c in contract.captures]
    rows += [(f"fields/{f.name}", (tokens if f.axis == "token" else r, *f.shape), f.dtype) for f in contract.fields]
    return {name: ArraySpec(name=name, shape=shape, dtype=numpy_dtype(dtype)) for name, shape, dtype in rows}


def is_sharded(name: str) -> bool:
    """Return whether an array is cut into chunks inside one shard; any other is one chunk."""
    return name.startswith("hidden/")


def check_chunk(nbytes: int, *, where: str, fix: str) -> None:
    """Refuse a chunk that Blosc cannot hold.

    Raises
    ------
    StoreError
        HS501, naming the limit.
    """
    if nbytes > MAX_CHUNK_BYTES:
        raise StoreError(
            problem(
                "HS501",
                where=where,
                got=f"{nbytes} bytes",
                fix=fix,
                expected=f"at most {MAX_CHUNK_BYTES}, the limit of Blosc (2 GiB less its header)",
            )
        )


def encode_array(
    array: npt.NDArray[Any], spec: ArraySpec, *, codec: Codec, chunk_tokens: int
) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Yield the files of one array, key (relative to the array) and bytes; the metadata last.

    Parameters
    ----------
    array
        Of the spec's shape; of states, the rows are filled up to a multiple of ``chunk_tokens``, so that zarr encodes
        the shard in place instead of copying it into one of full size.
    """
    rows, trailing = array.shape[0], array.shape[1:]
    sharded = is_sharded(spec.name)
    chunk_rows = chunk_tokens if sharded else rows
    chunk_bytes = chunk_rows * int(np.prod(trailing)) * array.itemsize
    files: dict[str, Buffer] = {}
    target = zarr.create_array(
        store=MemoryStore(files),
        shape=array.shape,
        dtype=BFloat16() if spec.dtype == BFLOAT16 else spec.dtype,
        chunks=(chunk_rows, *trailing),
        shards=array.shape if sharded else None,
        compressors=_compressors(codec, array.itemsize, chunk_bytes),
        serializer=BytesCodec(endian="little"),
        filters=None,
        # A reader that does not check sizes sees NaN where states are lost, never zeros (zarr-python#486).
        fill_value=float("nan") if sharded else 0,
        # Otherwise zarr drops chunks of zeros, and -0.0 comes back as 0.0 (zarr-python#2060).
        config={"write_empty_chunks": True},
    )
    target[...] = array
    if array.shape != spec.shape:
        target.resize(spec.shape)
    for key in sorted(files, key=lambda k: (k == "zarr.json", k)):
        yield key, files.pop(key).as_numpy_array()  # not a copy: it may be as large as a segment


def _compressors(codec: Codec, itemsize: int, chunk_bytes: int) -> list[Any]:
    checksum = Crc32cCodec()
    if codec == "fast":
        return [checksum]
    # One block a chunk: with Blosc's own choice of size, splitting costs a tenth of the ratio on real states.
    blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize, blocksize=chunk_bytes)
    return [blosc, checksum]


def decode_array(files: ArrayFiles, spec: ArraySpec) -> zarr.Array[Any]:
    """Open an array and check that it is what the contract and the commit record say.

    Raises
    ------
    StoreError
        HS101: another number of rows. HS507: another element type or another width. Of ``files``: HS503, HS504, HS505.
    """
    array = zarr.open_array(store=files, mode="r", zarr_format=3)
    where, got = files.where, (array.shape, array.dtype)
    if array.dtype != spec.dtype or array.shape[1:] != spec.shape[1:] or array.ndim != len(spec.shape):
        raise StoreError(
            problem(
                "HS507",
                where=where,
                got=f"{got[1]} {list(got[0])}",
                expected=f"{spec.dtype} {list(spec.shape)}",
                fix="write the segment again; the contract says what its arrays are",
            )
        )
    if array.shape != spec.shape:
        raise StoreError(
            problem(
                "HS101",
                where=where,
                got=f"{got[0][0]} rows",
                expected=f"{spec.shape[0]}, by the commit record",
                fix="write the segment again",
            )
        )
    return array


class ArrayFiles(Store):
    """The files of one array as a read-only Zarr store.

    Parameters
    ----------
    backend, prefix
        Where the array is: ``segments/<segment>/hidden/d2``.
    metadata
        The bytes of its ``zarr.json``, already checked.
    sizes
        Size of each other file in bytes, by key relative to the array.
    where
        For the place of a problem.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, backend: Backend, prefix: str, metadata: bytes, sizes: dict[str, int], where: str) -> None:
        super().__init__(read_only=True)
        self._backend, self._prefix, self._metadata, self._sizes = backend, prefix, metadata, sizes
        self.where = where

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return bytes of a file; HS503 where zarr would be told that there is none."""
        if key == "zarr.json":
            return prototype.buffer.from_bytes(self._metadata)
        size = self._sizes.get(key)
        if size is None:
            raise StoreError(
                problem(
                    "HS503",
                    where=self.where,
                    got=f"no file {key!r} in the commit record",
                    expected="every chunk of the array",
                )
            )
        start, length = _span(byte_range, size)
        data = await asyncio.to_thread(self._backend.read, f"{self._prefix}/{key}", start, length)
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
