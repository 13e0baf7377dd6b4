"""Threads that encode chunks, and the memory that they may hold.

Blosc and the checksums release Python's lock, so that chunks are encoded beside the model. Buffers are used again:
there are never more of them than the bound allows, however large a segment is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.store.shards import ShardWriter, padding

__all__ = ["Encoder", "default_threads"]

_IN_FLIGHT = 4
"""Chunks that wait or are encoded, a thread."""


def default_threads() -> int:
    """Return how many threads encode unless somebody says it: those that this process may run on, at most four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores)


class Encoder:
    """A pool of threads. One thread gives it work: :meth:`put` waits while too much is under way."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsformat-encode")
        self._most = threads * _IN_FLIGHT
        self._under_way = 0
        self._changed = threading.Condition()
        self._free: dict[tuple[tuple[int, ...], np.dtype[Any]], list[npt.NDArray[Any]]] = {}

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array for one chunk, with anything in it."""
        with self._changed:
            free = self._free.get((shape, dtype))
            return free.pop() if free else np.empty(shape, dtype)

    def put(self, shard: ShardWriter, n: int, rows: npt.NDArray[Any]) -> None:
        """Have a chunk encoded and written as number ``n`` of a shard; its array belongs to the pool from now on."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self._most)
            self._under_way += 1

        held = True

        def release() -> None:
            nonlocal held
            with self._changed:
                if held:
                    held = False
                    self._free.setdefault((rows.shape, rows.dtype), []).append(rows)
                    self._under_way -= 1
                    self._changed.notify_all()

        try:
            self._submit(lambda: shard.encode(n, rows, release))
        except BaseException:  # no thread can be started, or the interpreter ends: nobody else may let go of it
            release()
            raise

    def wait(self) -> None:
        """Return when nothing is under way any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def each(self, calls: list[Callable[[], object]]) -> None:
        """Make calls in the threads, and raise what the first that failed raised, when all have ended."""
        futures, errors = list[Future[object]](), list[BaseException]()
        try:
            futures.extend(self._submit(call) for call in calls)
        except RuntimeError as e:  # no more threads: what was submitted still ends before this does
            errors.append(e)
        errors += [error for f in futures if (error := f.exception()) is not None]
        if errors:
            raise errors[0]

    def _submit(self, call: Callable[[], object]) -> Future[object]:
        """Have a thread make a call. If this raises, the call has ended or is never made.

        The pool queues a call before it starts a thread for it: where none can be started, one that is there already
        would make the call all the same, while nobody waits for it.
        """
        future = Future[object]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as e:  # of a thread: raised where the result is asked for
                future.set_exception(e)

        try:
            self._pool.submit(run)
        except BaseException:  # whatever it is, it is raised again when nothing of the call is under way
            if not future.cancel():
                future.exception()
            raise
        return future

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=True)
        self._free.clear()


class Lane:
    """The chunk of one sharded array that is being filled, and its shard."""

    def __init__(self, encoder: Encoder, shard: ShardWriter, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._encoder, self.shard, self._shape, self._dtype = encoder, shard, shape, dtype
        self._buffer: npt.NDArray[Any] | None = None
        self._filled = self._chunks = 0
        self.rows = 0

    def extend(self, array: npt.NDArray[Any], store: Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]) -> None:
        """Add rows; ``store`` writes some of them into an array of this dtype."""
        done, step = 0, self._shape[0]
        while done < len(array):
            if self._buffer is None:
                self._buffer = self._encoder.buffer(self._shape, self._dtype)
            n = min(step - self._filled, len(array) - done)
            store(self._buffer[self._filled : self._filled + n], array[done : done + n])
            done, self._filled, self.rows = done + n, self._filled + n, self.rows + n
            if self._filled == step:
                self._emit()

    def finish(self) -> None:
        """Encode the last chunk, filled up."""
        if self._buffer is not None and self._filled:
            self._buffer[self._filled :] = padding(self._dtype)
            self._emit()

    def _emit(self) -> None:
        if self._buffer is not None:
            buffer, self._buffer, self._filled = self._buffer, None, 0
            n, self._chunks = self._chunks, self._chunks + 1
            self._encoder.put(self.shard, n, buffer)
