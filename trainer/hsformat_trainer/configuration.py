"""From a YAML file and flags to a :class:`TrainConfig`, and back. Brings no torch; needs PyYAML where a file is read.

Whatever is wrong is said all at once, with its line; an unknown key with the nearest one that is known. ``1e-4`` is a
number here, which YAML 1.1 takes for text; a key that is there twice is refused, of which YAML takes the last.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hsformat.problems import HsError, NothingToOpen, Problem, problem
from hsformat_trainer.config import HeldOut, StoreWeight, TrainConfig

__all__ = ["MOST_VALUES", "ConfigError", "load_config", "read_yaml", "to_yaml"]

MOST_VALUES = 100_000
"""Values of a config, as many stores and lists as they may be in."""

_STORES = "STORE... and --weights"
"""Where flags say what is trained on."""

Places = Mapping[tuple[str | int, ...], str]


class ConfigError(HsError):
    """The options of a run are wrong: nothing was begun, and the exit code is 2."""


def load_config(file: str | None, flags: Mapping[str, Any]) -> TrainConfig:
    """Return the config of a file, with the flags that were given in place of its values.

    Parameters
    ----------
    file
        A YAML file; None: the flags say everything.
    flags
        By the names of the fields; None: not given.

    Raises
    ------
    ConfigError
        HS603: every unknown key, missing option and wrong value, with its place. HS602: no YAML.
    NothingToOpen
        HS602: there is no such file.
    """
    values, places, twice = ({}, {}, []) if file is None else _read(file)
    given = {name: value for name, value in flags.items() if value is not None}
    places = {**places, **{(name,): f"--{name.replace('_', '-')}" for name in given}}
    places |= {("stores",): _STORES} if "stores" in given else {}
    try:
        config = TrainConfig.model_validate({**values, **given})
    except ValidationError as e:
        raise ConfigError([*twice, *_problems(e, places, file)]) from e
    if twice:
        raise ConfigError(twice)
    return config


def to_yaml(config: TrainConfig) -> str:
    """Return the whole config as YAML, each option with its meaning; it gives the same config again."""
    yaml = _yaml()
    lines = []
    for name, field in TrainConfig.model_fields.items():
        value = config.model_dump(mode="json")[name]
        lines.append(f"# {field.description}")
        lines.append(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000).rstrip("\n"))
    return "\n".join(lines) + "\n"


def read_yaml(file: str) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str]]:
    """Return the mapping in a YAML file, and the place of each of its values: ``run.yaml, line 3``.

    Raises
    ------
    NothingToOpen
        HS602: there is no such file.
    ConfigError
        HS602: it is no YAML, or no mapping. HS603: a key is there twice.
    """
    values, places, twice = _read(file)
    if twice:
        raise ConfigError(twice)
    return values, places


def _read(file: str) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str], list[Problem]]:
    """Return what :func:`read_yaml` does, of a key that is there twice the last value, and a problem for each."""
    yaml = _yaml()
    path = Path(file)
    if not path.is_file():
        fix = "check the path of --config"
        raise NothingToOpen(problem("HS602", where=file, got="no such file", expected="a config as YAML", fix=fix))
    try:
        text = path.read_text(encoding="utf-8")
        loader = _loader(yaml)(text)
        try:
            node = loader.get_single_node()
            places: dict[tuple[str | int, ...], str] = {}
            problems: list[Problem] = []
            if node is not None:
                _walk(yaml, node, (), file, places, problems)
            value = {} if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = file if mark is None else f"{file}, line {mark.line + 1}"
        got = getattr(e, "problem", None) or str(e)
        raise ConfigError(problem("HS602", where=where, got=got, expected="YAML")) from e
    except (OSError, ValueError, RecursionError) as e:
        if isinstance(e, HsError):
            raise
        raise ConfigError(problem("HS602", where=file, got=e, expected="YAML as UTF-8")) from e
    if not isinstance(value, dict):
        raise ConfigError(problem("HS602", where=file, got=type(value).__name__, expected="a mapping of options"))
    return value, places, problems


def _yaml() -> Any:
    try:
        return import_module("yaml")
    except ModuleNotFoundError as e:
        fix = "pip install 'hsformat[train]'"
        raise ConfigError(problem("HS602", where="PyYAML", got="not installed", expected="PyYAML", fix=fix)) from e


def _loader(yaml: Any) -> Any:
    """Return the safe loader, to which ``1e-4`` is a number, as it is in YAML 1.2."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the module is passed in, so that it is Any
        pass

    number = r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+"
    Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"{number}\Z"), list("-+.0123456789"))
    return Loader


