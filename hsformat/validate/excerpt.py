"""Some rows of the states of some records, to be compared with the target: evenly spread, the same at each run.

May import ``store`` and ``contract``. Shapes: R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.dtypes import to_float32
from hsformat.problems import Problem, StoreError
from hsformat.record import Record
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord, load_commit
from hsformat.store.segment import SegmentReader

__all__ = ["Excerpt", "Extent", "Positions", "any_position", "excerpts", "is_greedy", "predicting_positions", "spread"]

_GOLDEN = 0.6180339887498949
"""Multiples of it fill 0..1 evenly, however many there are: each record is looked at in another place."""


class Extent(NamedTuple):
    """A segment by name, with the number of its records that are eligible."""

    name: str
    records: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Excerpt:
    """Rows of one capture of one record; those that are not finite are left out.

    Attributes
    ----------
    where, record
        The record's place and id.
    input_ids
        [T], all of the record.
    at
        [R], the token of each row.
    states
        [R, H] as float32.
    """

    where: str
    record: str
    key: str
    input_ids: npt.NDArray[Any]
    at: npt.NDArray[np.int64]
    states: npt.NDArray[np.float32]

    def ids(self, shift: int) -> npt.NDArray[np.int64]:
        """Return the token id at ``at + shift``, [R]; -1: there is no such token."""
        place = self.at + shift
        inside = (place >= 0) & (place < len(self.input_ids))
        return np.where(inside, self.input_ids[np.where(inside, place, 0)].astype(np.int64), -1)


Positions = Callable[[Record, int], npt.NDArray[np.int64]]
"""From a record without states, and the number of its states, to the rows that may be taken, ascending."""


def any_position(_: Record, states: int) -> npt.NDArray[np.int64]:
    """Return all rows."""
    return np.arange(states)


def predicting_positions(record: Record, states: int) -> npt.NDArray[np.int64]:
    """Return the rows whose next token the assistant wrote."""
    rows: npt.NDArray[np.int64] = np.flatnonzero(record.loss_mask[1:])
    return rows[rows < states]


def is_greedy(commit: CommitRecord, row: int) -> bool:
    """Return whether the target wrote a record's supervised tokens greedily."""
    return commit.provenance[commit.provenance_index[row]].generation.mode == "greedy"


def excerpts(
    source: Source,
    contract: Contract,
    segments: Sequence[Extent],
    key: str,
    *,
    records: int,
    rows: int,
    positions: Positions,
    eligible: Callable[[CommitRecord, int], bool] = lambda commit, row: True,
    problems: list[Problem],
) -> Iterator[Excerpt]:
    """Yield one excerpt of a capture a record, of up to so many records and rows.

    Parameters
    ----------
    segments
        With the number of records in each for which ``eligible`` is true.
    key
        The capture.
    positions
        Which rows of a record may be taken; consecutive ones of them are.
    problems
        Why states could not be read is added here.
    """
    ends = list(accumulate(s.records for s in segments))
    chosen = enumerate(spread(ends[-1] if ends else 0, records))
    for s, members in groupby(chosen, key=lambda pair: int(np.searchsorted(ends, pair[1], side="right"))):
        commit, found = load_commit(source, segments[s].name)
        if commit is None:
            problems += found
            continue
        reader = SegmentReader(source, contract, commit)
        able = [row for row in range(commit.records) if eligible(commit, row)]
        for i, place in members:
            row = able[place - ends[s] + segments[s].records]
            try:
                yield from _of_record(reader, row, key, rows, positions, (i + 0.5) * _GOLDEN % 1, source.location)
            except StoreError as e:
                problems += e.problems


def _of_record(
    reader: SegmentReader,
    row: int,
    key: str,
    rows: int,
    positions: Positions,
    fraction: float,
    location: str,
) -> Iterator[Excerpt]:
    commit = reader.commit
    record = reader.record(row, captures=())
    able = positions(record, commit.states[row])
    start = int(fraction * max(1, len(able) - rows + 1))
    at = able[start : start + rows]
    if not at.size:
        return
    places = runs([commit.state_starts[row] + int(t) for t in at])
    parts = [reader.rows(f"hidden/{key}", slice(first, last + 1), record=record.id) for first, last in places]
    states_RH = to_float32(np.concatenate(parts))
    finite_R = np.isfinite(states_RH).all(axis=1)
    yield Excerpt(
        where=f"{location}/{commit.prefix}: record {record.id!r}: hidden[{key!r}]",
        record=record.id,
        key=key,
        input_ids=record.input_ids,
        at=at[finite_R],
        states=states_RH[finite_R],
    )


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive numbers."""
    for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = [row for _, row in run]
        yield members[0], members[-1]


def spread(n: int, k: int) -> list[int]:
    """Return up to k different indexes of n, evenly spaced, both ends among them."""
    return sorted({round(i * (n - 1) / max(1, min(n, k) - 1)) for i in range(min(n, k))})
