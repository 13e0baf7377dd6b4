"""Options that commands share, their types, and checks of their values.

May import ``digests`` and ``strict_json``, on demand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import typer

__all__ = [
    "CODEC",
    "COMMIT_SECONDS",
    "DATA",
    "DTYPE",
    "EXPLODE_TURNS",
    "GENERATE",
    "LAST",
    "LAYERS",
    "MAX_LENGTH",
    "MODEL",
    "SEGMENT_MIB",
    "TEMPLATE_KWARGS",
    "Codec",
    "Dtype",
    "Format",
    "Last",
    "json_object",
    "parse_options",
]

MODEL = typer.Option(help="Folder of the target model.")
DATA = typer.Option(
    help="JSON Lines, Parquet, or the folder of a Hugging Face dataset: rows of messages, of ShareGPT's conversations, "
    "or of input_ids and loss_mask."
)
LAYERS = typer.Option(help="eagle3 (2, N//2, N-3), or aux depths in the draft's order: 2,15,27.")
LAST = typer.Option(help="Last capture: depth N before the final norm (pre) or after it.")
GENERATE = typer.Option(help="The target writes the answer, at most so many tokens.", min=0)
CODEC = typer.Option(help="Smaller, or faster to read and write.")
DTYPE = typer.Option(help="Run the target in this dtype; default: its config's.")
MAX_LENGTH = typer.Option(help="Cut samples to so many tokens; default: the target's.", min=1)
SEGMENT_MIB = typer.Option(help="Bound of a segment before it is encoded, MiB.", min=1)
COMMIT_SECONDS = typer.Option(help="Commit a segment at the latest after so long.", min=0)
TEMPLATE_KWARGS = typer.Option(help="Keyword arguments of the chat template, as JSON.")
EXPLODE_TURNS = typer.Option("--explode-turns", help="One record an assistant turn, as it is served.")


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


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return ``{"a": 1}`` as a dictionary; anything but a JSON object that can be stored ends with exit code 2."""
    from hsformat.digests import canonical_json
    from hsformat.strict_json import parse_json

    try:
        value = parse_json(text)
        canonical_json(value)
    except json.JSONDecodeError as e:
        raise typer.BadParameter(f"not JSON: {e}", param_hint=option) from e
    except UnicodeError as e:
        raise typer.BadParameter("a lone surrogate (half a character)", param_hint=option) from e
    except (ValueError, RecursionError) as e:  # NaN, a name twice, an integer beyond 2**53, nesting without end
        raise typer.BadParameter(f"not JSON that every reader understands alike: {e}", param_hint=option) from e
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint=option)
    return value
