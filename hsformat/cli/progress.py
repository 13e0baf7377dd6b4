"""Progress bars: of an extraction (records, tokens a second, bytes, time left), and of bytes that are gone through.

On a terminal a live bar on stderr; elsewhere (a batch log) a line every half minute. May import ``extraction``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hsformat.cli.output import human_bytes
from hsformat.extraction.driver import ExtractionReport, Listener

__all__ = ["bytes_progress", "extraction_progress"]

LINE_SECONDS = 30.0


@contextmanager
def extraction_progress(rows: int, dropped: Callable[[], int]) -> Iterator[Listener]:
    """Yield a listener for the driver; each of the data's rows is extracted, or was dropped before."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(rows, dropped)
        return
    columns = (
        TextColumn("extract"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("extract", total=rows, rate="")

        def show(report: ExtractionReport) -> None:
            bar.update(task, completed=_done(report) + dropped(), rate=_rate(report))

        yield show


@contextmanager
def bytes_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told bytes done and bytes in all; it is silent away from a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """One line now and then."""

    def __init__(self, rows: int, dropped: Callable[[], int]) -> None:
        self._rows, self._dropped = rows, dropped
        self._next = time.monotonic() + LINE_SECONDS

    def __call__(self, report: ExtractionReport) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_SECONDS
        done, total = _done(report), self._rows - self._dropped()
        left = f", about {report.seconds * (total - done) / done:.0f} s left" if done else ""
        print(f"extract: {done} of {total} records, {_rate(report)}{left}", file=sys.stderr, flush=True)


def _done(report: ExtractionReport) -> int:
    return report.written + report.skipped + report.quarantined.total()


def _rate(report: ExtractionReport) -> str:
    speed = report.tokens / report.seconds if report.seconds else 0.0
    bad = f", {report.quarantined.total()} quarantined" if report.quarantined else ""
    return f"{speed:,.0f} tokens/s, {human_bytes(report.nbytes)}{bad}"
