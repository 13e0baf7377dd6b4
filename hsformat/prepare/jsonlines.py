"""JSON Lines: one line in memory at a time.

A line that cannot be read is one problem with its line number; the rest goes on. What makes the whole file useless is
raised before the first row. This module may import ``problems``, ``strict_json`` and ``row``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hsformat.prepare.row import Row, refuse
from hsformat.problems import Problem, problem
from hsformat.strict_json import parse_json

__all__ = ["JsonLines", "open_binary", "open_json_lines"]

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """A JSON Lines file. Blank lines are passed over; a byte order mark at the start is allowed.

    Attributes
    ----------
    first
        The first line that is not blank, without white space before it.
    """

    path: Path
    first: bytes

    def rows(self) -> Iterator[Row | Problem]:
        """Yield the rows; a line that cannot be read is a problem in its place."""
        with open_binary(self.path) as file:
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield _parse(line, f"{self.path}: line {number}")

    def count(self) -> int:
        """Return the number of lines that are not blank."""
        with open_binary(self.path) as file:
            return sum(1 for line in _lines(file) if line.strip())


def open_json_lines(path: Path) -> JsonLines:
    """Return the reader of a file that is taken for JSON Lines.

    Raises
    ------
    ForeignFileError
        HS602: it cannot be opened or holds nothing. HS603: it is one JSON array.
    """
    with open_binary(path) as file:
        first = next((line for line in _lines(file) if line.strip()), None)
    if first is None:
        refuse(path, "HS602", "an empty file", "one JSON object a line")
    if first.lstrip().startswith(b"["):
        refuse(
            path, "HS603", "a JSON array", "JSON Lines: one JSON object a line",
            "write one row a line, for example with: jq -c '.[]' in.json > out.jsonl",
        )  # fmt: skip
    return JsonLines(path=path, first=first.lstrip())


def open_binary(path: Path) -> BinaryIO:
    """Open a file; HS602 (ForeignFileError) where the system refuses it."""
    try:
        return path.open("rb")
    except OSError as e:
        refuse(path, "HS602", f"cannot be opened: {e.strerror}", "a readable file", "check the path", e)


def _parse(line: bytes, where: str) -> Row | Problem:
    def bad(got: str, expected: str, fix: str) -> Problem:
        return problem("HS602", where=where, got=got, expected=expected, fix=fix)

    try:
        value = parse_json(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as e:
        return bad(
            f"byte 0x{line[e.start]:02x} at offset {e.start} of the line", "text in UTF-8", "convert it to UTF-8"
        )
    except json.JSONDecodeError as e:
        got = f"{e.msg.removesuffix(' at')} at column {e.colno} of {len(line.rstrip())}"
        return bad(got, "one whole JSON object", "get the file again: the line is cut or was not written as JSON")
    except (ValueError, RecursionError) as e:  # NaN, an integer of thousands of digits, nesting without end
        return bad(str(e), "JSON that every reader understands alike", "repair the row")
    if not isinstance(value, dict):
        return problem("HS603", where=where, got=f"a JSON {type(value).__name__}", expected="a JSON object",
                       fix="write one object a line, with messages or with input_ids and loss_mask")  # fmt: skip
    return Row(where=where, value=value)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    for number, line in enumerate(file):
        yield line.removeprefix(_BOM) if number == 0 else line
