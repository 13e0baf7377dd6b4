"""``hsformat layout DRAFT``: what an engine will do with a draft, and what the others would. May import ``engines``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hsformat.cli.options import Format
from hsformat.cli.output import echo_problems, json_errors
from hsformat.printable import printable
from hsformat.problems import ExitCode, Problem, Severity, exit_code

__all__ = ["layout"]


def layout(
    draft: Annotated[str, typer.Argument(help="Folder of a draft: config.json and safetensors.")],
    engine: Annotated[str, typer.Option(help="vllm, sglang, or custom:PATH of a layout of your own.")],
    target: Annotated[str, typer.Option(help="Folder of the target model; its config.json is enough.")],
    engine_version: Annotated[
        str | None, typer.Option(help="Version that will serve; a profile or a custom layout stands for it.")
    ] = None,
    engine_profile: Annotated[str | None, typer.Option(help="Profile that `hsformat engines probe` wrote.")] = None,
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Show what an engine will really do with a draft: layers in order, norms, vocabulary, weights. Needs no store."""
    from hsformat.engines.inspection import inspect, require_paths

    with json_errors(wanted=format is Format.JSON):
        require_paths(engine, draft=draft, target=target, profile=engine_profile)
        found, problems = inspect(engine, draft=draft, target=target, version=engine_version, profile=engine_profile)
        others = _others(engine, draft, target)
    code = exit_code(problems)
    if found is None and not code:
        code = ExitCode.UNABLE
    if format is Format.JSON:
        report = {
            "layout": None if found is None else found.to_json(),
            "others": others,
            "problems": [p.to_dict() for p in problems],
            "exit_code": code,
        }
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print(draft, engine, engine_version, found, others, problems)
    raise typer.Exit(code)


def _others(engine: str, draft: str, target: str) -> list[dict[str, Any]]:
    """Return what the newest known version of each other engine does with the same folder."""
    from hsformat.engines.inspection import inspect
    from hsformat.engines.table import known_versions
    from hsformat.engines.words import serving_engines

    out = []
    for other in serving_engines():
        if other != engine:
            version = known_versions(other)[-1]
            found, problems = inspect(other, draft=draft, target=target, version=version)
            errors = dict.fromkeys(p.code for p in problems if p.severity is Severity.ERROR)
            keys = None if found is None else list(found.keys)
            out.append({"engine": other, "version": version, "aux": keys, "errors": list(errors)})
    return out


def _print(
    draft: str,
    engine: str,
    version: str | None,
    found: Any,
    others: list[dict[str, Any]],
    problems: list[Problem],
) -> None:
    from hsformat.engines.words import layout_lines

    if found is None:
        typer.echo(printable(f"{draft}: what {' '.join(filter(None, (engine, version)))} does with it cannot be told"))
    else:
        typer.echo(
            printable(
                f"{draft}: {found.engine} {found.version} with {found.architecture} of {found.num_layers} layers "
                f"({found.evidence})"
            )
        )
        typer.echo("\n".join(layout_lines(found)))
    for other in others:
        name = f"{other['engine']} {other['version']}"
        what = "cannot be told" if other["aux"] is None else f"[{', '.join(other['aux'])}]"
        same = "" if found is None or other["aux"] != list(found.keys) else ", the same layers"
        errors = f"; errors: {', '.join(other['errors'])}" if other["errors"] else ""
        typer.echo(f"  {name} would feed it {what}{same}{errors}")
    echo_problems(problems)
