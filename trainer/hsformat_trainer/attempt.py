"""Going on after a refusal, so that all problems are said at once. Brings no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hsformat.problems import HsError, NothingToOpen, Problem

__all__ = ["attempt"]

T = TypeVar("T")


def attempt(call: Callable[[], T], problems: list[Problem]) -> T | None:
    """Return what ``call`` returns, or None with its problems added.

    Raises
    ------
    NothingToOpen
        ``call`` raised it: a path that was given does not exist, and nothing can be begun.
    """
    try:
        return call()
    except NothingToOpen:
        raise
    except HsError as e:
        problems += e.problems
        return None
