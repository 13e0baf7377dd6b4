"""Whose norm is unusual: groups and records against the others, from the statistics recorded at write time.

The mean L2 norm of a record depends on its length: the first token, and now and then another, draws attention and has a
norm up to a hundred times that of the rest. So the mean of S rows is ``a (1 + c / S)``, with one ``c`` a capture; after
that the means of ordinary chats differ by a few per cent (docs/benchmarks.md). What is compared is the logarithm of the
mean less ``log(1 + c / S)``: its *level*.

1. Groups are compared by their medians: segments, and the small segments of one writer together. Two extractors of
   different conventions in one store show here, whatever share of the records is whose.
2. Records are compared with their group, or with all.

Faults of one layer more or less move norms by less than texts do, and are not found here. Imports nothing of hsformat.
Shapes: R records, K captures, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "FEWEST_RECORDS", "RECORD_FACTOR", "Away", "Profile", "SegmentNorms", "Table", "off_groups", "off_records",
    "profile_of", "writer_of",
]  # fmt: skip

FEWEST_RECORDS = 20
"""Below that records and groups are not compared."""
FEWEST_STATES = 32
"""Of a record that is judged by itself: a second token that draws attention doubles the mean of a shorter one."""
FEWEST_OF_GROUP = 8
MOST_OF_GROUP = 0.8
"""Of its records; some odd texts that stand side by side make no odd group."""
RECORD_FACTOR, GROUP_FACTOR = 1.3, 1.5
"""Smaller differences are never told: texts of other kinds (code, other languages) differ by up to 1.3."""
SPREADS = 5.0
"""A record is told from so many standard deviations on, taken from the inner 80% of the levels."""
_Z90 = 1.2816
_FITTED_GROUPS, _FITTED_RECORDS = 32, 128

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentNorms:
    """Statistics of a segment; NaN where they could not be read.

    Attributes
    ----------
    ids, states
        [R], id and number of rows of each record.
    mean_l2, max_abs
        [R, K] in the order of the contract's captures.
    """

    name: str
    ids: Sequence[str]
    states: npt.NDArray[np.int64]
    mean_l2: npt.NDArray[np.float32]
    max_abs: npt.NDArray[np.float32]


class Table:
    """The records of all segments, and the group of each."""

    def __init__(self, segments: Sequence[SegmentNorms]) -> None:
        self.segments = segments
        self.states = np.concatenate([s.states for s in segments]).astype(np.float64)
        self.mean_l2 = np.concatenate([s.mean_l2 for s in segments])
        self.max_abs = np.concatenate([s.max_abs for s in segments])
        self.starts = np.cumsum([0, *(len(s.states) for s in segments)])
        names: dict[str, int] = {}
        # A small segment counts with the others of its writer.
        of_segment = [
            names.setdefault(s.name if len(s.states) >= FEWEST_OF_GROUP else f"{writer_of(s.name)}-*", len(names))
            for s in segments
        ]
        self.group: Ints = np.repeat(of_segment, [len(s.states) for s in segments])
        self.group_names = list(names)
        order = np.argsort(self.group, kind="stable")
        self.members = np.split(order, np.flatnonzero(np.diff(self.group[order])) + 1)

    def place(self, record: int) -> tuple[str, str]:
        """Return the segment's name and the id of a record."""
        s = int(np.searchsorted(self.starts, record, side="right")) - 1
        return self.segments[s].name, self.segments[s].ids[record - int(self.starts[s])]


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """One capture.

    Attributes
    ----------
    mean_l2
        [R], as recorded; NaN: unknown.
    sink
        ``c``: the extra norm of the tokens that draw attention, in typical norms.
    level
        [R]
    group_level
        [G], medians.
    typical
        The level that most records have, as the median of the groups.
    max_abs
        The median over records of the largest absolute value.
    """

    mean_l2: Floats
    sink: float
    level: Floats
    group_level: Floats
    typical: float
    max_abs: float