def _walk(
    yaml: Any,
    node: Any,
    path: tuple[str | int, ...],
    file: str,
    places: dict[tuple[str | int, ...], str],
    problems: list[Problem],
) -> None:
    """Note where each value stands, and refuse a key that is there twice.

    Raises
    ------
    ValueError
        There are too many values: a few lines of anchors stand for any number.
    """
    if len(places) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values, anchors written out")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = str(key.value)
            where = f"{file}, line {key.start_mark.line + 1}"
            if (*path, name) in places:
                first = places[*path, name]
                expected, fix = f"once, as in {first}", "leave one of the two"
                problems.append(
                    problem("HS603", where=f"{where}: {name}", got="a second time", expected=expected, fix=fix)
                )
            places[*path, name] = where
            _walk(yaml, value, (*path, name), file, places, problems)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            places[*path, i] = f"{file}, line {value.start_mark.line + 1}"
            _walk(yaml, value, (*path, i), file, places, problems)


def _problems(error: ValidationError, places: Places, file: str | None) -> list[Problem]:
    """Turn pydantic's findings into problems, one an option."""
    out = []
    errors = error.errors(include_url=False)
    for err in errors:
        if err["type"] == "too_short" and any(
            e["loc"][: len(err["loc"])] == err["loc"] for e in errors if e is not err
        ):
            continue  # pydantic does not count the items that are wrong
        loc = tuple(p for p in err["loc"] if not (isinstance(p, str) and "[" in p))  # without names of validators
        name = ".".join(map(str, loc)) or "options"
        where = _place(loc, places)
        if where != _STORES and not where.startswith("--"):
            place = where or file or "options"
            where = f"{place}: {name}" if loc else place
        if err["type"] == "missing":
            flag = "STORE" if name == "stores" else f"--{name.replace('_', '-')}"
            fix = f"give {flag}" + (f", or {name} in {file}" if file else ", or a --config that has it")
            out.append(problem("HS603", where=name, got="nothing", expected="a value: it has no default", fix=fix))
        elif err["type"] == "extra_forbidden":
            known = _known(loc)
            near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
            expected = f"{near[0]}?" if near else f"one of {', '.join(known)}"
            fix = "correct the name: an unknown option is never ignored"
            out.append(problem("HS603", where=where, got="an unknown option", expected=expected, fix=fix))
        else:
            said = str(err["ctx"]["error"]) if err["type"] == "value_error" else err["msg"]
            said = "a list: [a, b]" if err["type"] == "tuple_type" else said
            got = "options that contradict each other" if not loc else repr(err["input"])[:200]
            out.append(problem("HS603", where=where, got=got, expected=said, fix="correct the value"))
    return out


def _place(loc: tuple[str | int, ...], places: Places) -> str:
    while loc:
        if loc in places:
            return places[loc]
        loc = loc[:-1]
    return ""


def _known(loc: tuple[str | int, ...]) -> list[str]:
    nested: dict[str | int, type[BaseModel]] = {"held_out": HeldOut, "stores": StoreWeight}
    model = nested.get(loc[0], TrainConfig) if len(loc) > 1 else TrainConfig
    return list(model.model_fields)
