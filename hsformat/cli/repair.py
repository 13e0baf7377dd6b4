"""``hsformat repair STORE``. May import ``maintain``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hsformat.cli.options import Format
from hsformat.cli.output import echo_problems, json_errors
from hsformat.cli.progress import bytes_progress

__all__ = ["repair"]

SHOWN = 20
"""Ids and problems of a segment that are printed as text; JSON has them all."""


def repair(
    store: Annotated[str, typer.Argument(help="Path or address of a store.")],
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Keep one record of an id that occurs twice, that of the older segment.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")] = False,
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Replace damaged segments by what is whole of them, and say which records are lost."""
    from hsformat.maintain import repair_store

    with json_errors(wanted=format is Format.JSON), bytes_progress("repair") as tick:
        report = repair_store(store, dedupe=dedupe, dry_run=dry_run, tick=tick)
    if format is Format.JSON:
        typer.echo(json.dumps({**report.to_dict(), "exit_code": report.exit_code}, indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(lines(report)))
        echo_problems(report.problems)
    raise typer.Exit(report.exit_code)


def lines(report: Any) -> list[str]:
    """Return the text of a repair: what was found and done, segment by segment, then the sum."""
    would = "would be " if report.dry_run else ""
    out = []
    for s in report.segments:
        by = f" by {s.successor}" if s.successor else ""
        done = "replaced meanwhile by another process" if s.action == "superseded" else f"{would}{s.action}{by}"
        out.append(f"segment {s.segment}: {done}; {s.kept:,} record(s) kept, {len(s.lost):,} lost")
        if s.aside:
            out.append(f"  its zarr.json is kept as {s.aside}")
        problems = [p for p in s.problems if p.record is None] or list(s.problems)  # of each record the cause is there
        out += [f"  {p.code} {p.where}: got {p.got}; expected {p.expected}" for p in problems[:SHOWN]]
        if len(problems) > SHOWN:
            out.append(f"  ... and {len(problems) - SHOWN:,} more; --format json shows all")
        out += [
            f"  {what}: {_shown(ids)}" for what, ids in (("lost", s.lost), ("in two segments", s.duplicates)) if ids
        ]
    if not report.segments:
        out.append(f"{report.store}: nothing to repair; {report.records:,} record(s)")
    else:
        again = "; extract again: what is there is skipped, by its id" if report.lost else ""
        out.append(f"{report.store}: {report.records:,} record(s), {len(report.lost):,} {would}lost{again}")
    return out


def _shown(ids: tuple[str, ...]) -> str:
    more = f", ... and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return ", ".join(map(repr, ids[:SHOWN])) + more