def profile_of(table: Table, k: int) -> Profile | None:
    """Return what is usual in the k-th capture; None: no statistics of it could be read."""
    mean_l2 = table.mean_l2[:, k].astype(np.float64)
    known = np.isfinite(mean_l2) & (mean_l2 > 0)
    mean_l2[~known] = np.nan
    members = [m[known[m]] for m in table.members]
    if not known.any():
        return None
    logs = np.log(mean_l2)
    sink = _fit_sink(logs, table.states, members)
    level = logs - np.log1p(sink / table.states)
    group_level = np.array([np.median(level[m]) if m.size else np.nan for m in members])
    return Profile(
        mean_l2=mean_l2,
        sink=sink,
        level=level,
        group_level=group_level,
        typical=_middle(group_level, np.array([m.size for m in members])),
        max_abs=float(np.median(table.max_abs[known, k])),
    )


def _fit_sink(logs: Floats, states: Floats, members: Sequence[Ints]) -> float:
    """Return the ``c`` with which the levels of each group are least apart: nearly half of the records may be wrong."""
    picked = [m[_even(len(m), _FITTED_RECORDS)] for m in _even_of([m for m in members if m.size], _FITTED_GROUPS)]

    def apart(c: float) -> float:
        levels = [logs[m] - np.log1p(c / states[m]) for m in picked]
        return float(np.median(np.abs(np.concatenate([x - np.median(x) for x in levels]))))

    best = min((0.0, -0.5, -0.9, *np.geomspace(0.1, 1e5, 49)), key=apart)
    for width in (1.3, 1.05) if best > 0 else ():
        best = min(best * np.linspace(1 / width, width, 9), key=apart)
    return float(best)


def _middle(values: Floats, weights: Ints) -> float:
    """Return the weighted lower median: always one of the values, also where two groups of one size are far apart."""
    order = np.argsort(values, kind="stable")
    order = order[weights[order] > 0]
    total = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(total, total[-1] / 2)]])


def off_groups(p: Profile, table: Table) -> npt.NDArray[np.bool_]:
    """Return which groups are off as a whole: nearly all of their records, and to the same side."""
    off = np.zeros(len(table.members), bool)
    for g in np.flatnonzero(np.abs(p.group_level - p.typical) > math.log(GROUP_FACTOR)):
        away = p.level[table.members[g]] - p.typical
        away = away[np.isfinite(away)] * np.sign(p.group_level[g] - p.typical)
        off[g] = len(away) >= FEWEST_OF_GROUP and np.mean(away > math.log(GROUP_FACTOR)) >= MOST_OF_GROUP
    return off


class Away(NamedTuple):
    """A record's mean norm in one capture, how far its level is away, and between what it would be usual."""

    key: str
    mean_l2: float
    away: float
    least: float
    most: float


def off_records(key: str, p: Profile, table: Table) -> Iterator[tuple[int, Away]]:
    """Yield the index of each record whose norm is unusual; those of a group that is off are not told again."""
    told_as_group = off_groups(p, table)
    own = told_as_group | np.array([m.size >= FEWEST_RECORDS for m in table.members])
    base = np.where(own, p.group_level, p.typical)[table.group]
    away = p.level - base
    known = away[np.isfinite(away)]
    floor = math.log(RECORD_FACTOR)
    up = max(floor, SPREADS / _Z90 * float(np.quantile(known, 0.9)))
    down = max(floor, -SPREADS / _Z90 * float(np.quantile(known, 0.1)))
    judged = (table.states >= FEWEST_STATES) & ~told_as_group[table.group]
    with np.errstate(invalid="ignore"):
        off = np.flatnonzero(judged & ((away > up) | (away < -down)))
    for i in map(int, off):
        least, most = (math.exp(base[i] + d) * (1 + p.sink / table.states[i]) for d in (-down, up))
        yield i, Away(key, float(p.mean_l2[i]), float(away[i]), least, most)


def writer_of(segment: str) -> str:
    """Return the writer of a segment, ``<writer>-<n>``."""
    return segment.rpartition("-")[0]


def _even(n: int, k: int) -> Ints:
    return np.unique(np.linspace(0, n - 1, min(n, k)).round().astype(np.int64))


def _even_of(items: Sequence[Ints], k: int) -> list[Ints]:
    return [items[i] for i in _even(len(items), k)]
