"""Checks of option values that typer has no type for. May import nothing of hsformat."""

from __future__ import annotations

from collections.abc import Sequence

import typer

__all__ = ["check_choice", "parse_options"]


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not allowed, with exit code 2."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)


def parse_options(option: str, values: Sequence[str]) -> dict[str, str]:
    """Return ``["device=cpu"]`` as a dictionary."""
    out: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name or name in out:
            raise typer.BadParameter(f"{value!r} is not NAME=VALUE, once a name", param_hint=option)
        out[name] = rest
    return out
