"""``hsformat extract --dry-run``: what would be extracted, for people and as JSON. May import ``prepare``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from hsformat.cli.options import Format
from hsformat.cli.output import echo_problems
from hsformat.cli.preparing import preparation_progress
from hsformat.prepare import DryRun, Preparation, dry_run
from hsformat.problems import Severity

__all__ = ["run_dry"]

_OPEN, _CLOSE = "[[", "]]"
_STYLE = "bold green"
_SHOWN_CHARACTERS = 4_000
"""Of one sample; what is left out is counted."""
_BAR = 40
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What commands a terminal, and what turns the direction of text round, so that other text is seen than is there."""


def run_dry(preparation: Preparation, tokenizer: Any, rows: int, format: Format) -> NoReturn:
    """Prepare everything, print what came out and end with the exit code of the real run's preparation."""
    with preparation_progress(rows) as listener:
        result = dry_run(preparation, tokenizer, listener=listener)
    code = int(result.summary.exit_code)
    if format is Format.JSON:
        typer.echo(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
        raise typer.Exit(code)
    echo_problems((p for p in result.summary.all_problems if p.severity is not Severity.NOTE), err=True)
    _show(result, Console(file=sys.stdout, highlight=False, soft_wrap=True))
    raise typer.Exit(code)


def _show(result: DryRun, console: Console) -> None:
    for line in result.summary.lines():
        console.print(line, markup=False)
    for line in _length_lines(result):
        console.print(line, markup=False)
    colour = console.is_terminal and not console.no_color
    for shown in result.shown:
        how = "supervised tokens in green" if colour else f"supervised tokens in {_OPEN} {_CLOSE}"
        console.print(f"\nsample {shown.id!r}: {shown.tokens:,} tokens, {how}", markup=False)
        console.print(_marked(shown.runs, colour=colour))
    console.print("\nextract: dry run: no model was loaded and nothing was written", markup=False)


def _length_lines(result: DryRun) -> Iterator[str]:
    numbers = result.statistics()
    if numbers is None:
        return
    low, middle, high, top = (numbers[k] for k in ("min", "median", "p95", "max"))
    yield f"prepare: tokens a sample: min {low:,}, median {middle:,.0f}, p95 {high:,.0f}, max {top:,}"
    edges, counts = numbers["histogram"]["edges"], numbers["histogram"]["counts"]
    wide = len(f"{edges[-1] - 1:,}")
    for a, b, n in zip(edges, edges[1:], counts, strict=False):
        bar = "#" * max(round(_BAR * n / max(counts)), n > 0)
        yield f"  {a:>{wide},} to {b - 1:>{wide},}  {n:>9,}  {bar}".rstrip()


def _marked(runs: list[tuple[str, bool]], *, colour: bool) -> Text:
    text, left = Text(), _SHOWN_CHARACTERS
    for run, supervised in runs:
        shown = _CONTROL.sub(lambda m: repr(m[0])[1:-1], run[:left])  # data may spell a terminal's commands
        left -= len(run[:left])
        if supervised and not colour:
            shown = f"{_OPEN}{shown}{_CLOSE}"
        text.append(shown, style=_STYLE if supervised and colour else None)
        if not left:
            total = sum(len(t) for t, _ in runs)
            text.append(f" ... ({total - _SHOWN_CHARACTERS:,} more characters)" if total > _SHOWN_CHARACTERS else "")
            break
    return text
