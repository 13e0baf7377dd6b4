"""JSON that every reader understands alike; anything else is an error with its place.

``json.loads`` takes NaN for a number, 1e999 for infinity, and of a name that stands twice in one object the last value,
where another reader takes the first, and half a character as an escape for a text. Imports nothing of hsformat.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

__all__ = ["parse_json"]

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    json.JSONDecodeError
        It is no JSON, with the place.
    ValueError
        A name twice in one object, a number that is not finite, an integer of thousands of digits, or half a character.
    RecursionError
        It is nested too deep.
    """
    value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as e:
            raise ValueError("a lone surrogate escape (half a character)") from e
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} twice in one object")
    return out


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is beyond what a float holds")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
