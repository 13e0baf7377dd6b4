"""Progress of a run: on a terminal a live bar on stderr, elsewhere (a batch log) a line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["LINE_SECONDS", "Show", "training_progress"]

LINE_SECONDS = 30.0

Show = Callable[[int, float, float, float], None]
"""Told after each step: the step, its loss, tokens a second, the share of time in which the loader was waited for."""


@contextmanager
def training_progress(total: int, *, done: int, shows: bool) -> Iterator[Show]:
    """Yield what shows the progress of a run.

    Parameters
    ----------
    total, done
        Steps of the run; those made before it was resumed.
    shows
        Whether this process shows anything.
    """
    console = Console(stderr=True)
    if not shows:
        yield lambda step, loss, speed, wait: None
        return
    if not console.is_terminal:
        yield _Lines(total, done)
        return
    columns = (
        TextColumn("train"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=total, completed=done, told="")
        yield lambda step, loss, speed, wait: bar.update(task, completed=step, told=_told(loss, speed, wait))


class _Lines:
    """One line now and then."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._began = total, done, time.monotonic()
        self._next = self._began + LINE_SECONDS

    def __call__(self, step: int, loss: float, speed: float, wait: float) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_SECONDS
        left = (now - self._began) * (self._total - step) / max(1, step - self._done)
        told = f"train: step {step} of {self._total}, {_told(loss, speed, wait)}, about {left:.0f} s left"
        print(told, file=sys.stderr, flush=True)


def _told(loss: float, speed: float, wait: float) -> str:
    return f"loss {loss:.4f}, {speed:,.0f} tokens/s, loader {wait:.1%}"
