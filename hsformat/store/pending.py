"""Records that wait to be committed, and how they become a segment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.checks import CaptureStats
from hsformat.contract import SPEC_VERSION, Contract
from hsformat.digests import canonical_json, checksum
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record
from hsformat.store.arrays import MAX_CHUNK_BYTES, array_specs, encode_array
from hsformat.store.backend import Backend, Data
from hsformat.store.metadata import SEGMENTS, ensure_segments, group_json, seal

__all__ = ["Pending", "Row", "make_row", "write_segment"]


@dataclass(slots=True, kw_only=True)
class Row:
    """One record without its states, as it will be stored: copies, in the element types of the disk.

    ``positions`` is None where they are 0..T-1; ``provenance`` is JSON.
    """

    id: str
    tokens: int
    states: int
    source_digest: str | None
    provenance: dict[str, Any]
    positions: npt.NDArray[np.int64] | None
    arrays: dict[str, npt.NDArray[Any]]

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
    when they are encoded, and pages that are not written cost nothing. A record counts from the moment its row is in
    ``rows``, by one list append, so that a signal finds it there whole or not at all.
    """

    def __init__(self, contract: Contract, *, segment_bytes: int, chunk_tokens: int) -> None:
        self.rows: list[Row] = []
        self.nbytes = 0
        self._contract, self._segment_bytes, self._chunk_tokens = contract, segment_bytes, chunk_tokens
        itemsizes = (numpy_dtype(c.dtype).itemsize for c in contract.captures)
        self._state_bytes = contract.target.hidden_size * sum(itemsizes)
        self._states: dict[str, npt.NDArray[Any]] = {}
        self._used = self._capacity = 0
        self._sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.rows)

    def has_room(self, row: Row) -> bool:
        """Return whether a record still fits: all arrays together, and each small array into its one chunk."""
        total = self.nbytes + row.nbytes + row.states * self._state_bytes
        small = all(self._sizes[name] + a.nbytes <= MAX_CHUNK_BYTES for name, a in row.arrays.items())
        return total <= self._segment_bytes and small

    def add(self, row: Row, hidden: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy states, rounding them to the captures' dtypes, and take the row over."""
        stop = self._used + row.states
        if stop > self._capacity:  # the first record, or one that is larger than a segment
            self._reserve(max(stop, self._segment_bytes // self._state_bytes))
        for key, array in self._states.items():
            array[self._used : stop] = hidden[key]
        self.rows.append(row)
        self._used = stop
        self.nbytes += row.nbytes + row.states * self._state_bytes
        self._sizes.update({name: a.nbytes for name, a in row.arrays.items()})

    def _reserve(self, states: int) -> None:
        self._capacity = -(-states // self._chunk_tokens) * self._chunk_tokens
        shape = (self._capacity, self._contract.target.hidden_size)
        self._states = {c.key: np.empty(shape, numpy_dtype(c.dtype)) for c in self._contract.captures}

    def clear(self) -> None:
        """Forget all records; what is reserved is kept, unless one record was larger than a segment."""
        if self._capacity * self._state_bytes > 2 * self._segment_bytes:
            self._states, self._capacity = {}, 0
        self.rows = []
        self.nbytes = self._used = 0
        self._sizes.clear()

    def join(self, name: str) -> npt.NDArray[Any]:
        """Return one array of all records; of states with rows of NaN up to a multiple of the chunk."""
        match name.split("/"):
            case ["hidden", key]:
                used = sum(r.states for r in self.rows)
                padded = self._states[key][: -(-used // self._chunk_tokens) * self._chunk_tokens]
                padded[used:] = np.nan
                return padded
            case ["ids"]:
                return np.frombuffer("".join(r.id for r in self.rows).encode(), np.uint8)
            case ["id_offsets"]:
                return _offsets([len(r.id.encode()) for r in self.rows])
            case ["token_offsets"]:
                return _offsets([r.tokens for r in self.rows])
            case ["state_offsets"]:
                return _offsets([r.states for r in self.rows])
            case ["position_ids"]:
                return np.concatenate(
                    [np.arange(r.tokens, dtype=np.int64) if r.positions is None else r.positions for r in self.rows]
                )
            case _:
                return np.concatenate([r.arrays[name] for r in self.rows])


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
    files: dict[str, dict[str, Any]] = {}
    if n == 0:
        ensure_segments(backend)

    def write(key: str, data: Data) -> None:
        backend.write(f"{prefix}/{key}", data)
        files[key] = {"size": len(data), "checksum": checksum(data)}

    for group in ("hidden", "stats", *(["fields"] if contract.fields else [])):
        write(f"{group}/zarr.json", group_json())
    rows = pending.rows
    specs = array_specs(
        contract,
        tokens=sum(r.tokens for r in rows),
        states=sum(r.states for r in rows),
        records=len(rows),
        id_bytes=sum(len(r.id.encode()) for r in rows),
        positions=any(r.positions is not None for r in rows),
    )
    for name, spec in specs.items():
        for key, data in encode_array(pending.join(name), spec, codec=contract.codec, chunk_tokens=chunk_tokens):
            write(f"{name}/{key}", data)
    distinct: dict[bytes, int] = {}
    index = [distinct.setdefault(canonical_json(r.provenance), len(distinct)) for r in rows]
    attribute = {
        "spec_version": SPEC_VERSION,
        "writer": writer,
        "n": n,
        "records": len(rows),
        "ids": [r.id for r in rows],
        "tokens": [r.tokens for r in rows],
        "states": [r.states for r in rows],
        "provenance": [rows[index.index(i)].provenance for i in range(len(distinct))],
        "provenance_index": index,
        "source_digests": [r.source_digest for r in rows],
        "producer": producer,
        "files": files,
    }
    commit = group_json(seal(attribute))
    backend.settle(prefix)
    backend.publish(f"{prefix}/zarr.json", commit)
    return sum(f["size"] for f in files.values())
