"""``hsformat explain HS101``: what a problem code means, with an example. May import ``problems`` and ``spec``."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from hsformat.problems import CODES, CodeInfo, ExitCode
from hsformat.spec.v1_0 import problem_example

__all__ = ["explain", "render_code"]


def render_code(info: CodeInfo) -> str:
    """Return the text of one code."""
    lines = [
        f"{info.code} {info.name} ({info.severity.value})",
        "",
        f"  {info.meaning}",
        "",
        f"  why it matters  {info.why}",
        f"  what to do      {info.fix}",
        "",
    ]
    example = problem_example(info.code)
    if example is None:
        lines.append("  no example: nothing in this version of hsformat reports this code")
    else:
        parts = (
            "  for example (docs/problems.md has the lines before it)",
            example.source,
            "  gives",
            example.problems,
        )
        lines += [parts[0], "", textwrap.indent(parts[1], "    "), "", parts[2], "", textwrap.indent(parts[3], "    ")]
    return "\n".join(lines)


def explain(
    code: Annotated[str, typer.Argument(help="A code such as HS101, or a name such as length-mismatch.")] = "",
) -> None:
    """Explain a problem code; without one, list them all."""
    if not code:
        for info in CODES.values():
            typer.echo(f"{info.code}  {info.name:24}{info.meaning}")
        return
    wanted = code.strip()
    found = [i for i in CODES.values() if wanted.upper() == i.code or wanted.lower() == i.name]
    if not found:
        typer.echo(f"hsformat: no problem code {wanted!r}; 'hsformat explain' lists them", err=True)
        raise typer.Exit(ExitCode.UNABLE)
    typer.echo(render_code(found[0]))
