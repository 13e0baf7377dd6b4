"""Records that wait to be committed, and how they become a segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.digests import canonical_json, checksum
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record
from hsformat.scan import CaptureStats, store_states
from hsformat.store.arrays import Dimensions, encode_array, segment_groups
from hsformat.store.backend import Backend, Data
from hsformat.store.commit import FileEntry, commit_members, seal
from hsformat.store.metadata import SEGMENTS, ensure_segments, group_json
from hsformat.store.size import NO_RECORDS, Totals, fits, state_bytes

__all__ = ["Pending", "Row", "make_row", "write_segment"]


@dataclass(slots=True, kw_only=True)
class Row:
    """One record without its states, as it will be stored: copies, in the element types of the disk.

    ``positions`` is None where they are 0..T-1; ``provenance`` is JSON; ``totals`` is set when the record is added.
    """

    id: str
    tokens: int
    states: int
    source_digest: str | None
    provenance: dict[str, Any]
    positions: npt.NDArray[np.int64] | None
    arrays: dict[str, npt.NDArray[Any]]
    totals: Totals = NO_RECORDS

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in self.arrays.values()) + (0 if self.positions is None else self.positions.nbytes)


def make_row(contract: Contract, record: Record, stats: Mapping[str, CaptureStats]) -> Row:
    """Copy everything of a valid record but its states."""
    arrays: dict[str, npt.NDArray[Any]] = {}

    def put(name: str, array: Any, dtype: str) -> None:
        arrays[name] = np.array(array, dtype=numpy_dtype(dtype), order="C", copy=True)

    put("input_ids", record.input_ids, "int32")
    put("loss_mask", record.loss_mask, "uint8")
    for key, one in stats.items():
        with np.errstate(over="ignore"):
            put(f"stats/{key}", [[one.mean_l2, one.max_abs]], "float32")
    for f in contract.fields:
        array = record.fields[f.name]
        put(f"fields/{f.name}", array if f.axis == "token" else array[None], f.dtype)
    positions = None if record.position_ids is None else record.position_ids.astype(np.int64)
    if positions is not None and np.array_equal(positions, np.arange(record.num_tokens)):
        positions = None
    return Row(
        id=record.id,
        tokens=record.num_tokens,
        states=record.num_states,
        source_digest=record.source_digest,
        provenance=record.provenance.model_dump(mode="json"),
        positions=positions,
        arrays=arrays,
    )


class Pending:
    """The records of the next segment.

    States go into one array a capture, reserved for a whole segment and used again for the next: no second copy is made
    when they are encoded, and pages that are not written cost nothing.

    Attributes
    ----------
    rows
        By id, in order. A record is there from one assignment on, which takes its space and its bytes as well: all sums
        are those of the last row, so that a signal between two statements finds a record whole or not at all.
    """

    def __init__(self, contract: Contract, *, segment_bytes: int, chunk_tokens: int) -> None:
        self.rows: dict[str, Row] = {}
        self._contract, self._segment_bytes, self._chunk_tokens = contract, segment_bytes, chunk_tokens
        self._dimensions = Dimensions.of(contract)
        self._state_bytes = state_bytes(self._dimensions)
        self._states: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def totals(self) -> Totals:
        """Sums over all records."""
        return next(reversed(self.rows.values())).totals if self.rows else NO_RECORDS

    def _with(self, row: Row) -> Totals:
        nbytes = row.nbytes + row.states * self._state_bytes
        return self.totals.plus(tokens=row.tokens, states=row.states, id_bytes=len(row.id.encode()), nbytes=nbytes)

    def has_room(self, row: Row) -> bool:
        """Return whether a record still fits: all arrays together, and each small array into its one chunk."""
        return fits(self._dimensions, self._with(row), segment_bytes=self._segment_bytes)

    def add(self, row: Row, hidden: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy states, rounding them to the captures' dtypes, and take the row over."""
        start, after = self.totals.states, self._with(row)
        if after.states > self._capacity:  # the first record, or one that is larger than a segment
            self._reserve(max(after.states, self._segment_bytes // self._state_bytes))
        for key, array in self._states.items():
            store_states(array[start : after.states], hidden[key])
        row.totals = after
        self.rows[row.id] = row

    @property
    def _capacity(self) -> int:
        return next((len(array) for array in self._states.values()), 0)

    def _reserve(self, states: int) -> None:
        shape = (-(-states // self._chunk_tokens) * self._chunk_tokens, self._contract.target.hidden_size)
        self._states = {c.key: np.empty(shape, numpy_dtype(c.dtype)) for c in self._contract.captures}

    def clear(self) -> None:
        """Forget all records; what is reserved is kept, unless one record was larger than a segment."""
        self.rows.clear()
        if self._capacity * self._state_bytes > 2 * self._segment_bytes:
            self._states = {}

    def join(self, name: str) -> npt.NDArray[Any]:
        """Return one array of all records; of states with rows of NaN up to a multiple of the chunk."""
        rows = self.rows.values()
        match name.split("/"):
            case ["hidden", key]:
                used = self.totals.states
                padded = self._states[key][: -(-used // self._chunk_tokens) * self._chunk_tokens]
                padded[used:] = np.nan
                return padded
            case ["ids"]:
                return np.frombuffer("".join(self.rows).encode(), np.uint8)
            case ["id_offsets"]:
                return _offsets([len(i.encode()) for i in self.rows])
            case ["token_offsets"]:
                return _offsets([r.tokens for r in rows])
            case ["state_offsets"]:
                return _offsets([r.states for r in rows])
            case ["position_ids"]:
                return np.concatenate(
                    [np.arange(r.tokens, dtype=np.int64) if r.positions is None else r.positions for r in rows]
                )
            case _:
                return np.concatenate([r.arrays[name] for r in rows])


def _offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)


def write_segment(
    backend: Backend,
    contract: Contract,
    pending: Pending,
    *,
    writer: str,
    n: int,
    producer: Mapping[str, Any] | None,
    chunk_tokens: int,
) -> int:
    """Write and commit a segment; return its bytes on the disk.

    One array is encoded and written at a time. The commit record comes last, when everything else is durable.

    Raises
    ------
    OSError
        Nothing is committed.
    """
    prefix = f"{SEGMENTS}/{writer}-{n}"
    files: dict[str, FileEntry] = {}
    ensure_segments(backend)

    def write(key: str, data: Data) -> None:
        backend.write(f"{prefix}/{key}", data)
        files[key] = FileEntry(len(data), checksum(data))

    for group in segment_groups(contract.fields):
        write(f"{group}/zarr.json", group_json())
    rows = list(pending.rows.values())
    specs = pending.totals.specs(Dimensions.of(contract), positions=any(r.positions is not None for r in rows))
    for name, spec in specs.items():
        for key, data in encode_array(pending.join(name), spec, codec=contract.codec, chunk_tokens=chunk_tokens):
            write(f"{name}/{key}", data)
    distinct: dict[bytes, int] = {}
    index = [distinct.setdefault(canonical_json(r.provenance), len(distinct)) for r in rows]
    members = commit_members(
        writer=writer,
        n=n,
        ids=[r.id for r in rows],
        tokens=[r.tokens for r in rows],
        states=[r.states for r in rows],
        provenance=[rows[index.index(i)].provenance for i in range(len(distinct))],
        provenance_index=index,
        source_digests=[r.source_digest for r in rows],
        producer=producer,
        files=files,
    )
    commit = group_json(seal(members))
    backend.settle(prefix)
    backend.publish(f"{prefix}/zarr.json", commit)
    return sum(f.size for f in files.values())
