"""In which fields two JSON values differ, and how that is shown: every field by its path, none cut off. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsformat.contract import differing_fields

__all__ = ["ABSENT", "differing_leaves", "shown"]

ABSENT = "<absent>"
"""As :func:`hsformat.contract.differing_fields` shows a key that one side lacks."""


def differing_leaves(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(path, a's value, b's value)`` where two JSON values differ.

    As :func:`hsformat.contract.differing_fields`, and of two lists of objects that differ in length each object by
    itself: what only one of them has is a difference as a whole.
    """
    for path, x, y in differing_fields(a, b):
        if isinstance(x, list) and isinstance(y, list) and any(isinstance(v, dict) for v in (*x, *y)):
            for i in range(max(len(x), len(y))):
                here, there = (v[i] if i < len(v) else ABSENT for v in (x, y))
                for inner, p, q in differing_leaves(here, there):
                    yield f"{path}[{i}]" + (f".{inner}" if inner and not inner.startswith("[") else inner), p, q
        else:
            yield path, x, y


def shown(value: Any) -> str:
    """Return a value as text: of an object or a list of them a line for each of its fields."""
    lines = list(_lines(value, ""))
    if isinstance(value, dict) or len(lines) > 1:
        return "".join(f"\n    {path}: {text}" for path, text in lines)
    return "none" if value is None else str(value)


def _lines(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _lines(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for i, inner in enumerate(value):
            yield from _lines(inner, f"{path}[{i}]")
    else:
        yield path, "none" if value is None else str(value)
