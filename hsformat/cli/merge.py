"""``hsformat merge A B --out C``. May import ``maintain``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hsformat.cli.options import Format
from hsformat.cli.output import echo_problems, human_bytes, json_errors
from hsformat.cli.progress import bytes_progress
from hsformat.cli.repair import lines

__all__ = ["merge"]


def merge(
    stores: Annotated[list[str], typer.Argument(help="Paths of stores of one meaning.")],
    out: Annotated[str, typer.Option(help="Path or address of the result: nothing, or a store of the same meaning.")],
    apply_final_norm: Annotated[
        bool,
        typer.Option(
            "--apply-final-norm",
            help="Take the last capture of stores that have it before the final norm through it; needs --target.",
        ),
    ] = False,
    target: Annotated[str | None, typer.Option(help="Folder of the target model.")] = None,
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Keep one record of an id that occurs twice, that of the older segment.")
    ] = False,
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Join stores of equal compatibility digest: segments are copied as they are, verified on the way."""
    from hsformat.maintain import merge_stores

    if apply_final_norm != (target is not None):
        raise typer.BadParameter("--apply-final-norm and --target MODEL are given together", param_hint="--target")
    with json_errors(wanted=format is Format.JSON), bytes_progress("merge") as tick:
        report = merge_stores(stores, out, final_norm=target, dedupe=dedupe, tick=tick)
    if format is Format.JSON:
        typer.echo(json.dumps({**report.to_dict(), "exit_code": report.exit_code}, indent=2, ensure_ascii=False))
        raise typer.Exit(report.exit_code)
    echo_problems(report.problems)
    for name in report.replaced:
        typer.echo(f"left out {name}: another segment has replaced it")
    if report.repair is not None:
        typer.echo("\n".join(lines(report.repair)))
    counts = f"copied {len(report.copied)}, converted {len(report.converted)}, there already {len(report.present)}"
    typer.echo(f"{report.store}: {report.records:,} record(s); segments {counts}; {human_bytes(report.nbytes)}")
    raise typer.Exit(report.exit_code)
