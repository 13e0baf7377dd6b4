"""docs/cli.md: every command and option, generated from the signatures of the commands (``make docs``).

Typer's own objects differ from version to version; the annotations that it reads do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

__all__ = ["CliOption", "cli_commands", "cli_document", "cli_options"]

_KINDS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class CliOption:
    """One argument or option: ``text`` as it is given, ``default`` (None: required) and ``help``."""

    def __init__(self, name: str, annotation: Any, default: Any) -> None:
        from typer.models import ArgumentInfo

        kind, info = get_args(annotation)[:2]
        parts = [a for a in get_args(kind) if a is not type(None)]
        self.repeated = list in {get_origin(a) for a in (kind, *parts)}
        if self.repeated:
            kind = str
        elif parts:
            (kind,) = parts
        # In an annotation typer takes the first of the names for the default.
        first = (info.default,) if isinstance(info.default, str) and info.default.startswith("-") else ()
        names = (*first, *(info.param_decls or ())) or (f"--{name.replace('_', '-')}",)
        self.flags = tuple(flag for name in names for flag in name.split("/"))
        choices = "|".join(str(c.value) for c in kind) if isinstance(kind, type) and issubclass(kind, Enum) else None
        if isinstance(info, ArgumentInfo):
            self.flags, self.text = (), name.upper()
        elif kind is bool:
            self.text = ", ".join(self.flags)
        else:
            self.text = f"{', '.join(self.flags)} {choices or _KINDS.get(kind, 'TEXT')}"
        self.default = None if default is inspect.Parameter.empty else str(getattr(default, "value", default))
        self.help = " ".join((info.help or "").split())


def cli_commands() -> dict[str, Callable[..., Any]]:
    """Return the functions of all commands by name, in the order in which help lists them.

    A command below another has both names: ``engines probe``.
    """
    from hsformat.cli.commands import app

    found = _own_commands(app)
    for group in app.registered_groups:
        if group.typer_instance is not None and group.name is not None:
            below = group.typer_instance
            if below.registered_callback is not None and below.registered_callback.callback is not None:
                found[group.name] = below.registered_callback.callback
            found |= {f"{group.name} {name}": command for name, command in _own_commands(below).items()}
    return found


def _own_commands(app: Any) -> dict[str, Callable[..., Any]]:
    return {i.name or i.callback.__name__.replace("_", "-"): i.callback for i in app.registered_commands if i.callback}


def cli_options(command: Callable[..., Any]) -> Iterator[CliOption]:
    """Yield the arguments and options of a command."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if get_origin(hints[name]) is Annotated:  # the others, a context, are not given on the command line
            yield CliOption(name, hints[name], parameter.default)


def cli_document() -> str:
    """Return docs/cli.md."""
    lines = [
        "# Command line",
        "",
        "Generated from `hsformat/cli` by `make docs`; `hsformat COMMAND --help` says the same. Exit codes: 0 clean",
        "(notes and warnings allowed), 1 a problem of severity error, 2 could not do the job, 128 + n after signal n.",
    ]
    for name, command in cli_commands().items():
        first = (inspect.getdoc(command) or "").split("\n\n")[0]
        lines += ["", f"## hsformat {name}", "", " ".join(first.split())]
        lines += ["", "| argument or option | default | meaning |", "|---|---|---|"]
        for option in cli_options(command):
            if option.default is None:
                default = "required"
            else:
                default = "" if option.default in ("", "None", "False") else f"`{option.default}`"
            many = " May be given more than once." if option.repeated else ""
            cells = (f"`{option.text}`", default, f"{option.help}{many}")
            lines.append(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |")
    return "\n".join(lines) + "\n"
