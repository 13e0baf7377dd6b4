"""What all readers share: a row, its place, and how a source that cannot be read is refused.

This module may import ``problems``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from hsformat.problems import ForeignFileError, Problem, problem

__all__ = ["ID_KEYS", "MEANING_KEYS", "Row", "Source", "refuse"]

ID_KEYS = ("id", "conversation_id")
MEANING_KEYS = ("messages", "conversations", "system", "tools", "input_ids", "loss_mask")
"""What a row can mean something by; readers of columns leave the others where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One object of a source, and its place for problems (``data.jsonl: line 3``, ``data.parquet: row 2``)."""

    where: str
    value: dict[str, Any]


class Source(Protocol):
    """A file or folder of rows, opened: its kind is known and its beginning was readable."""

    def rows(self) -> Iterator[Row | Problem]:
        """Yield the rows, from the first one at each call; a bad one is a problem in its place."""
        ...

    def count(self) -> int:
        """Return how many :meth:`rows` yields, without reading what they hold."""
        ...


def refuse(
    path: Path, code: str, got: str, expected: str, fix: str | None = None, cause: BaseException | None = None
) -> NoReturn:
    """Raise the ForeignFileError that says why the whole source cannot be read."""
    raise ForeignFileError(problem(code, where=str(path), got=got, expected=expected, fix=fix)) from cause
