"""JSON files of a model folder: read whole, or refused with the place where they break."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from hsformat.problems import ForeignFileError, NothingToOpen, problem

__all__ = ["corrupt", "read_object", "read_text", "require_folder"]


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


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises
    ------
    ForeignFileError
        HS602: it cannot be read, or is not UTF-8 (with the position of the first bad byte).
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as e:
        raise corrupt(str(path), e.strerror or type(e).__name__, "a readable file") from e
    except UnicodeDecodeError as e:
        raise corrupt(f"{path}: byte {e.start}", f"not UTF-8: {e.reason}", "UTF-8 text") from e


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises
    ------
    ForeignFileError
        HS602: unreadable, not UTF-8, not JSON (with line and column; NaN and Infinity are not JSON) or not an object.
    """
    text = read_text(path)
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as e:
        raise corrupt(f"{path}: line {e.lineno} column {e.colno}", e.msg, "JSON") from e
    except (ValueError, RecursionError) as e:
        raise corrupt(str(path), e, "JSON") from e
    if not isinstance(value, dict):
        raise corrupt(str(path), f"a JSON {type(value).__name__}", "a JSON object")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond what a float holds")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
