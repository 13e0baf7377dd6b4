"""``hsformat export-draft CHECKPOINT --engine sglang|vllm|both --out DIR``: a folder that engines serve."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from hsformat.cli.output import echo_problems
from hsformat.problems import ContractMismatch, ExitCode, Severity, exit_code

__all__ = ["export_draft"]


class LayoutStyle(StrEnum):
    """How the config is written."""

    PLAIN = "plain"
    SPECULATORS = "speculators"


class WeightDtype(StrEnum):
    """Of the weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def export_draft(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a checkpoint: OUT/checkpoints/step-N.")],
    engine: Annotated[
        str,
        typer.Option(
            help="sglang, vllm, both (one folder for the two), or engines as --serve of train names them: vllm@0.32.0."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder to write; it must not be there.")],
    engine_version: Annotated[
        str | None, typer.Option(help="Version of the one engine; without: the version that the draft was trained for.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Folder of the target model; without: where it was in training.")
    ] = None,
    layout_style: Annotated[
        LayoutStyle, typer.Option(help="plain, which both engines read, or speculators, which vLLM reads too.")
    ] = LayoutStyle.PLAIN,
    dtype: Annotated[WeightDtype | None, typer.Option(help="Of the weights; without: the target's.")] = None,
    engine_profile: Annotated[str | None, typer.Option(help="Profile that `hsformat engines probe` wrote.")] = None,
) -> None:
    """Write a draft as engines serve it, read it back, and refuse it if anything differs from its training."""
    from hsformat.engines.profile import load_profile
    from hsformat_trainer.engines_named import engines_to_export

    try:
        from hsformat_trainer.export import export_draft as export
        from hsformat_trainer.export import read_trained
    except ModuleNotFoundError as e:
        typer.echo(f"hsformat export-draft: {e.name} is not installed: pip install 'hsformat[train]'", err=True)
        raise typer.Exit(ExitCode.UNABLE) from e
    profile = None if engine_profile is None else load_profile(engine_profile)
    engines = engines_to_export(engine, engine_version, read_trained(checkpoint).serve)
    try:
        done = export(
            checkpoint, engines, out=out, target=target, style=layout_style.value,
            dtype=None if dtype is None else dtype.value, profile=profile,
        )  # fmt: skip
    except ContractMismatch as e:
        echo_problems(e.problems, err=True)
        n = sum(p.severity is Severity.ERROR for p in e.problems)
        typer.echo(f"hsformat export-draft: refused: {n} error{'' if n == 1 else 's'}; nothing was written", err=True)
        raise typer.Exit(max(exit_code(e.problems), ExitCode.PROBLEMS)) from e
    echo_problems(done.notes)
    typer.echo(f"{done.folder}: written, and read back as it was trained")
    for served in done.servings:
        typer.echo(f"  {served.engine} {served.version} feeds it [{', '.join(served.keys)}] ({served.evidence})")
