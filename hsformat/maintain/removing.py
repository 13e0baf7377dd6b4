"""Removals that fail, told as problems: what the place said, and that nothing which anybody reads has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hsformat.problems import Severity, StoreError, problem

__all__ = ["removing"]


@contextmanager
def removing(where: str) -> Iterator[None]:
    """Turn an OSError, but FileNotFoundError and FileExistsError, into a StoreError.

    Raises
    ------
    StoreError
        HS506 (error).
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as e:
        raise StoreError(
            problem(
                "HS506",
                where=where,
                severity=Severity.ERROR,
                got=f"cannot be removed: {e.strerror or e}",
                expected="a place in which this user may remove files, and no link to another one",
                fix="restore access, or put the folder itself where the link is, then give the command again",
            )
        ) from e
