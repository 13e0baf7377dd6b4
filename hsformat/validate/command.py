"""The command line of validation, for ``hsformat validate`` and ``python -m hsformat.validate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hsformat.printable import printable
from hsformat.problems import ExitCode, HsError, NothingToOpen, Problem, Severity, exit_code
from hsformat.validate.report import Level, Report, Tick

if TYPE_CHECKING:
    from hsformat.validate.draft import DraftCheck

__all__ = ["validate"]

SHOWN = 100
"""Problems printed as text; the rest is counted. JSON has them all."""


class Format(StrEnum):
    """How the findings are printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def validate(
    store: Annotated[str, typer.Argument(help="Path or address of a store.")],
    level: Annotated[
        Level,
        typer.Option(
            help="metadata: structure, sizes, ids. sample: also some records. full: every checksum and every number."
        ),
    ] = Level.SAMPLE,
    target: Annotated[
        str | None, typer.Option(help="Folder of the model that the data has to be of: config, tokenizer and weights.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Folder of a draft that the data has to fit; with --engine.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that will serve the draft: vllm, sglang, or custom:PATH.")
    ] = None,
    engine_version: Annotated[str | None, typer.Option(help="Version of the engine.")] = None,
    engine_profile: Annotated[str | None, typer.Option(help="Profile that `hsformat engines probe` wrote.")] = None,
    format: Annotated[
        Format, typer.Option(help="text, JSON alone on stdout, or annotations of GitHub Actions.")
    ] = Format.TEXT,
) -> None:
    """Check a store against the specification and report every problem found."""
    from hsformat.validate import run

    check = _draft_check(draft, engine, engine_version, engine_profile)
    try:
        with _progress(level) as tick:
            report = run(store, level=level, target=target, draft=check, tick=tick)
        code = exit_code(report.problems)
    except HsError as e:  # nothing to check, or nothing to compare with
        report = Report(store=store, level=level, problems=e.problems)
        code = ExitCode.UNABLE if isinstance(e, NothingToOpen) else exit_code(e.problems)
    if format is Format.GITHUB:
        for p in report.problems:
            typer.echo(_annotation(p))
    elif format is Format.JSON:
        typer.echo(json.dumps({**report.to_dict(), "exit_code": code}, indent=2, ensure_ascii=False))
    else:
        _print_text(report, code)
    raise typer.Exit(code)


def _draft_check(draft: str | None, engine: str | None, version: str | None, profile: str | None) -> DraftCheck | None:
    if draft is None and engine is version is profile is None:
        return None
    if draft is None or engine is None:
        missing = "--draft" if draft is None else "--engine"
        raise typer.BadParameter(f"--draft and --engine go together: {missing} is missing", param_hint=missing)
    from hsformat.validate.draft import DraftCheck

    return DraftCheck(draft=draft, engine=engine, version=version, profile=profile)


def _annotation(p: Problem) -> str:
    """Return a problem as a workflow command: percent signs and line ends are escaped, in the title also : and ,."""
    kind = "notice" if p.severity is Severity.NOTE else p.severity.value
    message = _escaped(f"{p.where}: got {p.got}; expected {p.expected}; fix: {p.fix}")
    title = _escaped(f"{p.code} {p.name}").replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{message}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _print_text(report: Report, code: int) -> None:
    order = list(Severity)
    problems = sorted(report.problems, key=lambda p: order.index(p.severity))
    for p in problems[:SHOWN]:
        typer.echo(str(p))
    if len(problems) > SHOWN:
        typer.echo(f"... and {len(problems) - SHOWN:,} more; --format json shows all")
    counts = ", ".join(f"{(n := report.count(s)):,} {s.value}{'' if n == 1 else 's'}" for s in order)
    if code == ExitCode.UNABLE:
        typer.echo(printable(f"{report.store}: could not be validated: {counts}"))
        return
    verdict = "invalid" if report.count(Severity.ERROR) else "valid"
    compared = report.states_compared
    typer.echo(
        f"{printable(report.store)}: {verdict} at level {report.level.value}: {counts}; records {report.records:,}, "
        f"segments {report.segments:,}, records read {report.records_checked:,}, bytes checked {report.bytes_checked:,}"
        + ("" if compared is None else f", states compared with the target {compared:,}")
    )


@contextmanager
def _progress(level: Level) -> Iterator[Tick]:
    """Yield a function that shows how many of how many bytes are read; silent away from a terminal."""
    console = Console(stderr=True)
    if level is Level.METADATA or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("validate"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("validate", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
