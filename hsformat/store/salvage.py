"""What can still be read of a damaged segment, record by record, and is proved to be what was written.

Three things prove it. A file whose checksum is right is what was written. A chunk whose CRC-32C is right is part of
the file if other chunks of it are not (damage that was found), and not if none is: then the file is another one. And
the statistics of each record, from a file that is whole, tell whose states they are: they confirm what was found in a
shard whose index is lost, chunk after chunk from its beginning.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.checks import check_record
from hsformat.contract import Contract
from hsformat.problems import Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.array_json import ArraySpec, check_array_json, check_length
from hsformat.store.backend import Source
from hsformat.store.codec import CRC_BYTES, DamagedChunk
from hsformat.store.commit import CommitRecord
from hsformat.store.metadata import MAX_JSON_BYTES, json_object
from hsformat.store.native import NativeArray
from hsformat.store.segment import SegmentReader
from hsformat.store.verify import INDEX_ARRAYS

__all__ = ["Salvage", "known_ids"]

_BLOSC_HEADER = struct.Struct("<BBBBIII")  # version, its own version, flags, typesize, nbytes, blocksize, cbytes
_SMALL: dict[str, np.dtype[Any]] = {"ids": np.dtype(np.uint8), "id_offsets": np.dtype("<i8")}
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
            if not confirmed and not located:
                out += self._damaged[f"{name}/{spec.file}"]
        return out

    def _is_located(self, name: str) -> bool:
        """Whether some chunk of a damaged array of tokens is found to be damaged; otherwise it is another file."""
        for row in range(self._commit.records):
            start = self._commit.token_starts[row]
            try:
                self._reader.rows(name, slice(start, start + self._commit.tokens[row]))
            except StoreError:
                return True
        return False

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
        if size == self.commit.files[key].size or spec.axis != "state":
            try:
                return NativeArray(self._source, prefix, spec, encoding, {spec.file: size})
            except StoreError:
                if spec.axis != "state" or key not in self._damaged:
                    raise
        return _WalkedArray(self._source, prefix, spec, encoding, {spec.file: size})


class _WalkedArray(NativeArray):
    """A shard whose index is lost or cut off: its chunks are taken to follow each other, as writers write them."""

    def _read_index(self, size: int) -> npt.NDArray[np.int64]:
        index = np.zeros((-(-self._spec.shape[0] // self._rows), 2), np.int64)  # 0 bytes: not found, hence damaged
        at = 0
        for chunk in range(len(index)):
            length = self._length(at, size)
            if not length or at + length > size:
                break
            index[chunk] = at, length
            at += length
        return index

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


def known_ids(source: Source, prefix: str) -> list[str]:
    """Return the ids of a segment whose commit record is damaged, from its arrays; empty if those do not say."""
    arrays = []
    for name in ("id_offsets", "ids"):
        array = _small_array(source, f"{prefix}/{name}", name)
        if array is None:
            return []
        arrays.append(array)
    offsets, text = arrays
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(text) or (np.diff(offsets) <= 0).any():
        return []
    data = text.tobytes()
    try:
        return [data[a:b].decode() for a, b in pairwise(offsets.tolist())]
    except UnicodeDecodeError:
        return []


def _small_array(source: Source, prefix: str, name: str) -> npt.NDArray[Any] | None:
    """Read an array of one chunk by its own metadata; its CRC-32C vouches for it. None: it cannot be read."""
    where = f"{source.location}/{prefix}"
    try:
        raw = source.read(f"{prefix}/zarr.json", 0, MAX_JSON_BYTES + 1)
        data = json_object(raw)
        shape = data.get("shape") if isinstance(data, dict) else None
        if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or not 0 < shape[0] < 2**31:
            return None
        spec = ArraySpec(name=name, shape=(shape[0],), dtype=_SMALL[name])
        encoding, problems = check_array_json(raw, spec, where=where)
        size = source.size(f"{prefix}/{spec.file}")
        if problems or size is None or check_length(spec, encoding, size, where=where):
            return None
        return NativeArray(source, prefix, spec, encoding, {spec.file: size}).read(slice(None))
    except (OSError, StoreError, DamagedChunk):
        return None
