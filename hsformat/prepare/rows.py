"""The reader: a JSON Lines file to rows, one line in memory at a time.

A line that cannot be read is one problem with its line number; the rest goes on. What makes the whole file useless is
raised before the first row. This module may import ``problems``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from hsformat.problems import ForeignFileError, NothingToOpen, Problem, problem

__all__ = ["Row", "count_rows", "read_rows"]

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One JSON object of a file, and its place for problems (``data.jsonl: line 3``)."""

    where: str
    value: dict[str, Any]


def read_rows(path: str | Path) -> Iterator[Row | Problem]:
    """Return an iterator over the rows of a JSON Lines file; a bad line is a problem in its place.

    Blank lines are passed over. A byte order mark at the start is allowed.

    Raises
    ------
    ForeignFileError
        At once: HS602 when there is no such file, it is a folder, cannot be opened or holds nothing; HS603 when
        it is one JSON array.
    """
    path = Path(path)
    with _open(path) as file:
        first = next((line for line in _lines(file) if line.strip()), None)
    if first is None:
        _refuse(path, "HS602", "an empty file", "one JSON object a line")
    if first.lstrip().startswith(b"["):
        _refuse(
            path, "HS603", "a JSON array", "JSON Lines: one JSON object a line",
            "write one row a line, for example with: jq -c '.[]' in.json > out.jsonl",
        )  # fmt: skip
    return _rows(path)


def count_rows(path: str | Path) -> int:
    """Return how many rows :func:`read_rows` will give, bad ones included, for a progress bar.

    Raises
    ------
    ForeignFileError
        HS602: the file cannot be opened.
    """
    with _open(Path(path)) as file:
        return sum(1 for line in _lines(file) if line.strip())


def _rows(path: Path) -> Iterator[Row | Problem]:
    with _open(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            if line.strip():
                yield _parse(line, f"{path}: line {number}")


def _parse(line: bytes, where: str) -> Row | Problem:
    def bad(got: str, expected: str, fix: str) -> Problem:
        return problem("HS602", where=where, got=got, expected=expected, fix=fix)

    try:
        value = json.loads(line.decode("utf-8").rstrip(), parse_constant=_refuse_constant)
        if b"\\ud" in line or b"\\uD" in line:  # JSON can spell half a character, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as e:
        return bad(
            f"byte 0x{line[e.start]:02x} at offset {e.start} of the line", "text in UTF-8", "convert it to UTF-8"
        )
    except UnicodeEncodeError:
        return bad("a lone surrogate escape (half a character)", "text that UTF-8 can hold", "repair the escape")
    except json.JSONDecodeError as e:
        got = f"{e.msg} at column {e.colno} of {len(line.rstrip())}"
        return bad(got, "one whole JSON object", "get the file again: the line is cut or was not written as JSON")
    except (ValueError, RecursionError) as e:  # NaN, an integer of thousands of digits, nesting without end
        return bad(str(e), "JSON that every reader understands alike", "repair the row")
    if not isinstance(value, dict):
        return problem("HS603", where=where, got=f"a JSON {type(value).__name__}", expected="a JSON object",
                       fix="write one object a line, with messages or with input_ids and loss_mask")  # fmt: skip
    return Row(where=where, value=value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    for number, line in enumerate(file):
        yield line.removeprefix(_BOM) if number == 0 else line


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as e:
        raise NothingToOpen(
            problem("HS602", where=str(path), got="no such file", expected="a JSON Lines file", fix="check the path")
        ) from e
    except IsADirectoryError as e:
        _refuse(path, "HS603", "a folder", "a JSON Lines file", "name the file", e)
    except OSError as e:
        _refuse(path, "HS602", f"cannot be opened: {e.strerror}", "a readable file", "check the path", e)


def _refuse(
    path: Path, code: str, got: str, expected: str, fix: str | None = None, cause: BaseException | None = None
) -> NoReturn:
    raise ForeignFileError(problem(code, where=str(path), got=got, expected=expected, fix=fix)) from cause
