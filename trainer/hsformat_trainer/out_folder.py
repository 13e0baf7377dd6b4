"""Whether a run can write where it is to write: asked before anything else is done. Brings no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hsformat.problems import NothingToOpen, Severity, problem

__all__ = ["check_out"]


def check_out(out: str | Path) -> None:
    """Refuse a place in which no folder can be made or written; nothing of it is there afterwards.

    Raises
    ------
    NothingToOpen
        HS501: there is something else than a folder on the way. HS506: the system lets nothing be written there.
    """
    path = Path(out)
    try:
        nearest = next(p for p in (path, *path.absolute().parents) if p.exists() or p.is_symlink())
        if not nearest.is_dir():
            fix = "give another --out"
            raise NothingToOpen(
                problem("HS501", where=f"--out {out}", got=f"{nearest} is no folder", expected="a folder", fix=fix)
            )
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".hsformat-"):
            pass
    except OSError as e:
        expected, fix = "a folder that can be written", "give another --out, or the rights to write there"
        where, severity = f"--out {out}", Severity.ERROR
        raise NothingToOpen(problem("HS506", where=where, got=e, expected=expected, fix=fix, severity=severity)) from e
