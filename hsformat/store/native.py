"""Reading an array by its shard's index: ranges that belong together in one call, decoded where they are wanted.

Of a shard those chunks are read that hold the rows asked for. Uncompressed rows go from the file into the result
without a copy; with ``verify`` the rest of their chunks is read as well, for the checksum, in blocks that are still in
the core's cache when it is computed. zarr-python, by which this is tested, is ``reference``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.problems import StoreError, problem
from hsformat.store.array_json import ArraySpec, Encoding
from hsformat.store.backend import Bytes, Part, Source
from hsformat.store.codec import (
    CRC_BYTES,
    DamagedChunk,
    check_crc,
    crc32c,
    crc32c_frozen,
    decode_chunk,
    index_bytes,
)
from hsformat.store.opened import KeptOpen
from hsformat.store.shards import parse_index

__all__ = ["NativeArray"]

_BLOCK = 512 * 1024
"""Bytes that are read in one call and then summed, while a core's cache has them; or one chunk."""

_DECODED = 16 * 1024 * 1024
"""Bytes that one block is decoded to, or one chunk: compressed ones may be as small as somebody liked."""

_RUN = 8 * 1024 * 1024
"""Bytes that are read in one call where nothing is computed of them."""


class NativeArray:
    """One array of a segment. Keeps its index in memory, and its file open while not too many others are.

    Attributes
    ----------
    ordered
        Whether its chunks lie in the file in their order, so that :meth:`blocks` reads each byte once.

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
        self._object = KeptOpen(source, f"{prefix}/{spec.file}")
        size = sizes[spec.file]
        self._chunk_bytes = self._rows * spec.row_bytes
        index = self._read_index(size) if spec.sharded else np.array([[0, size]], np.int64)
        self._starts, self._lengths = array("q", index[:, 0].tobytes()), array("q", index[:, 1].tobytes())
        stored = self._chunk_bytes + CRC_BYTES
        self._wrong = np.flatnonzero(index[:, 1] != stored)  # of which nothing is known if they are compressed
        self._follow = bool((np.diff(index[:, 0]) == stored).all())
        self._size = size
        self.ordered = bool((index[1:, 0] >= index[:-1].sum(axis=1)).all())

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

    def blocks(self, seen: Callable[[Bytes], None]) -> Iterator[npt.NDArray[Any]]:
        """Read the file of an :attr:`ordered` array once, from its beginning to its end.

        Parameters
        ----------
        seen
            Is shown every byte of the file, in order.

        Yields
        ------
        All rows in order, verified, in blocks of some chunks; each is overwritten by the next.

        Raises
        ------
        DamagedChunk, StoreError, OSError
            As :meth:`read`; ``seen`` was not shown the rest then.
        """
        n, at, row, total = len(self._starts), 0, 0, self._spec.shape[0]
        encoded, decoded = np.empty(_BLOCK, np.uint8), np.empty(0, np.uint8)
        chunk = 0
        while chunk < n:
            last, most = chunk, chunk + max(1, _DECODED // self._chunk_bytes)
            while last + 1 < min(n, most) and self._starts[last + 1] + self._lengths[last + 1] - at <= _BLOCK:
                last += 1
            end = self._starts[last] + self._lengths[last]
            size = (last - chunk + 1) * self._chunk_bytes
            if size > len(decoded):
                decoded = np.empty(size, np.uint8)
            if self._is_plain(chunk, last, at):
                self._read_plain(chunk, last, decoded[:size], seen)
            else:
                if end - at > len(encoded):
                    encoded = np.empty(end - at, np.uint8)
                data = encoded[: end - at]
                self._fill(at, [data])
                seen(data)
                for i in range(chunk, last + 1):
                    start, place = self._starts[i] - at, (i - chunk) * self._chunk_bytes
                    target = decoded[place : place + self._chunk_bytes]
                    self._decode_one(i, data[start : start + self._lengths[i]], target, verify=True)
            rows = decoded[:size].view(self._spec.dtype).reshape(-1, *self._spec.shape[1:])
            yield rows[: total - row]
            row, at, chunk = row + len(rows), end, last + 1
        for start in range(at, self._size, _BLOCK):
            data = encoded[: min(_BLOCK, self._size - start)]
            self._fill(start, [data])
            seen(data)

    def _is_plain(self, first: int, last: int, at: int) -> bool:
        """Whether chunks are uncompressed and lie one after another from ``at`` on."""
        stored = self._chunk_bytes + CRC_BYTES
        return not self._compressed and all(
            self._starts[i] == at + (i - first) * stored and self._lengths[i] == stored for i in range(first, last + 1)
        )

    def _read_plain(self, first: int, last: int, out: Bytes, seen: Callable[[Bytes], None]) -> None:
        """Read such chunks into ``out``, without a copy, and compare their checksums."""
        size, sums = self._chunk_bytes, np.empty((last - first + 1, CRC_BYTES), np.uint8)
        chunks = out.reshape(-1, size)
        parts: list[Part] = [part for pair in zip(chunks, sums, strict=True) for part in pair]
        self._fill(self._starts[first], parts)
        for i, (data, stored) in enumerate(zip(chunks, sums, strict=True), start=first):
            seen(data)
            seen(stored)
            try:
                check_crc(crc32c(data), stored)
            except DamagedChunk as e:
                raise DamagedChunk(f"chunk {i}: {e}") from e

    def _decode_one(self, chunk: int, data: Bytes, out: Bytes, *, verify: bool) -> None:
        try:
            decode_chunk(data, out, compressed=self._compressed, verify=verify)
        except DamagedChunk as e:
            raise DamagedChunk(f"chunk {chunk}: {e}") from e

    def _pieces(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return (chunk, first byte, last byte) of what is wanted of each chunk."""
        rows, size = self._rows, self._chunk_bytes
        row_bytes, from_, to = size // rows, first // rows, (last - 1) // rows
        pieces = [(chunk, 0, size) for chunk in range(from_, to + 1)]
        pieces[-1] = (to, 0, (last - to * rows) * row_bytes)
        pieces[0] = (from_, (first - from_ * rows) * row_bytes, pieces[0][2])
        return pieces

    def _fill(self, start: int, parts: list[Part]) -> None:
        wanted = sum(map(len, parts))
        if (n := self._object.read_into(start, parts)) != wanted:
            where = f"{self._where}/{self._spec.file}"
            raise StoreError(problem("HS505", where=where, got=f"{n} bytes at {start}", expected=f"{wanted} bytes"))

    def _runs(self, pieces: list[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
        """Cut pieces of uncompressed chunks into runs that lie one after another, of at most so many bytes."""
        if self._wrong.size:
            for chunk, _, _ in pieces:
                if chunk in self._wrong:
                    got = self._lengths[chunk] - CRC_BYTES
                    raise DamagedChunk(f"chunk {chunk}: {got} bytes, and not {self._chunk_bytes}")
        stored = self._chunk_bytes + CRC_BYTES
        n = max(1, most // stored)
        while pieces:
            end = len(pieces)
            if not self._follow:
                starts = [self._starts[chunk] for chunk, _, _ in pieces]
                end = next((i for i in range(1, end) if starts[i] != starts[i - 1] + stored), end)
            yield pieces[: min(n, end)]
            pieces = pieces[min(n, end) :]

    def _plain(self, first: int, last: int, out: Bytes) -> None:
        """Read rows alone, chunks that follow each other in one call."""
        wanted, at = out.data, 0
        skipped = memoryview(bytearray(CRC_BYTES))
        for run in self._runs(self._pieces(first, last), _RUN):
            parts: list[Part] = []
            for _, low, high in run:
                parts += (wanted[at : at + high - low], skipped)
                at += high - low
            self._fill(self._starts[run[0][0]] + run[0][1], parts[:-1])

    def _verified(self, first: int, last: int, out: Bytes) -> None:
        """Read whole chunks: what is wanted into ``out``, the rest beside it, and compare while a cache has them."""
        size, wanted, frozen = self._chunk_bytes, out.data, out.view()
        frozen.flags.writeable = False  # as google-crc32c wants it
        pieces = self._pieces(first, last)
        before, after = np.empty(pieces[0][1], np.uint8), np.empty(size - pieces[-1][2], np.uint8)
        at = 0
        for run in self._runs(pieces, _BLOCK):
            sums, begin = bytearray(CRC_BYTES * len(run)), at
            view, parts = memoryview(sums), list[Part]()
            for i, (_, low, high) in enumerate(run):
                if low:
                    parts.append(before)
                parts.append(wanted[at : at + high - low])
                if high < size:
                    parts.append(after)
                parts.append(view[CRC_BYTES * i : CRC_BYTES * i + CRC_BYTES])
                at += high - low
            self._fill(self._starts[run[0][0]], parts)
            for i, (chunk, low, high) in enumerate(run):
                value = crc32c(before) if low else 0
                value = crc32c_frozen(frozen[begin : begin + high - low], value)
                value = crc32c(after, value) if high < size else value
                begin += high - low
                stored = int.from_bytes(sums[CRC_BYTES * i : CRC_BYTES * i + CRC_BYTES], "little")
                if value != stored:
                    raise DamagedChunk(f"chunk {chunk}: CRC-32C {value:08x}, stored {stored:08x}")

    def _decode(self, first: int, last: int, out: Bytes, *, verify: bool) -> None:
        """Read compressed chunks that follow each other in one call, and decode each into its place."""
        pieces = self._pieces(first, last)
        encoded, partial = np.empty(0, np.uint8), np.empty(0, np.uint8)
        at = taken = 0
        while taken < len(pieces):
            start, length = self._starts[pieces[taken][0]], self._lengths[pieces[taken][0]]
            run = [length]
            for chunk, _, _ in pieces[taken + 1 :]:
                place, length = self._starts[chunk], self._lengths[chunk]
                if place != start + sum(run) or sum(run) + length > _BLOCK:
                    break
                run.append(length)
            if sum(run) > len(encoded):
                encoded = np.empty(sum(run), np.uint8)
            self._fill(start, [encoded[: sum(run)]])
            place = 0
            for (chunk, low, high), length in zip(pieces[taken : taken + len(run)], run, strict=True):
                whole = high - low == self._chunk_bytes
                if not whole and not len(partial):
                    partial = np.empty(self._chunk_bytes, np.uint8)
                target = out[at : at + high - low] if whole else partial
                self._decode_one(chunk, encoded[place : place + length], target, verify=verify)
                if not whole:
                    out[at : at + high - low] = partial[low:high]
                at, place = at + high - low, place + length
            taken += len(run)
