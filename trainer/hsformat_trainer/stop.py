"""An orderly stop: the first SIGINT or SIGTERM is a wish, heard after the step in hand; a later one ends at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["AGAIN_SECONDS", "Stop"]

AGAIN_SECONDS = 2.0
"""A second signal within this time is the first one once more: a terminal sends Ctrl-C to ``accelerate launch`` and to
the processes it started, and the launcher then passes its own on to them."""


class Stop:
    """Turns the first SIGINT or SIGTERM into a request to stop, and a later one into KeyboardInterrupt of that signal.

    A signal that is ignored (``nohup``) stays so. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._heard = 0.0
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for s in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(s) is not signal.SIG_IGN:
                    self._old[s] = signal.signal(s, self._handle)
        return self

    def asked(self) -> bool:
        """Return whether to stop."""
        return self.signal is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._heard = signal.Signals(number), now
        elif now - self._heard > AGAIN_SECONDS:
            raise KeyboardInterrupt(signal.Signals(number))

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for s, handler in self._old.items():
            signal.signal(s, handler)
