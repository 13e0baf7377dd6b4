"""Memory for large arrays that is used again: a page that is new to a process costs as much as copying into it.

An array of :func:`empty` is like one of ``np.empty``. When nothing refers to it any more, nor to a view or a tensor
over it, its memory is kept for the next one of about its size. A loop that reads records and lets them go so works in
memory that is already there: reading a whole record of 576 channels became 2 to 3 times as fast (docs/benchmarks.md).
Imports nothing of hsformat.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KEPT_BYTES", "LEAST_BYTES", "empty"]

LEAST_BYTES = 128 * 1024
"""Smaller arrays are those of ``np.empty``: the allocator keeps their memory itself."""

KEPT_BYTES = 256 * 1024 * 1024
"""Most bytes that are kept while nobody uses them."""

_STEPS = 8
"""Sizes between two powers of two; an array takes at most an eighth more than it needs."""


class _Kept:
    """Memory that nobody uses, by size."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Keep nothing, and be locked by nobody: after a fork, too."""
        # One that its holder may take again: the garbage collector, too, gives memory back, at any place.
        self._lock = threading.RLock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._nbytes = 0

    def take(self, size: int) -> mmap.mmap | None:
        with self._lock:
            if not (free := self._free.get(size)):
                return None
            self._nbytes -= size
            return free.pop()

    def give(self, memory: mmap.mmap) -> None:
        size = len(memory)
        with self._lock:
            if self._nbytes + size > KEPT_BYTES:
                self._free.clear()  # of sizes that are not asked for any more, perhaps
                self._nbytes = 0
            if size <= KEPT_BYTES:
                self._free.setdefault(size, []).append(memory)
                self._nbytes += size


_kept = _Kept()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _kept.begin())


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a C-contiguous array with anything in it, as ``np.empty`` does.

    Parameters
    ----------
    shape, dtype
        Of the array.

    Raises
    ------
    MemoryError
        There is not so much.
    """
    item = np.dtype(dtype)
    nbytes = item.itemsize * int(np.prod(shape, dtype=np.int64))
    if nbytes < LEAST_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(shape, item)
    size = _rounded(nbytes)
    memory = _kept.take(size) or _new(size)
    # The one array that refers to the memory by something which is no array: NumPy makes it the base of all views.
    owner = np.frombuffer(memory, np.uint8)
    weakref.finalize(owner, _kept.give, memory).atexit = False
    return owner[:nbytes].view(item).reshape(shape)


def _rounded(nbytes: int) -> int:
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 1 - (_STEPS.bit_length() - 1)))
    return -(-nbytes // step) * step


def _new(size: int) -> mmap.mmap:
    try:
        # Private: after a fork each process has its own.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes: {os.strerror(e.errno or 0)}") from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
