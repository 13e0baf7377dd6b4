"""How a driver says that it gets on while no answer comes: a long answer is no engine that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["Beat", "Beating"]

_EVERY_S = 1.0


class Beat:
    """Called at any progress; passed on once a second at most."""

    def __init__(self) -> None:
        self._tell: Callable[[], None] = lambda: None
        self._next = 0.0

    def passed_to(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` from now on."""
        self._tell = tell

    def __call__(self) -> None:
        """Say that there is progress."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            self._tell()


@runtime_checkable
class Beating(Protocol):
    """What a driver (``wire.Driver``) may have besides."""

    beat: Beat
