"""Options that all hosted engines share (``--option NAME=VALUE``), and what an engine must not be told besides.

What an engine is started with is decided by its driver; ``engine_args`` passes further arguments on, but for those that
the driver sets itself and those under which states are lost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsformat.engines.profile import EngineProfile, load_profile
from hsformat.problems import HsError, Problem, problem
from hsformat_extractors.hosted.staging import MIB

__all__ = ["SHARED", "EngineOption", "Forbidden", "Settings", "at_least", "engine_arguments", "option_problems"]


@dataclass(frozen=True, kw_only=True)
class EngineOption:
    """An option by name.

    Attributes
    ----------
    name
        As in ``--option NAME=VALUE``.
    expected
        What a value is, in words.
    valid
        Whether a text is one.
    """

    name: str
    expected: str
    valid: Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Forbidden:
    """An argument of the engine that would break extraction, or belongs to the driver.

    Attributes
    ----------
    names
        Its names, any of which may be given.
    allowed
        Values that do no harm; empty: it is not to be given at all.
    why
        What would happen.
    fix
        What to do instead.
    """

    names: tuple[str, ...]
    allowed: tuple[Any, ...] = ()
    why: str
    fix: str


def at_least(low: int) -> Callable[[str], bool]:
    """Return whether a text is an integer of at least ``low``."""
    return lambda text: text.isascii() and text.isdigit() and int(text) >= low


def _seconds(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


SHARED = (
    EngineOption(name="staging", expected="a folder", valid=bool),
    EngineOption(name="staging_mib", expected="a number of mebibytes, at least 1", valid=at_least(1)),
    EngineOption(name="window", expected="a number of requests, at least 1", valid=at_least(1)),
    EngineOption(name="timeout", expected="a number of seconds above 0", valid=_seconds),
    EngineOption(name="start_timeout", expected="a number of seconds above 0", valid=_seconds),
    EngineOption(name="engine_profile", expected="the file of an engine profile", valid=bool),
    EngineOption(name="server", expected="http://HOST:PORT", valid=lambda v: v.startswith(("http://", "https://"))),
    EngineOption(name="tensor_parallel", expected="a number of devices, at least 1", valid=at_least(1)),
    EngineOption(name="data_parallel", expected="a number of replicas, at least 1", valid=at_least(1)),
    EngineOption(name="engine_args", expected="arguments of the engine as a JSON object", valid=_json_object),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The shared options as values; their defaults are here alone."""

    staging: Path
    staging_bytes: int
    window: int
    timeout: float
    start_timeout: float
    profile: EngineProfile | None
    server: str | None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Settings:
        """Return the values of options that :func:`option_problems` has nothing against.

        Raises
        ------
        HsError
            HS504, HS602, HS603: the profile cannot be read.
        """
        profile = options.get("engine_profile")
        return cls(
            staging=Path(options.get("staging", tempfile.gettempdir())),
            staging_bytes=int(options.get("staging_mib", "4096")) * MIB,
            window=int(options.get("window", "256")),
            timeout=float(options.get("timeout", "600")),
            start_timeout=float(options.get("start_timeout", "3600")),
            profile=None if profile is None else load_profile(profile),
            server=options.get("server"),
        )


def option_problems(
    options: Mapping[str, str], known: Mapping[str, EngineOption], forbidden: tuple[Forbidden, ...], engine: str
) -> Iterator[Problem]:
    """Yield HS410 for options that do not exist, are not what they should be, or would break extraction."""
    for name in sorted(set(options) - set(known)):
        yield problem("HS410", where=f"option {name}", got=f"{name}={options[name]}",
                      expected=f"options of the extractor {engine}: {', '.join(known)}", fix="remove it")  # fmt: skip
    for name, option in known.items():
        if name in options and not option.valid(options[name]):
            yield problem("HS410", where=f"option {name}", got=options[name], expected=option.expected,
                          fix="give such a value")  # fmt: skip
    if _json_object(options.get("engine_args", "")):
        arguments = engine_arguments(options)
        for rule in forbidden:
            for name in rule.names:
                if name in arguments and not any(_equal(arguments[name], v) for v in rule.allowed):
                    yield problem("HS410", where=f"option engine_args: {name}", got=json.dumps(arguments[name]),
                                  expected=_allowed(rule), fix=rule.fix)  # fmt: skip
    if "engine_profile" in options:
        try:
            load_profile(options["engine_profile"])
        except HsError as e:
            yield from e.problems


def engine_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """Return further arguments of the engine, by name: what ``engine_args`` holds."""
    arguments: dict[str, Any] = json.loads(options.get("engine_args", "{}"))
    return arguments


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _allowed(rule: Forbidden) -> str:
    values = " or ".join(json.dumps(v) for v in rule.allowed)
    return f"{values}: {rule.why}" if values else f"not to be given: {rule.why}"
