"""Reading one committed segment: every byte is compared with the commit record before it is used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from hsformat.contract import Contract
from hsformat.digests import checksum
from hsformat.problems import Problem, StoreError, problem
from hsformat.record import Record
from hsformat.store.arrays import is_sharded, open_array
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord
from hsformat.store.verify import file_problems

__all__ = ["SegmentReader"]

_DAMAGED = (ValueError, RuntimeError, SystemError)
"""What zarr-python and numcodecs raise on damaged bytes: checksums, lengths; Blosc; a size below 0 in its header."""


class SegmentReader:
    """Arrays and records of one segment. Keeps opened arrays and decoded small ones; holds no file open."""

    def __init__(self, source: Source, contract: Contract, commit: CommitRecord) -> None:
        self._source, self._contract, self.commit = source, contract, commit
        self._specs = commit.array_specs(contract)
        self._files = {name: [k for k in commit.files if k.startswith(f"{name}/")] for name in self._specs}
        self._opened: dict[str, zarr.Array[Any]] = {}
        self._small: dict[str, npt.NDArray[Any]] = {}

    def record(self, row: int, captures: Collection[str]) -> Record:
        """Return a record with some of its captures; its arrays are its own.

        Raises
        ------
        StoreError
            HS503, HS504, HS505, HS507 or HS101, with the segment, the array and the record's id.
        """
        c = self.commit
        rid, t0, s0 = c.ids[row], c.token_starts[row], c.state_starts[row]
        tokens, states = slice(t0, t0 + c.tokens[row]), slice(s0, s0 + c.states[row])

        def small(name: str, rows: slice) -> npt.NDArray[Any]:
            return self.rows(name, rows, record=rid).copy()

        positions = small("position_ids", tokens) if "position_ids" in self._specs else None
        if positions is not None and np.array_equal(positions, np.arange(c.tokens[row])):
            positions = None
        fields = {
            f.name: small(f"fields/{f.name}", tokens)
            if f.axis == "token"
            else small(f"fields/{f.name}", slice(row, row + 1))[0]
            for f in self._contract.fields
        }
        return Record(
            id=rid,
            input_ids=small("input_ids", tokens),
            loss_mask=small("loss_mask", tokens),
            hidden={key: self.rows(f"hidden/{key}", states, record=rid) for key in captures},
            position_ids=positions,
            fields=fields,
            provenance=c.provenance[c.provenance_index[row]],
            source_digest=c.source_digests[row],
        )

    def rows(self, name: str, rows: slice, *, record: str | None = None) -> npt.NDArray[Any]:
        """Return rows of an array. Of states these alone are read; a small array is read once and kept.

        Raises
        ------
        StoreError
            As :meth:`record`.
        """
        if is_sharded(name):
            return self._read(name, rows, record)
        if name not in self._small:
            self._small[name] = self._read(name, slice(None), record)
        return self._small[name][rows]

    def try_read(self, name: str) -> tuple[npt.NDArray[Any] | None, list[Problem]]:
        """Return a whole array, or None and why it cannot be read."""
        try:
            return self.rows(name, slice(None)), []
        except StoreError as e:
            return None, e.problems

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays that the segment has by its contract and commit record."""
        return tuple(self._specs)

    def _read(self, name: str, rows: slice, record: str | None) -> npt.NDArray[Any]:
        place = f"{self._source.location}/{self.commit.prefix}/{name}"
        try:
            if found := list(file_problems(self._source, self.commit, keys=self._files[name])):
                raise StoreError(found)
            return _decode(self._open(name), rows, place)
        except StoreError as e:
            raise StoreError([_of_record(p, record) for p in e.problems]) from e
        except OSError as e:
            got = f"cannot be read: {e.strerror or e}"
            found = [problem("HS503", where=place, got=got, expected="the array as it was written")]
            raise StoreError([_of_record(p, record) for p in found]) from e

    def _open(self, name: str) -> zarr.Array[Any]:
        if name not in self._opened:
            prefix = f"{self.commit.prefix}/{name}"
            where = f"{self._source.location}/{prefix}"
            entry = self.commit.files.get(f"{name}/zarr.json")
            if entry is None:
                expected = "every array of the contract"
                raise StoreError(problem("HS503", where=where, got="not in the commit record", expected=expected))
            metadata = self._source.read(f"{prefix}/zarr.json")
            if (actual := checksum(metadata)) != entry.checksum:
                raise StoreError(problem("HS504", where=f"{where}/zarr.json", got=actual, expected=entry.checksum))
            sizes = {k.removeprefix(f"{name}/"): self.commit.files[k].size for k in self._files[name]}
            spec, codec = self._specs[name], self._contract.codec
            self._opened[name] = open_array(self._source, prefix, metadata, sizes, spec, codec)
        return self._opened[name]


def _decode(array: zarr.Array[Any], rows: slice, where: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(array[rows])
    except StoreError:
        raise
    except _DAMAGED as e:
        got = f"cannot be decoded: {str(e).partition(chr(10))[0] or type(e).__name__}"
        raise StoreError(problem("HS504", where=where, got=got, expected="bytes as they were written")) from e


def _of_record(p: Problem, record: str | None) -> Problem:
    return p if record is None else replace(p, where=f"{p.where}: record {record!r}", record=record)
