"""``hsformat train STORE... --target MODEL --serve ENGINE@VERSION --out DIR``.

The flags are made of the fields of :class:`hsformat_trainer.config.TrainConfig`: name, type, meaning and default stand
there and nowhere else.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from hsformat.cli.output import echo_problems
from hsformat.problems import ContractMismatch, ExitCode, NothingToOpen, Problem, Severity, exit_code
from hsformat.strict_json import parse_json
from hsformat_trainer.config import TrainConfig

__all__ = ["train"]

_NUMBERS_OR_WORDS = ("clip",)
"""Fields whose flag takes a number or ``null``."""


def _flag_type(annotation: Any) -> type:
    """Return the type of a flag: numbers and switches are typed, anything else is text."""
    if get_origin(annotation) is Annotated:
        return _flag_type(get_args(annotation)[0])
    kinds = [a for a in get_args(annotation) if a is not NoneType]
    if NoneType in get_args(annotation) and len(kinds) == 1:
        return _flag_type(kinds[0])
    return annotation if annotation in (bool, int, float) else str


def _help(name: str) -> str:
    field = TrainConfig.model_fields[name]
    text = str(field.description)
    choices = [str(c) for c in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    if choices and not all(c in text for c in choices):
        text += f" One of {', '.join(choices)}."
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return f"{text} Default: {'yes' if default else 'no'}."
    if isinstance(default, (int, float, str)):
        return f"{text} Default: {default}."
    return text


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of the command, the config's fields in their order."""
    kind = inspect.Parameter.KEYWORD_ONLY

    def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
        return inspect.Parameter(name, kind, annotation=annotation, default=default)

    for name, field in TrainConfig.model_fields.items():
        if name == "stores":
            text = str(field.description)
            yield parameter(name, Annotated[list[str] | None, typer.Argument(metavar="STORE...", help=text)])
            weights = "Weights of the stores, in their order (2,0.5): how often their records come an epoch."
            yield parameter("weights", Annotated[str | None, typer.Option(help=weights)])
            continue
        flag_type = str if name in _NUMBERS_OR_WORDS else _flag_type(field.annotation)
        words = [f"--{name.replace('_', '-')}"]
        if flag_type is bool:
            words = [f"{words[0]}/--no-{words[0].removeprefix('--')}"]
        yield parameter(name, Annotated[flag_type | None, typer.Option(*words, help=_help(name))])
    file = "YAML file with options by these names; flags override it."
    yield parameter("config", Annotated[str | None, typer.Option("--config", help=file)])
    shown = "Print the whole config as YAML and exit."
    yield parameter("print_config", Annotated[bool, typer.Option("--print-config", help=shown)], default=False)
    go_on = "Go on from the newest checkpoint in --out; refused on other data."
    yield parameter("resume", Annotated[bool, typer.Option("--resume", help=go_on)], default=False)


def train(**options: Any) -> None:
    """Train an EAGLE-3 draft on stores, if the data means what every engine that will serve it does.

    Before any weight is loaded, stores, target, draft and engines are compared; an error ends the command with exit
    code 1, and there is no option to go on.
    """
    from hsformat_trainer.configuration import ConfigError, load_config, to_yaml

    file, shown, resume = (options.pop(name) for name in ("config", "print_config", "resume"))
    try:
        config = load_config(file, _flags(options))
        if shown:
            typer.echo(to_yaml(config), nl=False)
            raise typer.Exit(ExitCode.CLEAN)
    except ConfigError as e:
        echo_problems(e.problems, err=True)
        typer.echo(f"hsformat train: {_counted(e.problems)} in the options; nothing was begun", err=True)
        raise typer.Exit(ExitCode.UNABLE) from e
    raise typer.Exit(_run(config, resume=resume))


def _run(config: TrainConfig, *, resume: bool) -> int:
    from hsformat_trainer.gate import admit
    from hsformat_trainer.out_folder import check_out

    check_out(config.out)
    try:
        admitted = admit(config)
    except ContractMismatch as e:
        echo_problems(e.problems, err=True)
        refused = f"hsformat train: refused: {_counted(e.problems)}; no weight was loaded, nothing was trained"
        typer.echo(refused, err=True)
        return max(exit_code(e.problems), ExitCode.PROBLEMS)
    if os.environ.get("RANK", "0") == "0":  # of several processes, one speaks
        for line in admitted.lines():
            typer.echo(line)
        echo_problems(admitted.notes)
    try:
        from hsformat_trainer.loop import train as run
    except ModuleNotFoundError as e:
        typer.echo(f"hsformat train: {e.name} is not installed: pip install 'hsformat[train]'", err=True)
        return ExitCode.UNABLE
    return int(run(config, admitted, resume=resume).exit_code)


def _flags(options: dict[str, Any]) -> dict[str, Any]:
    """Return flags as the config's fields take them.

    Raises
    ------
    NothingToOpen
        HS603: a flag's text cannot be split.
    """
    from hsformat.problems import problem

    flags = dict(options)
    for name in _NUMBERS_OR_WORDS:
        if flags.get(name) is not None:
            with suppress(ValueError):  # a word stays one, and the config says whether it is known
                flags[name] = float(flags[name])
    stores, weights = flags["stores"] or None, flags.pop("weights")
    flags["stores"] = stores
    if weights is not None:
        parts = [part.strip() for part in weights.split(",")]
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if stores is None or len(numbers) != len(stores):
            expected = f"as many numbers as stores are given ({len(stores or [])}), with commas"
            fix = "give a weight for each store, as --weights 2,0.5"
            raise NothingToOpen(problem("HS603", where="--weights", got=weights, expected=expected, fix=fix))
        flags["stores"] = [{"path": path, "weight": w} for path, w in zip(stores, numbers, strict=True)]
    if flags.get("draft_rope") is not None:
        try:
            flags["draft_rope"] = parse_json(flags["draft_rope"])
        except (ValueError, RecursionError) as e:
            fix = """give it as JSON: '{"rope_type": "default", "rope_theta": 10000.0}'"""
            raise NothingToOpen(problem("HS603", where="--draft-rope", got=e, expected="a JSON object", fix=fix)) from e
    return flags


def _counted(problems: list[Problem]) -> str:
    n = sum(p.severity is Severity.ERROR for p in problems)
    return f"{n} error{'' if n == 1 else 's'}"


_signature = inspect.Signature(list(_parameters()))
train.__signature__ = _signature  # type: ignore[attr-defined]  # typer reads it
train.__annotations__ = {p.name: p.annotation for p in _signature.parameters.values()} | {"return": None}
