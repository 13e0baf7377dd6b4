"""JSON files of a model folder: read whole, or refused with the place where they break."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from hsformat.problems import ForeignFileError, NothingToOpen, problem
from hsformat.strict_json import parse_json

__all__ = ["MAX_TEXT_BYTES", "corrupt", "read_bytes", "read_object", "read_text", "require_folder"]

MAX_TEXT_BYTES = 256 * 1024 * 1024
"""Of a file that is read whole: several times the largest tokenizer that was seen (33 MB)."""


def corrupt(where: str, got: object, expected: object, fix: str | None = None) -> ForeignFileError:
    """Return the error HS602 of a file that cannot be read as what it claims to be."""
    return ForeignFileError(problem("HS602", where=where, got=got, expected=expected, fix=fix))


def require_folder(path: Path) -> None:
    """Refuse a path that is no folder.

    Raises
    ------
    ForeignFileError
        HS602.
    """
    expected, fix = "a model folder", "give the folder that holds config.json and the weights"
    if not path.exists():
        raise NothingToOpen(problem("HS602", where=str(path), got="no such path", expected=expected, fix=fix))
    if not path.is_dir():
        raise corrupt(str(path), "not a folder", expected, fix)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file of at most :data:`MAX_TEXT_BYTES`.

    Raises
    ------
    ForeignFileError
        HS602: it cannot be read, is larger, or is a device or a pipe, which has no end.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise corrupt(str(path), "not a regular file", "a readable file")
        if about.st_size > MAX_TEXT_BYTES:
            raise corrupt(str(path), f"{about.st_size} bytes", f"at most {MAX_TEXT_BYTES}")
        return path.read_bytes()
    except OSError as e:
        raise corrupt(str(path), e.strerror or type(e).__name__, "a readable file") from e


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises
    ------
    ForeignFileError
        HS602: as :func:`read_bytes`, or it is not UTF-8 (with the position of the first bad byte).
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as e:
        raise corrupt(f"{path}: byte {e.start}", f"not UTF-8: {e.reason}", "UTF-8 text") from e


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises
    ------
    ForeignFileError
        HS602: unreadable, not UTF-8, not JSON (with line and column), JSON of two meanings (a name twice, NaN), or
        not an object.
    """
    text = read_text(path)
    try:
        value = parse_json(text)
    except json.JSONDecodeError as e:
        raise corrupt(f"{path}: line {e.lineno} column {e.colno}", e.msg, "JSON") from e
    except (ValueError, RecursionError) as e:
        raise corrupt(str(path), e, "JSON") from e
    if not isinstance(value, dict):
        raise corrupt(str(path), f"a JSON {type(value).__name__}", "a JSON object")
    return value
