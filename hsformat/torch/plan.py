"""Which records are in which batch: a function of seed, epoch and lengths alone, never of workers or timing.

Random numbers are those of NumPy's ``PCG64`` and ``SeedSequence``, whose bits stay the same in all versions of NumPy;
its permutations need not, so that an order is sorted from the bits here. Imports nothing of hsformat.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

__all__ = ["Batching", "Plan", "Shuffle", "by_count", "by_tokens", "record_order", "segment_order", "shared"]

Shuffle = Literal["record", "segment"]

_Ints = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int64)

_OPEN_BATCHES = 8
"""Batches that are filled at a time: a record goes into the first that has room for it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The batches of one epoch, of all ranks: batch b is for rank b modulo their number.

    Attributes
    ----------
    order
        [n] numbers of records, batch after batch.
    ends
        [B] where each batch ends in ``order``.
    dropped
        Numbers of the records that are in no batch.
    """

    order: _Ints
    ends: _Ints
    dropped: _Ints

    def __len__(self) -> int:
        return len(self.ends)

    def rows(self, batch: int) -> list[int]:
        """Return the numbers of the records of a batch."""
        start = int(self.ends[batch - 1]) if batch else 0
        return [int(row) for row in self.order[start : self.ends[batch]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """What a plan follows from, beside the records; see :class:`hsformat.torch.RecordLoader`.

    Raises
    ------
    ValueError
        A parameter is out of its range.
    """

    batch_size: int | None
    max_tokens: int | None
    shuffle: Shuffle | None
    buffer: int
    seed: int
    drop_last: bool
    world_size: int

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ValueError("give batch_size or max_tokens, one of them")
        for name, least in {"batch_size": 1, "max_tokens": 1, "buffer": 1, "seed": 0, "world_size": 1}.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} is {value!r}, and must be an integer of at least {least}")
        if self.shuffle not in (None, *get_args(Shuffle)):
            raise ValueError(f"shuffle is {self.shuffle!r}, and must be one of {[None, *get_args(Shuffle)]}")

    def plan(self, count: int, *, tokens: _Ints | None, segments: _Ints | None, epoch: int) -> Plan:
        """Return the batches of an epoch.

        Parameters
        ----------
        count
            R, the number of records.
        tokens, segments
            [R] T and the segment of each record; None: not known.

        Raises
        ------
        ValueError
            What has to be known is not; or there are too few records (:func:`shared`).
        """
        if self.shuffle is None:
            order = np.arange(count, dtype=np.int64)
        elif self.shuffle == "record":
            order = record_order(count, seed=self.seed, epoch=epoch)
        elif segments is not None:
            order = segment_order(segments, buffer=self.buffer, seed=self.seed, epoch=epoch)
        else:
            raise ValueError("shuffle='segment' needs a source that tells its segments (SegmentedSource)")
        if self.max_tokens is not None:
            if tokens is None:
                raise ValueError("max_tokens needs a source that tells the lengths of its records (SegmentedSource)")
            return shared(
                by_tokens(order, tokens, self.max_tokens), _NONE, world_size=self.world_size, drop_last=self.drop_last
            )
        size = self.batch_size or 1
        whole = len(order) - len(order) % size if self.drop_last else len(order)
        batches = by_count(order[:whole], size)
        return shared(batches, order[whole:], world_size=self.world_size, drop_last=self.drop_last)


def _bits(count: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return np.asarray(np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count), np.uint64)


def record_order(count: int, *, seed: int, epoch: int) -> _Ints:
    """Return the numbers 0..count-1 in random order."""
    return np.argsort(_bits(count, seed, epoch), kind="stable").astype(np.int64)


def segment_order(segments: _Ints, *, buffer: int, seed: int, epoch: int) -> _Ints:
    """Return record numbers in an order that has records of at most ``buffer`` segments open at any time.

    Segments are put in random order, s = 0, 1, ...; the records of s fall at random into the interval from
    s - buffer + 1 to s + 1, cut to 0 .. (number of segments) - buffer + 1, and are read as they lie there. So at every
    place ``buffer`` intervals overlap, at both ends of the epoch as well, and a segment once left is not read again.

    Parameters
    ----------
    segments
        [R] the segment of each record.
    """
    _, numbered = np.unique(segments, return_inverse=True)
    count = int(numbered.max(initial=-1)) + 1
    bits = _bits(count + len(segments), seed, epoch)
    place = np.empty(count, np.int64)
    place[np.argsort(bits[:count], kind="stable")] = np.arange(count)
    s = place[numbered]
    first = np.maximum(0, s - buffer + 1)
    last = np.minimum(s + 1, max(1, count - buffer + 1))
    key = first + (last - first) * ((bits[count:] >> np.uint64(11)) * 2.0**-53)
    return np.lexsort((bits[count:], key)).astype(np.int64)


def by_count(order: _Ints, batch_size: int) -> list[_Ints]:
    """Cut an order into batches; the last may have fewer records."""
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def by_tokens(order: _Ints, tokens: _Ints, max_tokens: int) -> list[_Ints]:
    """Fill batches up to a number of tokens, in the order of the records: first fit, a few batches at a time.

    Parameters
    ----------
    tokens
        [R] T of each record, by number; none is above ``max_tokens``.
    """
    out: list[_Ints] = []
    open_: list[tuple[int, list[int]]] = []  # room left, numbers
    for row, t in zip(order.tolist(), tokens[order].tolist(), strict=True):
        for i, (room, rows) in enumerate(open_):
            if t <= room:
                rows.append(row)
                open_[i] = room - t, rows
                break
        else:
            if len(open_) == _OPEN_BATCHES:
                fullest = min(range(len(open_)), key=lambda i: open_[i][0])
                out.append(np.array(open_.pop(fullest)[1], np.int64))
            open_.append((max_tokens - t, [row]))
    return out + [np.array(rows, np.int64) for _, rows in open_]


def shared(batches: Sequence[_Ints], left_out: _Ints, *, world_size: int, drop_last: bool) -> Plan:
    """Make the number of batches a multiple of the number of ranks.

    Batches of most records are halved until it is one; with ``drop_last`` the last batches are left out instead.

    Parameters
    ----------
    left_out
        Numbers of records that are in no batch already.

    Raises
    ------
    ValueError
        There are too few records to give each rank as many batches.
    """
    kept = list(batches)
    dropped: list[_Ints] = []
    if drop_last:
        whole = len(kept) - len(kept) % world_size
        kept, dropped = kept[:whole], kept[whole:]
    elif missing := -len(kept) % world_size:
        kept = _halved(kept, missing)
    return Plan(
        order=np.concatenate([_NONE, *kept]),
        ends=np.cumsum([len(b) for b in kept], dtype=np.int64),
        dropped=np.concatenate([*dropped, left_out]),
    )


def _halved(batches: Sequence[_Ints], more: int) -> list[_Ints]:
    heap: list[tuple[int, tuple[int, ...], int]] = [(-len(rows), (i,), 0) for i, rows in enumerate(batches)]
    heapq.heapify(heap)  # (minus its size, its place among others, where it starts in its batch)
    for _ in range(more):
        size, place, start = heap[0]
        if -size < 2:
            records = sum(len(rows) for rows in batches)
            wanted = f"{len(batches) + more} batches, as many on each rank"
            raise ValueError(f"{records} records do not make {wanted}: leave records out, or say drop_last=True")
        half = -size // 2
        heapq.heapreplace(heap, (-(-size - half), (*place, 0), start))
        heapq.heappush(heap, (-half, (*place, 1), start - size - half))
    heap.sort(key=lambda piece: piece[1])
    return [batches[place[0]][start : start - size] for size, place, start in heap]
