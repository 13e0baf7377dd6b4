"""Reading one committed segment: every byte is compared with the commit record before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.digests import checksum
from hsformat.problems import Problem, StoreError, problem
from hsformat.record import Record
from hsformat.store.array_json import ArraySpec, Encoding, check_array_json, check_length, check_small_arrays
from hsformat.store.arrays import chunk_rows, metadata
from hsformat.store.backend import Bytes, Source
from hsformat.store.codec import Codec, DamagedChunk
from hsformat.store.commit import CommitRecord
from hsformat.store.metadata import MAX_JSON_BYTES
from hsformat.store.native import NativeArray
from hsformat.store.unread import unread
from hsformat.store.verify import file_problems

__all__ = ["Decoder", "SegmentReader"]

Decoder = Literal["native", "zarr"]
"""Who decodes: this library, or zarr-python, to which it is compared."""

_NO_ROWS = np.empty(0)


class _Rows(Protocol):
    def read(self, rows: slice, *, verify: bool = True) -> npt.NDArray[Any]: ...


class SegmentReader:
    """Arrays and records of one segment. Keeps in memory what is small, and files open as ``opened`` says.

    Parameters
    ----------
    decoder
        ``zarr``: by zarr-python, which always verifies.
    verify
        Whether the CRC-32C of each chunk is compared.
    """

    def __init__(
        self,
        source: Source,
        contract: Contract,
        commit: CommitRecord,
        *,
        decoder: Decoder = "native",
        verify: bool = True,
    ) -> None:
        self._source, self._contract, self.commit = source, contract, commit
        self._decoder, self._verify = decoder, verify
        self._specs = commit.array_specs(contract)
        self._too_large = check_small_arrays(self._specs.values(), where=f"{source.location}/{commit.prefix}")
        self._opened: dict[str, _Rows] = {}
        self._small: dict[str, npt.NDArray[Any]] = {}
        self._windows: dict[str, tuple[int, npt.NDArray[Any]]] = {}

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

        def rows(name: str, rows: slice) -> npt.NDArray[Any]:
            return self.rows(name, rows, record=rid)

        positions = rows("position_ids", tokens) if "position_ids" in self._specs else None
        if positions is not None and np.array_equal(positions, np.arange(c.tokens[row])):
            positions = None
        fields = {
            f.name: rows(f"fields/{f.name}", tokens)
            if f.axis == "token"
            else rows(f"fields/{f.name}", slice(row, row + 1))[0]
            for f in self._contract.fields
        }
        return Record(
            id=rid,
            input_ids=rows("input_ids", tokens),
            loss_mask=rows("loss_mask", tokens),
            hidden={key: rows(f"hidden/{key}", states) for key in captures},
            position_ids=positions,
            fields=fields,
            provenance=c.provenance[c.provenance_index[row]],
            source_digest=c.source_digests[row],
        )

    def rows(self, name: str, rows: slice, *, record: str | None = None) -> npt.NDArray[Any]:
        """Return rows of an array, as an array of their own.

        Of states these alone are read; of what else there is a token, the chunks that hold them; the rest, once.

        Raises
        ------
        StoreError
            As :meth:`record`.
        """
        spec = self._specs[name]
        if spec.axis == "state":
            return self._read(name, rows, record)
        if spec.axis == "record":
            if name not in self._small:
                self._small[name] = self._read(name, slice(None), record)
            return self._small[name][rows].copy()
        first, last, _ = rows.indices(spec.shape[0])
        start, window = self._windows.get(name, (0, _NO_ROWS))
        if (
            not start <= first <= last <= start + len(window)
        ):  # whole chunks, of which the next record is often one, too
            step = chunk_rows(spec, "fast")
            start, end = first // step * step, -(-last // step) * step
            window = self._read(name, slice(start, end), record)
            self._windows[name] = start, window
        return window[first - start : last - start].copy()

    def stream(self, name: str, seen: Callable[[Bytes], None]) -> Iterator[npt.NDArray[Any]] | None:
        """Return all rows of a sharded array in blocks that overwrite each other, its file read once and in order.

        Returns
        -------
        As :meth:`hsformat.store.native.NativeArray.blocks`, with its errors as a StoreError; None if the array cannot
        be read so.

        Raises
        ------
        StoreError
            The array cannot be opened.
        """
        place = f"{self._source.location}/{self.commit.prefix}/{name}"
        with _as_problems(place):
            if (array := self._opened.get(name)) is None:
                array = self._opened[name] = self._open(name)
        return self._blocks(array, place, seen) if isinstance(array, NativeArray) and array.ordered else None

    def _blocks(self, array: NativeArray, place: str, seen: Callable[[Bytes], None]) -> Iterator[npt.NDArray[Any]]:
        with _as_problems(place):
            yield from array.blocks(seen)

    def try_read(self, name: str) -> tuple[npt.NDArray[Any] | None, list[Problem]]:
        """Return a whole array, or None and why it cannot be read."""
        try:
            return self.rows(name, slice(None)), []
        except StoreError as e:
            return None, e.problems

    def size_problems(self) -> list[Problem]:
        """Return HS507 where the arrays that are read whole are larger together than is allowed (rule G-7)."""
        return self._too_large

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays that the segment has by its contract and commit record."""
        return tuple(self._specs)

    def _read(self, name: str, rows: slice, record: str | None) -> npt.NDArray[Any]:
        try:
            with _as_problems(f"{self._source.location}/{self.commit.prefix}/{name}"):
                if (array := self._opened.get(name)) is None:
                    array = self._opened[name] = self._open(name)
                return array.read(rows, verify=self._verify)
        except StoreError as e:
            raise StoreError([_of_record(p, record) for p in e.problems]) from e

    def _open(self, name: str) -> _Rows:
        prefix, entry = f"{self.commit.prefix}/{name}", self.commit.files.get(f"{name}/zarr.json")
        where, spec = f"{self._source.location}/{prefix}", self._specs[name]
        if entry is None:
            expected = "every array of the contract"
            raise StoreError(problem("HS503", where=where, got="not in the commit record", expected=expected))
        files = [k for k in self.commit.files if k.startswith(f"{name}/")]
        if found := list(file_problems(self._source, self.commit, keys=files)):
            raise StoreError(found)
        if self._too_large and spec.axis != "state":
            raise StoreError(self._too_large)
        encoding = self._usual(spec, entry.checksum) or self._encoding(spec, prefix, entry.checksum)
        sizes = {k.removeprefix(f"{name}/"): self.commit.files[k].size for k in files}
        if found := check_length(spec, encoding, sizes.get(spec.file, 0), where=where):
            raise StoreError(found)
        if self._decoder == "native":
            return NativeArray(self._source, prefix, spec, encoding, sizes)
        from hsformat.store.reference import ReferenceArray

        return ReferenceArray(self._source, prefix, spec, encoding, sizes)

    def _usual(self, spec: ArraySpec, expected: str) -> Encoding | None:
        """Return how the array is encoded if its metadata is what this library writes, by its checksum, unread."""
        codec: Codec
        for codec in ("compact", "fast"):
            encoding = Encoding(chunk_rows(spec, codec), codec)
            if checksum(metadata(spec, **encoding._asdict())) == expected:
                return encoding
        return None

    def _encoding(self, spec: ArraySpec, prefix: str, expected: str) -> Encoding:
        where = f"{self._source.location}/{prefix}"
        raw = self._source.read(f"{prefix}/zarr.json", 0, MAX_JSON_BYTES + 1)
        if len(raw) <= MAX_JSON_BYTES and (actual := checksum(raw)) != expected:
            raise StoreError(problem("HS504", where=f"{where}/zarr.json", got=actual, expected=expected))
        encoding, problems = check_array_json(raw, spec, where=where)
        if problems:
            raise StoreError(problems)
        return encoding


@contextlib.contextmanager
def _as_problems(place: str) -> Iterator[None]:
    """Turn what an array that is damaged or cannot be read raises into a StoreError."""
    try:
        yield
    except DamagedChunk as e:
        got, expected = f"cannot be decoded: {e}", "bytes as they were written"
        raise StoreError(problem("HS504", where=place, got=got, expected=expected)) from e
    except OSError as e:
        raise StoreError(unread(e, where=place, expected="bytes as they were written")) from e


def _of_record(p: Problem, record: str | None) -> Problem:
    return p if record is None else replace(p, where=f"{p.where}: record {record!r}", record=record)
