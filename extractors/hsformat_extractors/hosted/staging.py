"""The staging folder: where an engine puts the states of a request, for as long as it takes to read them.

Each run has a folder of its own in it, locked while the run lives and removed at its end. What a dead run left is
removed by the next one that stages in the same place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hsformat.problems import Problem, Severity, problem

__all__ = ["MIB", "Staging", "space_problems", "token_bytes"]

MIB = 1024 * 1024
PREFIX = "hsformat-staging-"
_LOCK = "lock"


def token_bytes(captures: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of one token in staging: its states, and its id as int64.

    Examples
    --------
    >>> token_bytes(4, 7168, 2)
    57352
    """
    return captures * hidden_size * itemsize + 8


class Staging:
    """A folder of this run in ``root``, which is made if it is not there.

    Raises
    ------
    OSError
        It cannot be made.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.removed = list(_remove_leftovers(root))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root)).absolute()
        part = self.folder / f"{_LOCK}.part"
        self._lock: int | None = os.open(part, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        part.rename(self.folder / _LOCK)  # so that nobody sees it unlocked

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def full(self, got: str) -> Problem:
        """Return the problem of a staging folder that cannot be written to any more."""
        free = shutil.disk_usage(self.root).free
        return problem(
            "HS506",
            where=f"staging {self.root}",
            severity=Severity.ERROR,
            got=f"no space left, {free:,} bytes free: {got}",
            expected="space for the states of the requests in flight",
            fix="free space, stage elsewhere (--option staging=FOLDER) or less at once (--option staging_mib=N); what "
            "is committed stays, and the same command goes on from there",
        )


def space_problems(root: Path, bound: int, longest: int | None) -> Iterator[Problem]:
    """Compare the free space with what may be in staging at once.

    Parameters
    ----------
    bound
        Bytes that are staged at most.
    longest
        Bytes of the longest sample that the target takes; None: not known.
    """
    there = root
    while not there.exists() and there != there.parent:
        there = there.parent
    if there.exists() and not there.is_dir():
        yield problem("HS506", where=f"staging {root}", severity=Severity.ERROR, got=f"{there} is not a folder",
                      expected="a folder, or the name of a new one", fix="give --option staging=FOLDER")  # fmt: skip
        return
    if not os.access(there, os.W_OK | os.X_OK):
        yield problem("HS506", where=f"staging {root}", severity=Severity.ERROR, got=f"{there} cannot be written to",
                      expected="a folder that this user may write to", fix="give --option staging=FOLDER")  # fmt: skip
        return
    free = shutil.disk_usage(there).free
    if free < bound:
        yield problem(
            "HS506", where=f"staging {root}", severity=Severity.ERROR, got=f"{free:,} bytes free",
            expected=f"{bound:,} bytes, the bound of what is staged at once",
            fix="free space, or stage elsewhere (--option staging=FOLDER)"
            + (f", or less at once (--option staging_mib={less})" if (less := free // MIB // 2) else ""),
        )  # fmt: skip
    if longest is not None and longest > bound:
        yield problem(
            "HS506", where="option staging_mib", severity=Severity.WARNING, got=f"{bound:,} bytes",
            expected=f"{longest:,} bytes, for the states of the longest sample that the target takes",
            fix=f"nothing, if no sample is that long (one that does not fit is rejected); or --option staging_mib="
            f"{-(-longest // MIB)}",
        )  # fmt: skip


def _remove_leftovers(root: Path) -> Iterator[Path]:
    """Remove folders of runs that are dead, which nobody holds the lock of; yield them."""
    for folder in sorted(root.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # another user's, or gone in this moment
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                yield folder
            finally:
                os.close(lock)
