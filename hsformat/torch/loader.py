"""Batches of records, read ahead: one order whoever reads them, and from any place of an epoch."""

from __future__ import annotations

import json
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, get_args

import numpy as np

from hsformat.digests import checksum
from hsformat.torch.dataset import RecordDataset
from hsformat.torch.packing import pack
from hsformat.torch.plan import Batching, Plan, Shuffle
from hsformat.torch.position import Position, require_integers
from hsformat.torch.prefetch import Batches, Collate, Stream, WorkerType, by_processes, by_threads, one_by_one

__all__ = ["RecordLoader"]


class RecordLoader:
    """Iterates over the batches of an epoch.

    They are a function of the dataset, the epoch and the parameters up to ``world_size``; on workers and reading ahead
    nothing depends but time and memory. When an epoch has come to its end, the next iteration is the next epoch; one
    that was left before its end begins again, unless :meth:`load_state_dict` says where to go on. One iteration is
    under way at a time: another one ends it, and what was ended so raises a RuntimeError where it is asked for more. No
    thread or process stays behind, however it ends.

    Parameters
    ----------
    dataset
        What to load.
    batch_size
        Records of a batch.
    max_tokens
        In place of ``batch_size``: most tokens of a batch, which is filled by first fit over a few batches.
    shuffle
        ``record``: all records in random order. ``segment``: segments in random order, a few of them open at a time,
        whose records come in random order; a segment once left is not read again. None: the order of the dataset.
    buffer
        Segments that are open at a time, with ``shuffle="segment"``.
    seed
        Of the random order, with the epoch.
    drop_last
        Whether to leave out a last batch of fewer than ``batch_size`` records, and batches that not every rank would
        have one of; :meth:`dropped` names their records. Otherwise batches are halved until each rank has as many.
    world_size, rank
        How many processes share the records, and which of them this is: each record comes to one of them.
    epoch
        The first epoch.
    workers
        Threads or processes that read ahead; 0: nothing is read ahead.
    worker_type
        ``thread``, or how processes are started. To those that are not forked, ``dataset`` and ``collate`` are pickled.
    prefetch
        Most batches that are read ahead; None: two a worker.
    prefetch_bytes
        Most bytes that are read ahead, a batch that is being read counted twice: as its records, and as what
        ``collate`` makes of them. One batch is read ahead even if it is larger. Where the source does not tell the
        lengths of its records, ``prefetch`` alone is the bound.
    collate
        What makes a batch of records: :func:`hsformat.torch.pack`, ``list`` or another.

    Raises
    ------
    ValueError
        A parameter is out of its range; a record is longer than ``max_tokens``; the source does not tell what
        ``max_tokens`` or ``shuffle="segment"`` has to know; there are too few records for all ranks.
    """

    def __init__(
        self,
        dataset: RecordDataset,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: Shuffle | None = None,
        buffer: int = 8,
        seed: int = 0,
        drop_last: bool = False,
        world_size: int = 1,
        rank: int = 0,
        epoch: int = 0,
        workers: int = 2,
        worker_type: WorkerType = "thread",
        prefetch: int | None = None,
        prefetch_bytes: int = 2**30,
        collate: Collate = pack,
    ) -> None:
        self._batching = Batching(
            batch_size=batch_size,
            max_tokens=max_tokens,
            shuffle=shuffle,
            buffer=buffer,
            seed=seed,
            drop_last=drop_last,
            world_size=world_size,
        )
        require_integers(0, rank=rank, epoch=epoch, workers=workers, prefetch_bytes=prefetch_bytes)
        prefetch = 2 * workers if prefetch is None else prefetch
        require_integers(min(1, workers), prefetch=prefetch)
        if rank >= world_size:
            raise ValueError(f"rank is {rank}, and must be below world_size, {world_size}")
        if worker_type not in get_args(WorkerType):
            raise ValueError(f"worker_type is {worker_type!r}, and must be one of {list(get_args(WorkerType))}")
        self.dataset = dataset
        self._rank, self._collate = rank, collate
        self._workers, self._worker_type = workers, worker_type
        self._prefetch, self._prefetch_bytes = prefetch, prefetch_bytes
        self._tokens, self._segments, self._nbytes = dataset.token_counts(), dataset.segments(), dataset.nbytes()
        self._check_lengths()
        self._epoch, self._taken, self._start = epoch, 0, 0
        self._running: weakref.ref[_Pass] | None = None
        self._planned = epoch, self._plan_of(epoch)

    def _check_lengths(self) -> None:
        most = self._batching.max_tokens
        if most is None or self._tokens is None:
            return
        if (long := np.flatnonzero(self._tokens > most)).size:
            first = f"{self.dataset.id_of(int(long[0]))!r} of {self._tokens[long[0]]} is the first"
            what = f"{long.size} records have more than max_tokens={most} tokens, {first}"
            raise ValueError(f"{what}: raise it, or leave them out by the dataset's ids")

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration.

        Raises
        ------
        ValueError
            It is negative, or no integer.
        """
        require_integers(0, epoch=epoch)
        self._stop()
        self._epoch, self._taken, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Batches of the epoch on each rank."""
        return len(self._plan()) // self._batching.world_size

    def dropped(self) -> list[str]:
        """Return the ids of the records that are in no batch of the epoch, on any rank; none without ``drop_last``."""
        return [self.dataset.id_of(row) for row in self._plan().dropped]

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is, as JSON-able data: behind the last batch that was handed out.

        It is the same on every rank. Batches that were read ahead do not count.
        """
        position = Position(
            epoch=self._epoch, batches=self._taken, batching=asdict(self._batching), plan=self._digest(self._plan())
        )
        return position.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next iteration where another loader was, whatever its workers.

        Raises
        ------
        ValueError
            It had other batches: another seed or parameter, which is named, or other records. Or the state is not one
            that :meth:`state_dict` returned; its field is named.
        """
        position = Position.of(state)
        if differ := position.differences(self._batching):
            raise ValueError(f"the state is of other batches: {'; '.join(differ)}")
        planned = self._plan_of(position.epoch)
        if position.plan != self._digest(planned):
            raise ValueError(
                "the state is of other records, or of a store whose records lay in other segments: open what it was "
                "made with, or name the records by the dataset's ids"
            )
        if position.batches > (most := len(planned) // self._batching.world_size):
            raise ValueError(f"the state's batches is {position.batches}, and epoch {position.epoch} has {most} a rank")
        self._stop()
        self._planned = position.epoch, planned
        self._epoch, self._taken, self._start = position.epoch, position.batches, position.batches

    def __iter__(self) -> Iterator[Any]:
        self._stop()
        self._taken, self._start = self._start, 0
        iteration = _Pass(self._iterate(self._taken))
        self._running = weakref.ref(iteration)  # weak, so that it ends when its user lets it go
        return iteration

    def _stop(self) -> None:
        running = None if self._running is None else self._running()
        if running is not None:
            running.displace()

    def _iterate(self, start: int) -> Generator[Any, None, None]:
        epoch, planned, world_size = self._epoch, self._plan(), self._batching.world_size
        rows = [planned.rows(b) for b in range(start * world_size + self._rank, len(planned), world_size)]
        stream = self._stream(rows)
        try:
            for i in range(len(rows)):
                batch = [next(stream)]
                self._taken = start + i + 1
                yield batch.pop()  # nothing here refers to it while its user has it
        finally:
            stream.close()
        self._epoch, self._taken = epoch + 1, 0

    def _stream(self, rows: list[list[int]]) -> Stream:
        nbytes = [0 if self._nbytes is None else int(self._nbytes[r].sum()) for r in rows]
        batches = Batches(dataset=self.dataset, collate=self._collate, rows=rows, nbytes=nbytes)
        if not self._workers or not rows:
            return one_by_one(batches)
        read_ahead: dict[str, int] = {
            "workers": self._workers,
            "prefetch": self._prefetch,
            "prefetch_bytes": self._prefetch_bytes,
        }
        if self._worker_type == "thread":
            return by_threads(batches, **read_ahead)
        return by_processes(batches, worker_type=self._worker_type, **read_ahead)

    def _plan(self) -> Plan:
        if self._planned[0] != self._epoch:
            self._planned = self._epoch, self._plan_of(self._epoch)
        return self._planned[1]

    def _plan_of(self, epoch: int) -> Plan:
        return self._batching.plan(len(self.dataset), tokens=self._tokens, segments=self._segments, epoch=epoch)

    def _digest(self, planned: Plan) -> str:
        ids = json.dumps(self.dataset.ids).encode()
        return checksum(b"".join((ids, planned.order.tobytes(), planned.ends.tobytes())))


class _Pass:
    """An iteration of a loader. Where something else has ended it, it says so: it is not at the end of its epoch."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches, self._displaced = batches, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._displaced:
            raise RuntimeError(
                "this iteration was ended before the end of its epoch: the loader was iterated again, or told by "
                "set_epoch or load_state_dict where to go on; use a loader for each of two iterations"
            )
        return next(self._batches)

    def displace(self) -> None:
        """End it; nothing happens if it is at its end."""
        self._displaced = self._displaced or getgeneratorstate(self._batches) != GEN_CLOSED
        self._batches.close()
