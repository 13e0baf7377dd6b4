"""Types and checks of option values. May import nothing of hsformat."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import typer

__all__ = ["Codec", "Dtype", "Format", "Last", "parse_options"]


class Format(StrEnum):
    """How a command prints what it found."""

    TEXT = "text"
    JSON = "json"


class Last(StrEnum):
    """The last capture: depth N before the final norm, after it, or none."""

    PRE = "pre"
    POST = "post"
    NONE = "none"


class Codec(StrEnum):
    """How chunks are encoded."""

    COMPACT = "compact"
    FAST = "fast"


class Dtype(StrEnum):
    """The dtype in which the target runs."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def parse_options(option: str, values: Sequence[str]) -> dict[str, str]:
    """Return ``["device=cpu"]`` as a dictionary; anything but NAME=VALUE, once a name, ends with exit code 2."""
    out: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name or name in out:
            raise typer.BadParameter(f"{value!r} is not NAME=VALUE, once a name", param_hint=option)
        out[name] = rest
    return out
