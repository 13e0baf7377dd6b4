"""Commands of other packages: entry points of group ``hsformat.commands``, of which each names a typer function.

A plugin that cannot be loaded takes the place of its command with a message, and the other commands go on. May import
``problems``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from hsformat.problems import ExitCode

__all__ = ["GROUP", "is_broken", "plugin_commands"]

GROUP = "hsformat.commands"
_MARK = "__hsformat_broken__"


def plugin_commands(taken: Collection[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of each command of another package, by name.

    Parameters
    ----------
    taken
        Names of hsformat's own commands: no plugin replaces one.
    """
    seen = set(taken)
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        if entry.name in seen:
            continue
        seen.add(entry.name)
        try:
            command = entry.load()
        except Exception as e:  # isolates a plugin
            command = _broken(entry, f"{type(e).__name__}: {e}")
        if not callable(command):
            command = _broken(entry, f"it is a {type(command).__name__}, not a function")
        yield entry.name, command


def is_broken(command: Callable[..., Any]) -> bool:
    """Return whether a command stands for a plugin that cannot be loaded."""
    return getattr(command, _MARK, False) is True


def _broken(entry: EntryPoint, reason: str) -> Callable[..., Any]:
    package = entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]

    def broken(context: typer.Context) -> None:
        typer.echo(
            f"hsformat: the command {entry.name} of {package} cannot be loaded ({entry.value}): {reason}", err=True
        )
        raise typer.Exit(ExitCode.UNABLE)

    setattr(broken, _MARK, True)
    broken.__doc__ = f"Cannot be loaded ({package}): {reason}"
    return broken
