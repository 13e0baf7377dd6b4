"""Several sources as one: records of each as often as its weight says, in an order that seed and epoch decide.

An epoch has each record of a source of weight w floor(w) times; of the rest of the weight, a part of the records, other
ones in the next epoch: after n epochs no two records of a source have come more than one time apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import floor
from operator import index
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.record import Record
from hsformat.source import RecordSource, SegmentedSource
from hsformat.torch import Packed, RecordDataset, RecordLoader
from hsformat.torch.plan import record_order
from hsformat.torch.position import Position
from hsformat_trainer.admitted import Source

__all__ = ["MixedLoader", "MixedSource", "Part", "rows_of_epoch"]

_Rows = npt.NDArray[np.int64]
Part = tuple[RecordSource, _Rows, _Rows]
"""A source, numbers of its records (one may come more than once) and T of each."""


class MixedSource:
    """Records of several sources, in order: a :class:`hsformat.source.RecordSource` that tells lengths and segments.

    Parameters
    ----------
    contract
        Of the records; the sources have its compatibility digest.
    parts
        A source, numbers of its records (one may come more than once) and T of each.
    """

    def __init__(self, contract: Contract, parts: Sequence[Part]) -> None:
        none = np.empty(0, np.int64)
        self._contract = contract
        self._sources = [source for source, _, _ in parts]
        self._rows = np.concatenate([none, *(rows for _, rows, _ in parts)])
        self._tokens = np.concatenate([none, *(tokens for _, _, tokens in parts)])
        self._owners = np.repeat(np.arange(len(parts)), [len(rows) for _, rows, _ in parts])
        self._segments = np.concatenate([none, *(_segments(source, rows) for source, rows, _ in parts)])
        self._states = np.concatenate([none, *(_states(*part) for part in parts)])

    @property
    def contract(self) -> Contract:
        """What holds for every record."""
        return self._contract

    @property
    def ids(self) -> Sequence[str]:
        """The ids of all records, in order."""
        return _Ids(self)

    def __len__(self) -> int:
        return len(self._rows)

    def id_of(self, row: int) -> str:
        """Return the id of a record."""
        return self._sources[int(self._owners[row])].ids[int(self._rows[row])]

    def read(self, key: SupportsIndex | str, *, captures: Collection[str] | None = None) -> Record:
        """Return one record, by number: an id may be of more than one.

        Raises
        ------
        IndexError, KeyError
            There is no such record, or an id is given.
        HsError
            As the source's own ``read``.
        """
        if isinstance(key, str):
            raise KeyError(f"records of several sources are read by number, not by id: {key!r}")
        row = index(key)
        if not 0 <= row < len(self):
            raise IndexError(f"record {row} of {len(self)}")
        return self._sources[int(self._owners[row])].read(int(self._rows[row]), captures=captures)

    def token_counts(self) -> _Rows:
        """Return [R]: T of each record."""
        return self._tokens

    def state_counts(self) -> _Rows:
        """Return [R]: S of each record, T - 1 or T; T where the source does not tell."""
        return self._states

    def segment_counts(self) -> _Rows:
        """Return the number of records of each segment, in order, none of them empty."""
        if not len(self):
            return np.empty(0, np.int64)
        owners = np.diff(self._owners, prepend=-1) != 0
        starts = np.flatnonzero(owners | (np.diff(self._segments, prepend=-1) != 0))
        return np.diff(starts, append=len(self)).astype(np.int64)


class _Ids(Sequence[str]):
    """The ids of a mixed source, looked up when asked for."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> list[str]: ...

    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        return self._source.id_of(range(len(self))[i])


