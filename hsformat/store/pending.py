"""The records of a segment that is being written, without their states: what is kept in memory until the commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.array_json import ArraySpec
from hsformat.store.arrays import array_specs
from hsformat.store.codec import MAX_CHUNK_BYTES

__all__ = ["Pending", "Row", "make_row"]


class Totals(NamedTuple):
    """Sums over the records of a segment up to one of them, and with it."""

    records: int = 0
    tokens: int = 0
    states: int = 0
    id_bytes: int = 0
    nbytes: int = 0


_NONE = Totals()


@dataclass(slots=True, kw_only=True)
class Row:
    """One record without its states, as it will be stored: copies, in the element types of the disk.

    ``positions`` is None where they are 0..T-1; ``provenance`` is JSON; ``nbytes`` are those of the arrays; ``totals``
    is set when the record is added.
    """

    id: str
    tokens: int
    states: int
    source_digest: str | None
    provenance: dict[str, Any]
    positions: npt.NDArray[np.int64] | None
    arrays: dict[str, npt.NDArray[Any]]
    nbytes: int
    totals: Totals = _NONE


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
        nbytes=sum(a.nbytes for a in arrays.values()) + (0 if positions is None else positions.nbytes),
    )


class Pending:
    """The records of the next segment, and how large it will be.

    Attributes
    ----------
    rows
        By id, in order. All sums are those of the last row, so that a record is counted by one assignment.
    """

    def __init__(self, contract: Contract, *, segment_bytes: int) -> None:
        self.rows: dict[str, Row] = {}
        self._contract, self._segment_bytes = contract, segment_bytes
        itemsizes = (numpy_dtype(c.dtype).itemsize for c in contract.captures)
        self._state_bytes = contract.target.hidden_size * sum(itemsizes)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def totals(self) -> Totals:
        """Sums over all records."""
        return next(reversed(self.rows.values())).totals if self.rows else _NONE

    def _with(self, row: Row) -> Totals:
        t, nbytes = self.totals, row.nbytes + row.states * self._state_bytes
        ids = t.id_bytes + len(row.id.encode())
        return Totals(t.records + 1, t.tokens + row.tokens, t.states + row.states, ids, t.nbytes + nbytes)

    def specs(self, totals: Totals, *, positions: bool) -> dict[str, ArraySpec]:
        """Return the arrays of a segment of these sums."""
        return array_specs(
            self._contract,
            tokens=totals.tokens,
            states=totals.states,
            records=totals.records,
            id_bytes=totals.id_bytes,
            positions=positions,
        )

    def has_room(self, row: Row) -> bool:
        """Return whether a record still fits: all arrays together, and each array of one chunk into it."""
        after = self._with(row)
        small = (s for s in self.specs(after, positions=True).values() if not s.sharded)
        return after.nbytes <= self._segment_bytes and all(s.nbytes <= MAX_CHUNK_BYTES for s in small)

    def add(self, row: Row) -> None:
        """Take a row over."""
        row.totals = self._with(row)
        self.rows[row.id] = row

    def clear(self) -> None:
        """Forget all records."""
        self.rows.clear()

    def join(self, name: str) -> npt.NDArray[Any]:
        """Return an array of all records but their states."""
        rows = self.rows.values()
        match name:
            case "ids":
                return np.frombuffer("".join(self.rows).encode(), np.uint8)
            case "id_offsets":
                return _offsets([len(i.encode()) for i in self.rows])
            case "token_offsets":
                return _offsets([r.tokens for r in rows])
            case "state_offsets":
                return _offsets([r.states for r in rows])
            case "position_ids":
                return np.concatenate(
                    [np.arange(r.tokens, dtype=np.int64) if r.positions is None else r.positions for r in rows]
                )
            case _:
                return np.concatenate([r.arrays[name] for r in rows])


def _offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)
