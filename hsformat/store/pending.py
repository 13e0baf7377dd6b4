"""The records of a segment that is being written, without their states: what is kept in memory until the commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.array_json import MAX_CHUNKS
from hsformat.store.arrays import Dimensions, chunk_rows
from hsformat.store.codec import MAX_CHUNK_BYTES
from hsformat.store.metadata import MAX_JSON_BYTES
from hsformat.store.size import NO_RECORDS, Totals, fits, small_bytes, state_bytes

__all__ = ["MAX_PRODUCER_BYTES", "Pending", "Row", "make_row"]

MAX_PRODUCER_BYTES = 2**20
"""Of what a writer says of itself, as JSON; it stands in each commit record."""

_JSON_OF_RECORD = 150
"""Bytes of a record's numbers and digest in the commit record, and some more."""

_JSON_OF_FILE = 120
"""Bytes of a file's entry in the commit record without its name, and some more."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One record without its states, as it will be stored: copies, in the element types of the disk.

    ``positions`` is None where they are 0..T-1; ``provenance`` is JSON; ``nbytes`` are those of the arrays,
    ``json_bytes`` those that the record adds to the commit record at most; ``totals`` and ``json_total`` are sums over
    the segment, set when the record is added.
    """

    id: str
    tokens: int
    states: int
    source_digest: str | None
    provenance: dict[str, Any]
    positions: npt.NDArray[np.int64] | None
    arrays: dict[str, npt.NDArray[Any]]
    nbytes: int
    json_bytes: int
    totals: Totals = NO_RECORDS
    json_total: int = 0


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
    provenance = record.provenance.model_dump(mode="json")
    return Row(
        id=record.id,
        tokens=record.num_tokens,
        states=record.num_states,
        source_digest=record.source_digest,
        provenance=provenance,
        json_bytes=len(json.dumps([record.id, provenance])) + _JSON_OF_RECORD,
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

    def __init__(self, contract: Contract, *, segment_bytes: int, chunk_tokens: int | None = None) -> None:
        self.rows: dict[str, Row] = {}
        self._segment_bytes, self._chunk_tokens = segment_bytes, chunk_tokens
        self._dimensions = Dimensions.of(contract)
        self._state_bytes = state_bytes(self._dimensions)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def totals(self) -> Totals:
        """Sums over all records."""
        return next(reversed(self.rows.values())).totals if self.rows else NO_RECORDS

    @property
    def _json_total(self) -> int:
        return next(reversed(self.rows.values())).json_total if self.rows else 0

    def _with(self, row: Row, before: Totals) -> Totals:
        nbytes = row.nbytes + row.states * self._state_bytes
        return before.plus(tokens=row.tokens, states=row.states, id_bytes=len(row.id.encode()), nbytes=nbytes)

    def has_room(self, row: Row) -> bool:
        """Return whether a record still fits: all arrays together, and what a segment may hold."""
        after = self._with(row, self.totals)
        fitting = fits(self._dimensions, after, segment_bytes=self._segment_bytes)
        return fitting and self._excess(after, self._json_total + row.json_bytes) is None

    def excess(self, row: Row) -> str | None:
        """Say by what a segment of this record alone would be more than a segment may be; None: by nothing."""
        return self._excess(self._with(row, NO_RECORDS), row.json_bytes)

    def _excess(self, after: Totals, json_bytes: int) -> str | None:
        specs = after.specs(self._dimensions, positions=True)
        files = sum(2 * (len(name) + _JSON_OF_FILE) for name in specs)
        if json_bytes + files + MAX_PRODUCER_BYTES > MAX_JSON_BYTES:
            return f"ids and provenance of {json_bytes} bytes as JSON"
        if (small := small_bytes(self._dimensions, after)) > MAX_CHUNK_BYTES:
            return f"{small} bytes of ids, mask, positions and fields"
        for spec in specs.values():
            rows = chunk_rows(spec, self._dimensions.codec, self._chunk_tokens)
            if -(-spec.shape[0] // rows) > MAX_CHUNKS:
                return f"{spec.shape[0]} rows of {spec.name} in chunks of {rows}"
        return None

    def add(self, row: Row) -> None:
        """Take a row over."""
        row.totals, row.json_total = self._with(row, self.totals), self._json_total + row.json_bytes
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
