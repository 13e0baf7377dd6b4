"""The records of a segment that is being written, without their states: what is kept in memory until the commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.arrays import Dimensions
from hsformat.store.size import NO_RECORDS, Totals, fits, state_bytes

__all__ = ["Pending", "Row", "make_row"]


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
    totals: Totals = NO_RECORDS


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
        self._segment_bytes = segment_bytes
        self._dimensions = Dimensions.of(contract)
        self._state_bytes = state_bytes(self._dimensions)

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
        """Return whether a record still fits: all arrays together, and each array of one chunk into it."""
        return fits(self._dimensions, self._with(row), segment_bytes=self._segment_bytes)

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
