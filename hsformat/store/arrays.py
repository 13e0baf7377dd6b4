"""Arrays of a segment: which there are, and how one becomes files and comes back.

zarr-python encodes and decodes. An array is encoded into memory, rooted at itself, so that nothing but its own files
comes out: their sizes and checksums are then known before a byte is on the disk, and no parent group is written too
early. It is read through :class:`ArrayFiles`, which never answers "no such key": zarr would show fill values.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.storage import MemoryStore

from hsformat.contract import Capture, Contract, FieldSpec, StateDtype
from hsformat.dtypes import BFLOAT16, numpy_dtype
from hsformat.problems import StoreError, problem
from hsformat.store.array_json import MAX_CHUNK_BYTES, ArraySpec, Codec, array_json, check_array_json, is_sharded
from hsformat.store.backend import Source
from hsformat.zarr_dtype import BFloat16

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = [
    "CHUNK_TOKENS",
    "MAX_CHUNK_BYTES",
    "ArrayFiles",
    "ArraySpec",
    "Codec",
    "Dimensions",
    "array_metadata",
    "array_specs",
    "check_chunk",
    "encode_array",
    "is_sharded",
    "open_array",
    "planned_specs",
    "segment_groups",
]

CHUNK_TOKENS = 256
"""Rows of an inner chunk of states; the unit of reading, compression and checksum."""

_ABSENT = 2**64 - 1
"""Offset or length in the index of a shard of a chunk that is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What of a contract decides the arrays of a segment: of a contract, or of a store that is only planned.

    Attributes
    ----------
    hidden_size, captures, fields, codec
        As in :class:`hsformat.contract.Contract`.
    target_dtype
        The dtype in which the target runs.
    """

    hidden_size: int
    captures: tuple[Capture, ...]
    fields: tuple[FieldSpec, ...] = ()
    codec: Codec
    target_dtype: StateDtype

    @classmethod
    def of(cls, contract: Contract) -> Dimensions:
        """Return those of a contract."""
        return cls(
            hidden_size=contract.target.hidden_size,
            captures=contract.captures,
            fields=contract.fields,
            codec=contract.codec,
            target_dtype=contract.target.dtype,
        )


def array_specs(
    contract: Contract, *, tokens: int, states: int, records: int, id_bytes: int, positions: bool
) -> dict[str, ArraySpec]:
    """Return the arrays of a segment by name; the lengths are sums over its records (docs/spec/1.0.md, section 5)."""
    dimensions = Dimensions.of(contract)
    return planned_specs(
        dimensions, tokens=tokens, states=states, records=records, id_bytes=id_bytes, positions=positions
    )


def planned_specs(
    dimensions: Dimensions, *, tokens: int, states: int, records: int, id_bytes: int, positions: bool
) -> dict[str, ArraySpec]:
    """Return what :func:`array_specs` returns for a contract of these dimensions."""
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
    rows += [(f"hidden/{c.key}", (states, dimensions.hidden_size), c.dtype) for c in dimensions.captures]
    rows += [(f"stats/{c.key}", (r, 2), "float32") for c in dimensions.captures]
    rows += [(f"fields/{f.name}", (tokens if f.axis == "token" else r, *f.shape), f.dtype) for f in dimensions.fields]
    return {name: ArraySpec(name=name, shape=shape, dtype=numpy_dtype(dtype)) for name, shape, dtype in rows}


def segment_groups(fields: Collection[FieldSpec]) -> tuple[str, ...]:
    """Return the names of the groups inside a segment."""
    return ("hidden", "stats", *(["fields"] if fields else []))


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
    files, target = _new_array(spec, array.shape, codec=codec, chunk_tokens=chunk_tokens)
    target[...] = array
    if array.shape != spec.shape:
        target.resize(spec.shape)
    for key in sorted(files, key=lambda k: (k == "zarr.json", k)):
        yield key, files.pop(key).as_numpy_array()  # not a copy: it may be as large as a segment


def array_metadata(spec: ArraySpec, *, codec: Codec, chunk_tokens: int) -> bytes:
    """Return the ``zarr.json`` that :func:`encode_array` gives for an array of the spec, without an array."""
    rows = spec.shape[0]
    padded = -(-rows // chunk_tokens) * chunk_tokens if is_sharded(spec.name) else rows
    files, target = _new_array(spec, (padded, *spec.shape[1:]), codec=codec, chunk_tokens=chunk_tokens)
    if padded != rows:
        target.resize(spec.shape)
    return files["zarr.json"].to_bytes()


def _new_array(
    spec: ArraySpec, shape: tuple[int, ...], *, codec: Codec, chunk_tokens: int
) -> tuple[dict[str, Buffer], zarr.Array[Any]]:
    """Return an array without values, and the files that zarr keeps of it."""
    sharded = is_sharded(spec.name)
    chunk_rows = chunk_tokens if sharded else shape[0]
    codecs = array_json(replace(spec, shape=shape), codec=codec, chunk_rows=chunk_rows)["codecs"]
    serializer, *compressors = codecs[0]["configuration"]["codecs"] if sharded else codecs
    files: dict[str, Buffer] = {}
    array = zarr.create_array(
        store=MemoryStore(files),
        shape=shape,
        dtype=BFloat16() if spec.dtype == BFLOAT16 else spec.dtype,
        chunks=(chunk_rows, *shape[1:]),
        shards=shape if sharded else None,
        compressors=compressors,
        serializer=serializer,
        filters=None,
        fill_value=float("nan") if sharded else 0,
        # Otherwise zarr drops chunks of zeros, and -0.0 comes back as 0.0 (zarr-python#2060).
        config={"write_empty_chunks": True},
    )
    return files, array


def open_array(
    source: Source, prefix: str, metadata: bytes, sizes: Mapping[str, int], spec: ArraySpec, codec: Codec
) -> zarr.Array[Any]:
    """Open an array whose metadata is what the contract and the commit record say, and whose chunks are all stored.

    Parameters
    ----------
    source, prefix
        Where the array is: ``segments/<segment>/hidden/d2``.
    metadata
        The bytes of its ``zarr.json``.
    sizes
        Size of each other file in bytes, by key relative to the array.

    Raises
    ------
    StoreError
        HS101: another number of rows. HS507: any other clause. HS503: a chunk, or the file that holds it, is not
        there. HS504: an index of a shard that points outside it.
    """
    where = f"{source.location}/{prefix}"
    checked, problems = check_array_json(metadata, spec, codec=codec, where=where)
    if problems:
        raise StoreError(problems)
    files = ArrayFiles(source, prefix, json.dumps(checked).encode(), sizes)
    if is_sharded(spec.name):
        rows = checked["codecs"][0]["configuration"]["chunk_shape"][0]
        files.read_index("/".join(["c", *"0" * len(spec.shape)]), chunks=-(-spec.shape[0] // rows))
    return zarr.open_array(store=files, mode="r", zarr_format=3)


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

    def read_index(self, key: str, *, chunks: int) -> None:
        """Read the index of the array's one shard, and refuse one that leaves a chunk out: zarr shows fill values.

        It is kept, so that zarr need not read it again; zarr compares its checksum.
        """
        size, length = self._size(key), 16 * chunks + 4
        if size < length:
            raise self._error("HS504", f"a shard of {size} bytes", f"at least {length}, those of its index")
        self._index = self._source.read(f"{self._prefix}/{key}", size - length, length)
        entries = np.frombuffer(self._index[:-4], "<u8").reshape(-1, 2)
        if (absent := (entries == _ABSENT).any(axis=1)).any():
            got = f"chunk {int(absent.argmax())} of {chunks} is not stored ({int(absent.sum())} such chunk(s))"
            raise self._error("HS503", got, "every chunk of the array")
        starts, lengths, end = entries[:, 0], entries[:, 1], size - length
        outside = (starts > end) | (lengths > end - np.minimum(starts, end)) | (lengths == 0)
        if outside.any():
            i = int(outside.argmax())
            got = f"chunk {i} at {starts[i]}, {lengths[i]} bytes"
            raise self._error("HS504", got, f"a place in the {end} bytes before the index of the shard")

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
        data = await asyncio.to_thread(self._source.read, f"{self._prefix}/{key}", start, length)
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
