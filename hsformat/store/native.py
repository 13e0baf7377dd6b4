"""Reading an array by its shard's index: ranges that belong together in one call, decoded where they are wanted.

Of a shard those chunks are read that hold the rows asked for. Uncompressed rows go from the file into the result
without a copy; with ``verify`` the rest of their chunks is read as well, for the checksum, in blocks that are still in
the core's cache when it is computed. zarr-python, by which this is tested, is ``reference``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.problems import StoreError, problem
from hsformat.store.array_json import ArraySpec, Encoding
from hsformat.store.backend import Bytes, Source, open_object
from hsformat.store.codec import CRC_BYTES, DamagedChunk, check_crc, crc32c, crc32c_frozen, decode_chunk
from hsformat.store.shards import index_bytes, parse_index

__all__ = ["NativeArray"]

_BLOCK = 512 * 1024
"""Bytes that are read in one call and then summed, while a core's cache has them; or one chunk."""

_RUN = 8 * 1024 * 1024
"""Compressed bytes that are read in one call."""


class NativeArray:
    """One array of a segment. Keeps its file open and its index in memory.

    Parameters
    ----------
    source, prefix
        Where the array is: ``segments/<segment>/hidden/d2``.
    sizes
        Size of each of its files but its metadata in bytes, by key relative to the array.

    Raises
    ------
    StoreError
        HS503: a file or a chunk of it is not there. HS504: the index is damaged.
    OSError
        It cannot be read.
    """

    def __init__(
        self, source: Source, prefix: str, spec: ArraySpec, encoding: Encoding, sizes: Mapping[str, int]
    ) -> None:
        self._spec, self._rows = spec, encoding.chunk_rows
        self._compressed = encoding.codec == "compact"
        self._where = f"{source.location}/{prefix}"
        if spec.file not in sizes:
            got, expected = f"no file {spec.file!r} in the commit record", "every chunk of the array"
            raise StoreError(problem("HS503", where=self._where, got=got, expected=expected))
        self._object = open_object(source, f"{prefix}/{spec.file}")
        size = sizes[spec.file]
        self._chunk_bytes = self._rows * spec.row_bytes
        self._index = np.array([[0, size]], np.int64)
        if spec.sharded:
            self._index = self._read_index(size)

    def _read_index(self, size: int) -> npt.NDArray[np.int64]:
        chunks = -(-self._spec.shape[0] // self._rows)
        length = index_bytes(chunks)
        if size < length:
            got, expected = f"a shard of {size} bytes", f"at least {length}, those of its index"
            raise StoreError(problem("HS504", where=self._where, got=got, expected=expected))
        data = np.empty(length, np.uint8)
        self._fill(size - length, [data])
        index, problems = parse_index(data, chunks=chunks, size=size, where=self._where)
        if problems:
            raise StoreError(problems)
        return index

    def read(self, rows: slice, *, verify: bool = True) -> npt.NDArray[Any]:
        """Return rows, in an array of their own.

        Parameters
        ----------
        verify
            Whether the CRC-32C of each chunk is compared; else uncompressed rows are read without the rest of theirs.

        Raises
        ------
        DamagedChunk
            A chunk is not what was written.
        StoreError
            HS505: the file ends too early.
        OSError
            It cannot be read.
        """
        first, last, _ = rows.indices(self._spec.shape[0])
        out = np.empty((max(0, last - first), *self._spec.shape[1:]), self._spec.dtype)
        flat = out.reshape(-1).view(np.uint8)
        if len(flat):
            if self._compressed:
                self._decode(first, last, flat, verify=verify)
            elif verify:
                self._verified(first, last, flat)
            else:
                self._plain(first, last, flat)
        return out

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield (chunk, first byte, last byte) of what is wanted of each chunk."""
        row_bytes = self._spec.row_bytes
        for chunk in range(first // self._rows, -(-last // self._rows)):
            start = chunk * self._rows
            yield (
                chunk,
                max(0, first - start) * row_bytes,
                min(self._rows, last - start) * row_bytes,
            )

    def _fill(self, start: int, parts: list[Bytes]) -> None:
        wanted = sum(map(len, parts))
        if (n := self._object.read_into(start, parts)) != wanted:
            where = f"{self._where}/{self._spec.file}"
            raise StoreError(problem("HS505", where=where, got=f"{n} bytes at {start}", expected=f"{wanted} bytes"))

    def _place(self, chunk: int) -> tuple[int, int]:
        start, length = self._index[chunk]
        return int(start), int(length)

    def _uncompressed(self, chunk: int) -> int:
        """Return where an uncompressed chunk is, whose length is known."""
        start, length = self._place(chunk)
        if length != self._chunk_bytes + CRC_BYTES:
            raise DamagedChunk(f"chunk {chunk}: {length - CRC_BYTES} bytes, and not {self._chunk_bytes}")
        return start

    def _plain(self, first: int, last: int, out: Bytes) -> None:
        """Read rows alone, chunks that follow each other in one call."""
        at, start, parts, end = 0, 0, list[Bytes](), -1
        skipped = np.empty(CRC_BYTES, np.uint8)
        for chunk, low, high in self._pieces(first, last):
            place = self._uncompressed(chunk) + low
            if place == end + CRC_BYTES and parts:
                parts.append(skipped)
            elif parts:
                self._fill(start, parts)
                parts = []
            start = start if parts else place
            parts.append(out[at : at + high - low])
            at, end = at + high - low, place + high - low
        self._fill(start, parts)

    def _verified(self, first: int, last: int, out: Bytes) -> None:
        """Read whole chunks: what is wanted into ``out``, the rest beside it, and compare while a cache has them."""
        pieces = list(self._pieces(first, last))
        size, frozen = self._chunk_bytes, out.view()
        frozen.flags.writeable = False  # as google-crc32c wants it
        rest = np.empty((2, size), np.uint8)  # before the first row that is wanted, and after the last
        sums = np.empty((len(pieces), CRC_BYTES), np.uint8)
        at = taken = 0
        while taken < len(pieces):
            start = self._uncompressed(pieces[taken][0])
            run, parts = taken, list[Bytes]()
            while run < len(pieces) and (run == taken or (run - taken + 1) * size <= _BLOCK):
                chunk, low, high = pieces[run]
                if self._uncompressed(chunk) != start + (run - taken) * (size + CRC_BYTES):
                    break
                if low:
                    parts.append(rest[0, :low])
                parts.append(out[at : at + high - low])
                if high < size:
                    parts.append(rest[1, high:])
                parts.append(sums[run])
                at += high - low
                run += 1
            self._fill(start, parts)
            done = at - sum(high - low for _, low, high in pieces[taken:run])
            for i in range(taken, run):
                chunk, low, high = pieces[i]
                value = crc32c(rest[0, :low]) if low else 0
                value = crc32c_frozen(frozen[done : done + high - low], value)
                value = crc32c(rest[1, high:], value) if high < size else value
                done += high - low
                try:
                    check_crc(value, sums[i].tobytes())
                except DamagedChunk as e:
                    raise DamagedChunk(f"chunk {chunk}: {e}") from e
            taken = run

    def _decode(self, first: int, last: int, out: Bytes, *, verify: bool) -> None:
        """Read compressed chunks that follow each other in one call, and decode each into its place."""
        pieces = list(self._pieces(first, last))
        at = taken = 0
        while taken < len(pieces):
            start, length = self._place(pieces[taken][0])
            run = [length]
            for chunk, _, _ in pieces[taken + 1 :]:
                place, length = self._place(chunk)
                if place != start + sum(run) or sum(run) + length > _RUN:
                    break
                run.append(length)
            data = np.empty(sum(run), np.uint8)
            self._fill(start, [data])
            for (chunk, low, high), length in zip(pieces[taken : taken + len(run)], run, strict=True):
                encoded, data = data[:length], data[length:]
                whole = high - low == self._chunk_bytes
                target = out[at : at + high - low] if whole else np.empty(self._chunk_bytes, np.uint8)
                try:
                    decode_chunk(encoded, target, compressed=True, verify=verify)
                except DamagedChunk as e:
                    raise DamagedChunk(f"chunk {chunk}: {e}") from e
                if not whole:
                    out[at : at + high - low] = target[low:high]
                at += high - low
            taken += len(run)