def rows_of_epoch(source: Source, *, number: int, seed: int, epoch: int) -> tuple[_Rows, _Rows]:
    """Return which training records of a source an epoch has, ascending within each pass, and T of each.

    Parameters
    ----------
    number
        Of the source, so that two sources of one length are not cut alike.
    """
    whole = floor(source.weight)
    n, part = len(source.train), source.part
    picked = np.tile(np.arange(n, dtype=np.int64), whole)
    if part:
        order = record_order(n, seed=seed, epoch=number)  # one order for all epochs, of which each takes the next part
        window = (epoch * part + np.arange(part)) % n
        picked = np.concatenate([picked, np.sort(order[window])])
    return source.train[picked], source.train_tokens[picked]


class MixedLoader:
    """Iterates over the batches of an epoch, as :class:`hsformat.torch.RecordLoader` does, of several sources.

    Parameters
    ----------
    contract
        Of all sources.
    sources
        Whose training records are loaded.
    captures
        Keys of the captures to read.
    seed
        Of the order and of which records an epoch has.
    options
        Of :class:`hsformat.torch.RecordLoader`: max_tokens, shuffle, rank, world_size, workers, ...

    Raises
    ------
    ValueError
        There is nothing to load, or too few records for all ranks.
    """

    def __init__(
        self, contract: Contract, sources: Sequence[Source], *, captures: Sequence[str], seed: int, **options: Any
    ) -> None:
        self._contract, self._sources, self._captures = contract, tuple(sources), tuple(captures)
        self._seed, self._options = seed, options
        self._constant = all(float(s.weight).is_integer() for s in sources)
        self._built, self._loader = 0, self._loader_of(0)

    def _loader_of(self, epoch: int) -> RecordLoader:
        parts = []
        for number, s in enumerate(self._sources):
            rows, tokens = rows_of_epoch(s, number=number, seed=self._seed, epoch=epoch)
            parts.append((s.source, rows, tokens))
        dataset = RecordDataset(MixedSource(self._contract, parts), captures=self._captures)
        return RecordLoader(dataset, seed=self._seed, epoch=epoch, **self._options)

    def _current(self) -> RecordLoader:
        """Return the loader of the epoch that is under way: with parts of a source, each epoch has other records."""
        if self._built != (epoch := self._loader.epoch) and not self._constant:
            self._built, self._loader = epoch, self._loader_of(epoch)
        return self._loader

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next."""
        return self._loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration.

        Raises
        ------
        ValueError
            It is negative, or no integer.
        """
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of the epoch on each rank."""
        return len(self._current())

    def batches_of(self, epoch: int) -> int:
        """Return the batches of any epoch on each rank, without reading records."""
        return len(self._loader_of(epoch))

    def __iter__(self) -> Iterator[Packed]:
        return iter(self._current())

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is, as JSON-able data: behind the last batch that was handed out."""
        return {"weights": [s.weight for s in self._sources], **self._current().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next iteration where another loader was.

        Raises
        ------
        ValueError
            It had other batches: another weight, seed or parameter, which is named, or other records. Or the state is
            not one that :meth:`state_dict` returned; its field is named.
        """
        weights = [s.weight for s in self._sources]
        epoch = Position.of(state).epoch
        if state.get("weights") != weights:
            raise ValueError(f"the state is of other batches: weights were {state.get('weights')} and are {weights}")
        loader = self._loader_of(epoch)
        loader.load_state_dict({k: v for k, v in state.items() if k != "weights"})
        self._built, self._loader = loader.epoch, loader


def _segments(source: RecordSource, rows: _Rows) -> _Rows:
    """Return [n]: the segment of each record, new numbers for each pass over the source."""
    if not isinstance(source, SegmentedSource) or not len(rows):
        return np.zeros(len(rows), np.int64)
    counts = source.segment_counts()
    of_row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)[rows]
    passes = np.cumsum(np.diff(rows, prepend=rows[0]) < 0)
    numbered: _Rows = of_row + len(counts) * passes
    return numbered


def _states(source: RecordSource, rows: _Rows, tokens: _Rows) -> _Rows:
    return source.state_counts()[rows] if isinstance(source, SegmentedSource) else tokens
