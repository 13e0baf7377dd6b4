"""What can still be read of a damaged segment, record by record, and is proved to be what was written.

Three things prove it. A file whose checksum is right is what was written; of a shard whose index is damaged, so is one
whose checksum is right with the index that its chunks must have had. A chunk whose CRC-32C is right is part of the
file if other chunks of it are not (damage that was found), and not if none is, or if the file is shorter and whole:
then it is another one. And the statistics of each record, from a file that is whole, tell whose states they are: they
confirm what was found in a shard whose index is lost, chunk after chunk from its beginning.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hsformat.checks import check_record
from hsformat.contract import Contract
from hsformat.digests import Checksum
from hsformat.problems import Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.backend import Source
from hsformat.store.codec import CRC_BYTES, index_bytes
from hsformat.store.commit import CommitRecord
from hsformat.store.native import NativeArray
from hsformat.store.segment import SegmentReader
from hsformat.store.shards import encode_index, parse_index
from hsformat.store.verify import INDEX_ARRAYS

__all__ = ["Salvage"]

_BLOSC_HEADER = struct.Struct("<BBBBIII")  # version, its own version, flags, typesize, nbytes, blocksize, cbytes
_BLOCK = 8 * 1024 * 1024
"""Bytes in memory."""

_MEAN_TOLERANCE = 1e-4
"""Relative; sums of squares depend on their order by less."""


class Salvage:
    """The records of a committed segment of which files are damaged.

    Parameters
    ----------
    damaged
        Files, of those that the commit record names, that are not what was written, with what was found.

    Attributes
    ----------
    lost
        By id, why a record was not yielded; filled by :meth:`records`.
    """

    def __init__(
        self, source: Source, contract: Contract, commit: CommitRecord, damaged: Mapping[str, list[Problem]]
    ) -> None:
        self._source, self._contract, self._commit, self._damaged = source, contract, commit, damaged
        self._where = f"{source.location}/{commit.prefix}"
        self._reader = _DamagedReader(source, contract, commit, damaged)
        self._specs = commit.array_specs(contract)
        self.lost: dict[str, list[Problem]] = {}

    def records(self, rows: Sequence[int]) -> Iterator[tuple[Record, dict[str, CaptureStats]]]:
        """Yield those of the records in these rows that are whole, with the statistics of their captures."""
        hopeless = self._hopeless()
        for row in rows:
            rid = self._commit.ids[row]
            if hopeless:
                self.lost[rid] = hopeless
                continue
            try:
                record = self._reader.record(row, self._contract.keys)
            except StoreError as e:
                self.lost[rid] = e.problems
                continue
            stats, problems = self._confirm(row, record)
            if problems:
                self.lost[rid] = problems
            else:
                yield record, stats

    def _is_damaged(self, name: str) -> bool:
        return f"{name}/{self._specs[name].file}" in self._damaged

    def _hopeless(self) -> list[Problem]:
        """Return why no record can be kept; empty: some may."""
        out: list[Problem] = []
        for name, spec in self._specs.items():
            if name in INDEX_ARRAYS or name.startswith("stats/"):
                continue  # the commit record has the one, and the other confirms and is not needed otherwise
            if problems := self._reader.opening(name):
                out += problems
                continue
            if not self._is_damaged(name):
                continue
            confirmed = spec.axis == "state" and self._recorded(name) is not None
            located = spec.axis == "token" and self._is_located(name)
            if not (confirmed or located or self._is_rebuilt(name)):
                out += self._damaged[f"{name}/{spec.file}"]
        return out

    def _is_located(self, name: str) -> bool:
        """Whether some chunk of a damaged array of tokens is found to be damaged; otherwise it is another file."""
        walked = self._reader.walked(name)
        if walked is not None and (not walked.found or walked.is_whole):
            return False
        for row in range(self._commit.records):
            start = self._commit.token_starts[row]
            try:
                self._reader.rows(name, slice(start, start + self._commit.tokens[row]))
            except StoreError:
                return True
        return False

    def _is_rebuilt(self, name: str) -> bool:
        """Whether the file is what was written, but for an index that its chunks must have had, or what follows it."""
        walked, file = self._reader.walked(name), self._commit.files[f"{name}/{self._specs[name].file}"]
        return walked is not None and walked.checksum() == file.checksum

    def _recorded(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return the statistics [R, 2] of a capture; None if their own file is not what was written."""
        stats = f"stats/{name.removeprefix('hidden/')}"
        if f"{stats}/{self._specs[stats].file}" in self._damaged:
            return None
        return self._reader.try_read(stats)[0]

    def _confirm(self, row: int, record: Record) -> tuple[dict[str, CaptureStats], list[Problem]]:
        problems, stats = check_record(self._contract, record)
        out = [p.at(self._where) for p in problems if p.severity is Severity.ERROR]
        for key in [] if out else self._contract.keys:
            recorded = self._recorded(f"hidden/{key}")
            if recorded is None:
                continue
            found, (mean, most) = stats[key], recorded[row].tolist()
            stats[key] = CaptureStats(mean_l2=mean, max_abs=most)
            with np.errstate(over="ignore"):
                same = float(np.float32(found.max_abs)) == most
            if not (same and np.isclose(found.mean_l2, mean, rtol=_MEAN_TOLERANCE)):
                out.append(
                    problem(
                        "HS504",
                        where=f"{self._where}/hidden/{key}: record {record.id!r}",
                        got=f"states of a mean norm of {found.mean_l2:g}, at most {found.max_abs:g}",
                        expected=f"{mean:g} and {most:g}, as recorded when they were written",
                        record=record.id,
                    )
                )
        return stats, out


