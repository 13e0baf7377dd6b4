"""What cannot be removed, or not be kept before, told as problems with what the place said; links above all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hsformat.problems import Severity, StoreError, problem
from hsformat.store.backend import Backend

__all__ = ["refuse_link", "removing"]


@contextmanager
def removing(where: str, done: str = "removed") -> Iterator[None]:
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
                got=f"cannot be {done}: {e.strerror or e}",
                expected="a place in which this user may change files, and no link to another one",
                fix="restore access, or put the folder itself where the link is, then give the command again",
            )
        ) from e


def refuse_link(backend: Backend, key: str) -> None:
    """Refuse a folder that is a link.

    Raises
    ------
    StoreError
        HS506 (error).
    """
    if any(e.key == key for e in backend.listing(key)):
        with removing(f"{backend.location}/{key}"):
            raise OSError("a link: nothing that it leads to is removed")
