"""Progress bars: of an extraction (records, tokens a second, bytes, time left), and of bytes that are gone through.

On a terminal a live bar on stderr; elsewhere (a batch log) a line every half minute. May import ``extraction``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

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
        TextColumn("{task.fields[left]}"),
    )
    pace = Pace()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("extract", total=rows, rate="", left="")

        def show(report: ExtractionReport) -> None:
            left = pace.left(report, rows - dropped())
            said = "" if left is None else f"{timedelta(seconds=round(left))} left"
            bar.update(task, completed=_done(report) + dropped(), rate=pace.rate(report), left=said)

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
        self._rows, self._dropped, self._pace = rows, dropped, Pace()
        self._next = time.monotonic() + LINE_SECONDS

    def __call__(self, report: ExtractionReport) -> None:
        left = self._pace.left(report, self._rows - self._dropped())
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_SECONDS
        done, total = _done(report), self._rows - self._dropped()
        said = "" if left is None else f", about {left:.0f} s left"
        print(f"extract: {done} of {total} records, {self._pace.rate(report)}{said}", file=sys.stderr, flush=True)


class Pace:
    """How fast records come, from the first one on: loading the target, and records that were there, do not count.

    Those that are skipped later do not count either: they are only fewer that are left.
    """

    def __init__(self) -> None:
        self._since: tuple[float, int, int] | None = None

    def left(self, report: ExtractionReport, total: int) -> float | None:
        """Return the seconds until all records are done, if they come as before; None: it is not known yet."""
        came = report.written + report.quarantined.total()
        if self._since is None and came:
            self._since = (report.seconds, came, report.tokens)
        if self._since is None or came <= self._since[1]:
            return None
        return (report.seconds - self._since[0]) * (total - _done(report)) / (came - self._since[1])

    def rate(self, report: ExtractionReport) -> str:
        """Return tokens a second, once they are known, the bytes of states, and how many records are quarantined."""
        said = [human_bytes(report.nbytes)]
        if self._since is not None and (passed := report.seconds - self._since[0]) > 0:
            said.insert(0, f"{(report.tokens - self._since[2]) / passed:,.0f} tokens/s")
        if report.quarantined:
            said.append(f"{report.quarantined.total()} quarantined")
        return ", ".join(said)


def _done(report: ExtractionReport) -> int:
    return report.written + report.skipped + report.quarantined.total()
