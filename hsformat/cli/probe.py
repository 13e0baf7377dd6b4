"""``hsformat engines probe``: prove what the engine installed here does, by running it. May import ``engines``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsformat.cli.options import Format
from hsformat.cli.output import echo_problems, json_errors
from hsformat.problems import ExitCode, Problem, ResolveError, Severity, problem

if TYPE_CHECKING:
    from hsformat.engines.profile import EngineProfile

__all__ = ["probe"]

_NOT_COMPARED = {"architectures", "versions", "source", "evidence"}


class ProbeDtype(StrEnum):
    """The dtypes for which a probe has a tolerance."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def probe(
    engine: Annotated[str, typer.Option(help="The engine, which is installed in this environment.")],
    out: Annotated[Path, typer.Option(help="File for the profile; one that is there is replaced.")],
    architecture: Annotated[
        str, typer.Option(help="Of the target: the first entry of architectures in its config.json.")
    ] = "LlamaForCausalLM",
    dtype: Annotated[
        ProbeDtype, typer.Option(help="What the engine runs in; bfloat16 where it has no attention in float32.")
    ] = ProbeDtype.FLOAT32,
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts", help="Prove what is made of draft folders as well: a start of the engine for each of some 30."
        ),
    ] = False,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds for one start of the engine and one prompt; then it is ended.")
    ] = 300,
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Run the engine on a tiny random target, compare what drafts are fed with Transformers, and write a profile."""
    from hsformat.engines.probing import ProbeRequest, find_probe
    from hsformat.engines.profile import save_profile

    with json_errors(wanted=format is Format.JSON):
        _require_folder(out)
        found = find_probe(engine).probe(
            ProbeRequest(
                architecture=architecture,
                dtype=dtype.value,
                drafts=drafts,
                seconds=time_limit,
                report=lambda line: typer.echo(line, err=True),
            )
        )
        save_profile(found, out)
    problems = _against_the_table(found)
    if format is Format.JSON:
        told = {"profile": found.to_json(), "problems": [p.to_dict() for p in problems], "exit_code": ExitCode.CLEAN}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    typer.echo("\n".join(_lines(found, out)))
    echo_problems(problems)


def _require_folder(out: Path) -> None:
    """Refuse a place that cannot be written before the engine is started.

    Raises
    ------
    NotADirectoryError
        The profile's folder is none.
    IsADirectoryError
        There is a folder where the profile is to be.
    """
    if not out.parent.is_dir():
        raise NotADirectoryError(f"--out: no folder {out.parent}")
    if out.is_dir():
        raise IsADirectoryError(f"--out: {out} is a folder")


def _against_the_table(profile: EngineProfile) -> list[Problem]:
    """Return in what hsformat's own table says something else of this version; nothing where it says nothing."""
    from hsformat.engines.table import capture_row

    try:
        known = capture_row(profile.engine, profile.version, profile.architecture)
    except ResolveError:
        return []
    return [
        problem(
            "HS410",
            where=f"{profile.engine} {profile.version}, {profile.architecture}: {name}",
            got=f"{getattr(profile.captures, name)}, proved",
            expected=f"{getattr(known, name)}, which the table has ({known.evidence})",
            fix="pass the profile (--engine-profile), which counts before the table, and report the difference",
            severity=Severity.WARNING,
        )
        for name in type(known).model_fields
        if name not in _NOT_COMPARED and getattr(known, name) != getattr(profile.captures, name)
    ]


def _lines(profile: EngineProfile, out: Path) -> list[str]:
    from hsformat.engines.words import depths_text, rule_text

    row = profile.captures
    errors = [m.relative_error for m in profile.measurements if m.relative_error is not None]
    others = [m.runner_up for m in profile.measurements if m.runner_up is not None]
    drafts = "; ".join(f"proved for {', '.join(d.architectures)}" for d in profile.drafts) or "not asked (--drafts)"
    return [
        f"{profile.engine} {profile.version}, {profile.architecture}: proved",
        f"  ids           {rule_text(row)}",
        f"  depths        {depths_text(row)}",
        f"  order         {row.order}; a depth named twice is captured {row.duplicates}",
        f"  without ids   {', '.join(row.default) if row.default else 'refused'}",
        f"  drafts        {drafts}",
        f"  relative error at most {max(errors):.1e}; to the next depth at least {min(others):.1e}",
        f"  {out}: pass it as --engine-profile",
    ]