class _DamagedReader(SegmentReader):
    """Opens what is left of an array: metadata that is lost but known, a shard without its index."""

    def __init__(self, source: Source, contract: Contract, commit: CommitRecord, damaged: Collection[str]) -> None:
        super().__init__(source, contract, commit)
        self._damaged = damaged

    def opening(self, name: str) -> list[Problem]:
        """Return why nothing of an array can be read; empty: something may."""
        try:
            self._read(name, slice(0, 0), None)
        except StoreError as e:
            return e.problems
        return []

    def walked(self, name: str) -> _WalkedArray | None:
        """Return an opened array whose index is damaged; None: it is not, or there is none."""
        array = self._opened.get(name)
        return array if isinstance(array, _WalkedArray) else None

    def _open(self, name: str) -> NativeArray:
        spec, prefix = self._specs[name], f"{self.commit.prefix}/{name}"
        entry, key = self.commit.files.get(f"{name}/zarr.json"), f"{name}/{spec.file}"
        if entry is None or key not in self.commit.files:
            where, got = f"{self._source.location}/{prefix}", "not in the commit record"
            raise StoreError(problem("HS503", where=where, got=got, expected="every array of the contract"))
        encoding = self._usual(spec, entry.checksum) or self._encoding(spec, prefix, entry.checksum)
        size = self._source.size(f"{prefix}/{spec.file}")
        if size is None:
            where, expected = f"{self._source.location}/{prefix}/{spec.file}", "every chunk of the array"
            raise StoreError(problem("HS503", where=where, got="no file", expected=expected))
        sizes = {spec.file: size}
        if size == self.commit.files[key].size or not spec.sharded:
            try:
                return NativeArray(self._source, prefix, spec, encoding, sizes)
            except StoreError:
                if not spec.sharded or key not in self._damaged:
                    raise
        return _WalkedArray(self._source, prefix, spec, encoding, sizes)


class _WalkedArray(NativeArray):
    """A shard whose index is lost or cut off: its chunks are taken to follow each other, as writers write them.

    Attributes
    ----------
    found
        Chunks, from the first on, for which there are bytes.
    is_whole
        Whether the file ends with an index of no more chunks than were found, though it should have more.
    """

    found = 0

    def _read_index(self, size: int) -> npt.NDArray[np.int64]:
        index = np.zeros((-(-self._spec.shape[0] // self._rows), 2), np.int64)  # 0 bytes: not found, hence damaged
        at = 0
        for chunk in range(len(index)):
            length = self._length(at, size)
            if not length or at + length > size:
                break
            index[chunk] = at, length
            at += length
            self.found = chunk + 1
        self.is_whole = self.found < len(index) and self._has_index(size)
        return index

    def _has_index(self, size: int) -> bool:
        tail = np.empty(min(size, index_bytes(self.found)), np.uint8)
        self._fill(size - len(tail), [tail])
        for chunks in range(1, self.found + 1):
            data = tail[len(tail) - index_bytes(chunks) :] if index_bytes(chunks) <= len(tail) else tail[:0]
            if len(data) and not data[:8].any() and not parse_index(data, chunks=chunks, size=size, where="")[1]:
                return True
        return False

    def checksum(self) -> str | None:
        """Return that of its chunks with the index that they must have had; None: not all were found."""
        if self.found < len(self._starts):
            return None
        total, end = Checksum(), self._starts[-1] + self._lengths[-1]
        for start in range(0, end, _BLOCK):
            data = np.empty(min(_BLOCK, end - start), np.uint8)
            self._fill(start, [data])
            total.update(data)
        total.update(encode_index(list(zip(self._starts, self._lengths, strict=True))))
        return str(total)

    def _length(self, at: int, size: int) -> int:
        """Return the length of the chunk that begins here; 0 if none does."""
        if not self._compressed:
            return self._chunk_bytes + CRC_BYTES
        if at + _BLOSC_HEADER.size > size:
            return 0
        data = np.empty(_BLOSC_HEADER.size, np.uint8)
        self._fill(at, [data])
        *_, nbytes, _, cbytes = _BLOSC_HEADER.unpack(data.tobytes())
        return cbytes + CRC_BYTES if nbytes == self._chunk_bytes else 0
