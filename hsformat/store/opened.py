"""Objects that are kept open: a bounded number in a process, however many stores, segments and captures it reads."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from weakref import WeakSet

from hsformat.store.backend import OpenObject, Part, Source, open_object

__all__ = ["MOST", "KeptOpen"]

MOST = 256
"""Objects that are kept open, or a quarter of the files that the process may have, if those are fewer."""

_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE}


class KeptOpen:
    """An object that is opened once more where it was closed meanwhile, since others were needed.

    Parameters
    ----------
    source, key
        What to open; it is opened now.

    Raises
    ------
    OSError
        It cannot be opened. Where the process has too many files open, others are let go of before.
    """

    __slots__ = ("__weakref__", "_key", "_object", "_source", "_used")

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key, self._used = source, key, 0
        self._object: OpenObject | None = None
        self._get()

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        """Fill arrays as :class:`hsformat.store.backend.OpenObject` says."""
        return self._get().read_into(start, parts)

    def _get(self) -> OpenObject:
        opened = self._object  # which is closed when nobody refers to it, and so never while somebody reads
        self._used = next(_clock)
        if opened is None:
            opened = self._object = _opened(self._source, self._key)
            with _state.lock:
                _state.kept.add(self)
                if (n := len(_state.kept)) > (most := _most()):
                    _state.let_go(n - most * 3 // 4)  # some more, since those used least recently are found by sorting
        return opened

    def let_go(self) -> None:
        """Close it once nobody reads it; the next read opens it."""
        self._object = None


class _State:
    """What a process keeps open."""

    def __init__(self) -> None:
        self.lock, self.kept = threading.Lock(), WeakSet[KeptOpen]()

    def let_go(self, n: int) -> int:
        """Let go of those that were used least recently; returns how many. The lock is held."""
        oldest = sorted(self.kept, key=lambda k: k._used)[:n] if n > 0 else []
        for one in oldest:
            self.kept.discard(one)
            one.let_go()
        return len(oldest)

    def renew_lock(self) -> None:
        """In a process that was forked while a thread that is not there held it."""
        self.lock = threading.Lock()


_state, _clock = _State(), count()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.renew_lock)


def _opened(source: Source, key: str) -> OpenObject:
    while True:
        try:
            return open_object(source, key)
        except OSError as e:
            if e.errno not in _OUT_OF_FILES:
                raise
            with _state.lock:
                if not _state.let_go(-(-len(_state.kept) // 2)):
                    raise


def _most() -> int:
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return max(1, min(MOST, soft // 4))
    return MOST
