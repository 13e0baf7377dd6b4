"""Reading batches ahead, in order and in bounded memory: by nobody, by threads or by processes.

Each of the three is a generator over the same batches; whatever it has started has ended when it is closed. Nothing
waits for room: a batch is begun when there is some, so that there is nobody to be woken at the end.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from hsformat.problems import HsError
from hsformat.torch.dataset import RecordDataset
from hsformat.torch.tensors import TensorRecord

__all__ = ["Batches", "Collate", "Stream", "WorkerType", "by_processes", "by_threads", "one_by_one"]

Collate = Callable[[list[TensorRecord]], Any]
Stream = Generator[Any, None, None]
WorkerType = Literal["thread", "fork", "spawn", "forkserver"]

_SOON = 1.0
"""Seconds in which a process that has broken its connection is seen to have ended."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batches:
    """Batches to be read.

    Attributes
    ----------
    dataset, collate
        What makes them.
    rows
        Numbers of the records of each.
    nbytes
        Bytes of the records of each; 0: not known.
    """

    dataset: RecordDataset
    collate: Collate
    rows: Sequence[list[int]]
    nbytes: Sequence[int]

    def read(self, batch: int) -> Any:
        """Read one batch; an error says which record it was."""
        records = []
        for row in self.rows[batch]:
            try:
                records.append(self.dataset[row])
            except Exception as e:  # of a worker: raised where the batch is wanted
                e.add_note(f"reading record {self.dataset.id_of(row)!r}")
                raise
        try:
            return self.collate(records)
        except Exception as e:  # of a worker: raised where the batch is wanted
            e.add_note(f"making a batch of records {[r.id for r in records]}")
            raise


def one_by_one(batches: Batches) -> Stream:
    """Read each batch when it is asked for."""
    for i in range(len(batches.rows)):
        yield batches.read(i)


def by_threads(batches: Batches, *, workers: int, prefetch: int, prefetch_bytes: int) -> Stream:
    """Read ahead in threads."""
    pending: deque[tuple[Future[Any], int]] = deque()
    begun = 0

    def begin() -> None:
        nonlocal begun
        while begun < len(batches.rows) and len(pending) < prefetch:
            held = sum(n if future.done() else 2 * n for future, n in pending)
            if pending and held + 2 * batches.nbytes[begun] > prefetch_bytes:
                return
            pending.append((pool.submit(batches.read, begun), batches.nbytes[begun]))
            begun += 1

    pool = ThreadPoolExecutor(workers, thread_name_prefix="hsformat-loader")
    try:
        begin()
        while pending:
            batch = [pending[0][0].result()]
            pending.popleft()
            begin()
            yield batch.pop()  # nothing here refers to it while its user has it
            begin()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def by_processes(
    batches: Batches, *, workers: int, prefetch: int, prefetch_bytes: int, worker_type: WorkerType
) -> Stream:
    """Read ahead in processes: torch's DataLoader, told what to read, and errors carried through it as they are.

    Raises
    ------
    RuntimeError
        A process was killed, or ended by itself.
    """
    most = 2 * max(batches.nbytes)
    ahead = max(1, min(prefetch, prefetch_bytes // most if most else prefetch))
    workers = min(workers, ahead)
    loader: DataLoader[Any] = DataLoader(
        _Numbered(batches),
        batch_size=None,
        sampler=range(len(batches.rows)),
        num_workers=workers,
        prefetch_factor=ahead // workers,
        collate_fn=_as_it_is,
        multiprocessing_context=worker_type,
    )
    others = set(multiprocessing.active_children())
    iterator = iter(loader)  # its processes end with it, and nobody else knows it
    started = [p for p in multiprocessing.active_children() if p not in others]
    try:
        for _ in range(len(batches.rows)):
            died = None
            try:
                batch = next(iterator)
            except (RuntimeError, OSError, EOFError):  # a reset connection, a closed pipe, or torch's own word
                died = _died(started)
                if died is None:
                    raise
            if died is not None:  # outside: what was caught refers to the iterator, whose processes would stay with it
                raise RuntimeError(died)
            if isinstance(batch, _Failed):
                raise batch.error
            yield batch
    finally:
        del iterator


def _died(processes: Sequence[BaseProcess]) -> str | None:
    """Say which process has ended, and how; None: none has. Its pipes are closed a moment before it is known."""
    multiprocessing.connection.wait([p.sentinel for p in processes], timeout=_SOON)
    ended = [f"{p.pid} by {_how(p.exitcode)}" for p in processes if p.exitcode is not None]
    if not ended:
        return None
    return (
        f"a process that reads batches ahead has ended: {', '.join(ended)}. Where nobody killed it, memory may have "
        "run out: take fewer workers, or a smaller prefetch_bytes. state_dict() says where the epoch is, and "
        "load_state_dict goes on there"
    )


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {-code} ({signal.strsignal(-code) or 'unknown'})"


class _Numbered(Dataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, index: int) -> Any:
        try:
            return self._batches.read(index)
        except HsError as e:
            return _Failed(e)


class _Failed:
    """An error on its way from a process; torch would make another one of its text."""

    def __init__(self, error: HsError) -> None:
        self.error = error


def _as_it_is(batch: Any) -> Any:
    return batch
