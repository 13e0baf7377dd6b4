"""``hsformat gc STORE``. May import ``maintain``."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from hsformat.cli.options import Format
from hsformat.cli.output import human_bytes, json_errors
from hsformat.problems import ExitCode

__all__ = ["gc", "parse_age"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def gc(
    store: Annotated[str, typer.Argument(help="Path or address of a store.")],
    older_than: Annotated[
        str,
        typer.Option(
            help="Age: a number and s, m, h or d. Longer than a writer ever pauses; 0 is refused, since what is being "
            "written would be removed."
        ),
    ] = "24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Remove segments that were never committed, segments that were replaced, and leftovers of killed writers."""
    from hsformat.maintain import gc_store

    age = parse_age(older_than)
    with json_errors(wanted=format is Format.JSON):
        report = gc_store(store, older_than=age, dry_run=dry_run)
    if format is Format.JSON:
        typer.echo(json.dumps({**report.to_dict(), "exit_code": ExitCode.CLEAN}, indent=2, ensure_ascii=False))
        return
    done = "would remove" if dry_run else "removed"
    for r in report.removed:
        typer.echo(f"{done} {r.kind} {r.key}: {r.objects} file(s), {human_bytes(r.nbytes)}, {_age(r.age)} old")
    for r in report.kept:
        typer.echo(f"kept {r.kind} {r.key}: {r.objects} file(s), {human_bytes(r.nbytes)}, {_age(r.age)} old")
    typer.echo(f"{report.store}: {done} {len(report.removed)}, {human_bytes(report.nbytes)}; kept {len(report.kept)}")


def parse_age(text: str) -> float:
    """Return seconds of ``90m``; what is no age, or not above 0, ends with exit code 2."""
    m = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    seconds = float(m[1]) * _UNITS[m[2]] if m else 0.0
    if not seconds:
        why = "is not above 0: what a writer is writing would be removed" if m else "is no number with s, m, h or d"
        raise typer.BadParameter(f"{text!r} {why}", param_hint="--older-than")
    return seconds


def _age(seconds: float) -> str:
    for unit in "dhm":
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.1f} {unit}"
    return f"{seconds:.0f} s"
