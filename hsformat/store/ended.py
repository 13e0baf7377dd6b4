"""What a writer says that cannot go on, after a failed write, closed or in another process; and one never closed."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Sequence, Sized

from hsformat.problems import Severity, StoreError, problem

__all__ = ["failed_write", "no_thread", "no_writer", "warn_if_never_closed"]


def no_writer(path: str, got: str) -> StoreError:
    """Return the refusal of a writer that takes nothing any more."""
    return _error(path, got, "an open writer of this process", "open another with hs.append")


def no_thread(path: str, why: object) -> StoreError:
    """Return what a writer says that cannot have a thread; nothing was taken, and it is still open."""
    fix = "allow the process more threads and append again: the writer is still open"
    return _error(path, f"{why}; nothing was taken", "a thread of this process, which writes", fix)


def failed_write(
    where: str, why: BaseException, *, lost: Sequence[str], committed: bool | None, records_committed: int
) -> StoreError:
    """Return what is lost, what is kept and how to go on.

    Parameters
    ----------
    where
        The segment.
    lost
        Ids that were to be in it.
    committed
        Whether it is; None: nobody can tell.
    records_committed
        By the same writer, before.
    """
    fate = "of unknown state, committed or not" if committed is None else "not committed"
    shown = ", ".join(map(repr, lost[:3])) + (", ..." if len(lost) > 3 else "")
    got = f"{getattr(why, 'strerror', None) or why}; {len(lost)} record(s) {fate}{': ' if lost else ''}{shown}"
    expected = f"a segment written whole; this writer committed {records_committed} record(s), which stay"
    fix = "free space or restore access, then open the store with hs.append and write the records whose ids are not in "
    return _error(where, got, expected, f"{fix}writer.ids")


def _error(where: str, got: str, expected: str, fix: str) -> StoreError:
    return StoreError(problem("HS506", where=where, severity=Severity.ERROR, got=got, expected=expected, fix=fix))


def warn_if_never_closed(writer: object, pending: Sized, path: str) -> weakref.finalize[..., object]:
    """Warn of records that are lost when a writer is let go of, or the program ends.

    Nothing is committed there: whoever let go of it may have done so since what was written is wrong.

    Parameters
    ----------
    writer
        Watched, and not kept.
    pending
        The records that it has not committed; empty once it is closed. Does not refer to it.

    Returns
    -------
    To be detached when the writer is closed.
    """
    return weakref.finalize(writer, _warn, pending, path, os.getpid(), _maker())


def _warn(pending: Sized, path: str, pid: int, maker: tuple[str, int]) -> None:
    if len(pending) and os.getpid() == pid:  # in a process that was forked they are the parent's
        text = (
            f"{path}: a writer was never closed, and {len(pending)} record(s) that were appended are not committed: no "
            "reader will see them. Use `with`, or call close()"
        )
        warnings.warn_explicit(text, RuntimeWarning, *maker)


def _maker() -> tuple[str, int]:
    """Return the file and line, outside of hsformat, in which a writer is being made."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hsformat":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
