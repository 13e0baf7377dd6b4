"""Target ids that end a text or a turn, or are special otherwise: a draft that cannot propose them stops too late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsformat.target.jsonfiles import read_object

__all__ = ["end_ids", "special_ids"]


def end_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end generation, as ``generation_config.json`` and ``config.json`` name them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            config = read_object(path)
            inner = config.get("text_config")
            for part in (config, inner if isinstance(inner, dict) else {}):
                found |= _ids(part.get("eos_token_id"))
    return tuple(sorted(i for i in found if 0 <= i < vocab_size))


def special_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end generation, and after them those that the tokenizer marks as special.

    Raises
    ------
    ForeignFileError
        HS602: a file is no JSON.
    """
    ends = end_ids(folder, vocab_size)
    found: set[int] = set()
    path = folder / "tokenizer.json"
    if path.is_file():
        added = read_object(path).get("added_tokens")
        for entry in added if isinstance(added, list) else []:
            if isinstance(entry, dict) and entry.get("special") is True:
                found |= _ids(entry.get("id"))
    return (*ends, *sorted(i for i in found - set(ends) if 0 <= i < vocab_size))


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if type(v) is int}
