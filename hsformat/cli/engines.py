"""``hsformat engines``: what is known of each engine. May import ``engines``."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Annotated

import typer

from hsformat.cli.options import Format
from hsformat.problems import ExitCode

__all__ = ["engines", "engines_app"]

engines_app = typer.Typer(rich_markup_mode=None)
"""The command and those below it; another one is added by ``engines_app.command()``."""


@engines_app.callback(invoke_without_command=True)
def engines(
    context: typer.Context,
    engine: Annotated[str | None, typer.Option(help="Show one engine alone.")] = None,
    format: Annotated[
        Format, typer.Option(help="text, or JSON alone on stdout: every row with its source.")
    ] = Format.TEXT,
) -> None:
    """List what is known of each engine: versions, targets, what an id means, and how it is known.

    Sources, and what is made of a draft's options and weights: --format json, or docs/engines.md.
    """
    from hsformat.engines.document import engine_rows
    from hsformat.engines.table import ENGINES

    if context.invoked_subcommand is not None:
        return
    if engine is not None and engine not in ENGINES:
        typer.echo(f"hsformat: no engine {engine!r}; known: {', '.join(ENGINES)}", err=True)
        raise typer.Exit(ExitCode.UNABLE)
    shown = [e for name, e in ENGINES.items() if engine in (None, name)]
    if format is Format.JSON:
        typer.echo(json.dumps({e.name: engine_rows(e) for e in shown}, indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join("\n".join(_lines(e.name)) for e in shown))


def _lines(name: str) -> list[str]:
    from hsformat.engines.table import ENGINES
    from hsformat.engines.words import columns, depths_text, rule_text, versions_text

    engine = ENGINES[name]
    rows = [["versions", "ids", "depths", "without ids", "known"]]
    for row in engine.captures:
        default = f"[{', '.join(row.default)}]" if row.default else "refused"
        rows.append([versions_text(name, row.versions), rule_text(row), depths_text(row), default, row.evidence])
    head, *shown = columns(rows)
    lines = [engine.title, f"  {head}"]
    for row, line in zip(engine.captures, shown, strict=True):
        known = ", ".join(row.architectures)
        targets = wrap(known, 110, initial_indent="    targets ", subsequent_indent=" " * 12, break_long_words=False)
        lines += [f"  {line}", *targets]
    for refused in engine.unsupported:
        versions = versions_text(name, refused.versions)
        lines.append(f"  refused: {', '.join(refused.architectures)} in {versions}: {refused.reason}")
    for absent in engine.not_run:
        versions = versions_text(name, absent.versions)
        lines.append(f"  not run on a CPU: {absent.what} in {versions}: {absent.reason}")
    if engine.drafts:
        kinds = sorted({(d.layout, a) for d in engine.drafts for a in d.architectures})
        for layout in ("plain", "speculators"):
            names = [a for kind, a in kinds if kind == layout]
            if names:
                lines.append(f"  drafts, {layout} layout: {', '.join(names)}")
    return [*lines, "  --format json has every row with its source, and what is made of a draft's options and weights"]
