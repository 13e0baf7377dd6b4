"""Options that all hosted engines share (``--option NAME=VALUE``), and what an engine must not be told besides.

What an engine is started with is decided by its driver; ``engine_args`` passes further arguments on, but for those that
the driver sets itself and those under which states are lost.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsformat.engines.profile import EngineProfile, load_profile
from hsformat.problems import HsError, Problem, problem
from hsformat_extractors.hosted.staging import MIB

__all__ = [
    "API_KEY", "SHARED", "EngineOption", "Forbidden", "Settings", "at_least", "engine_arguments", "forbidden_problems",
    "option_problems", "request_seconds", "without_secrets",
]  # fmt: skip


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


_TIMEOUT_S, _PATIENCE, _TOKENS = 600.0, 0.8, 512
_LONGEST_S = 1e7
"""116 days: what waits longer waits for ever, and a socket takes no more than 9.2e9."""

_SECRET = r"(?:(?<![a-z0-9])(?:api)?(?:key|token)|password|passwd|secret|credentials?)"


def at_least(low: int) -> Callable[[str], bool]:
    """Return whether a text is an integer of at least ``low``, of at most twelve digits."""
    return lambda text: text.isascii() and text.isdigit() and len(text) <= 12 and int(text) >= low


def _seconds(text: str) -> bool:
    try:
        return 0 < float(text) <= _LONGEST_S
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
    EngineOption(name="timeout", expected="a number of seconds above 0, at most 1e7", valid=_seconds),
    EngineOption(name="start_timeout", expected="a number of seconds above 0, at most 1e7", valid=_seconds),
    EngineOption(name="engine_profile", expected="the file of an engine profile", valid=bool),
    EngineOption(name="server", expected="http://HOST:PORT", valid=lambda v: v.startswith(("http://", "https://"))),
    EngineOption(name="tensor_parallel", expected="a number of devices, at least 1", valid=at_least(1)),
    EngineOption(name="data_parallel", expected="a number of replicas, at least 1", valid=at_least(1)),
    EngineOption(name="engine_args", expected="arguments of the engine as a JSON object", valid=_json_object),
)


API_KEY = EngineOption(name="api_key", expected="the name of an environment variable", valid=str.isidentifier)
"""Of engines whose servers may ask for a key."""


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
            timeout=float(options.get("timeout", _TIMEOUT_S)),
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
        yield from (
            problem("HS410", where=f"option engine_args: {name}", got=json.dumps(name),
                    expected="a name with _ between its words, as the engine's own API has it",
                    fix=f"say {name.strip('-').replace('-', '_')}")
            for name in arguments
            if not name.isidentifier()
        )  # fmt: skip
        yield from forbidden_problems(arguments, forbidden, where="option engine_args")
    if "engine_profile" in options:
        try:
            load_profile(options["engine_profile"])
        except HsError as e:
            yield from (p.at("option engine_profile") for p in e.problems)


def forbidden_problems(
    arguments: Mapping[str, Any], forbidden: Iterable[Forbidden], *, where: str
) -> Iterator[Problem]:
    """Yield HS410 for each argument of an engine that a rule forbids.

    Parameters
    ----------
    arguments
        By name, as the engine's own API calls them.
    where
        Where they were given.
    """
    for rule in forbidden:
        for name in rule.names:
            if name in arguments and not any(_equal(arguments[name], v) for v in rule.allowed):
                yield problem("HS410", where=f"{where}: {name}", got=json.dumps(arguments[name]),
                              expected=_allowed(rule), fix=rule.fix)  # fmt: skip


def engine_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """Return further arguments of the engine, by name: what ``engine_args`` holds."""
    arguments: dict[str, Any] = json.loads(options.get("engine_args", "{}"))
    return arguments


def request_seconds(options: Mapping[str, str], *, max_new_tokens: int = 0) -> float:
    """Return the seconds after which a driver gives up what does not come: before its caller gives up the driver.

    Parameters
    ----------
    max_new_tokens
        Where nothing is seen of an answer before its end, as many times more for each 512 tokens of it.
    """
    return _PATIENCE * float(options.get("timeout", _TIMEOUT_S)) * (1 + max_new_tokens // _TOKENS)


def without_secrets(value: Any) -> Any:
    """Return what an engine was told, as it may be kept beside data: keys, tokens of access and passwords are ``***``.

    Parameters
    ----------
    value
        Text (JSON, or words of a command line), or what JSON holds.

    Examples
    --------
    >>> without_secrets({"engine_args": '{"hf_token": "hf_abc", "seed": 1}'})
    {'engine_args': '{"hf_token": "***", "seed": 1}'}
    >>> without_secrets("serve model --api-key abc --port 1")
    'serve model --api-key *** --port 1'
    """
    if isinstance(value, Mapping):
        return {k: "***" if _is_secret(k) and v is not None else without_secrets(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        after = (None, *value)
        return [
            "***" if isinstance(b, str) and b.startswith("--") and _is_secret(b) else without_secrets(v)
            for b, v in zip(after, value, strict=False)
        ]
    if not isinstance(value, str):
        return value
    if _json_object(value):
        return json.dumps(without_secrets(json.loads(value)))
    words = rf"(--[\w-]*{_SECRET})(=|\s+)('[^']*'|\"[^\"]*\"|\S+)"
    return re.sub(words, r"\1\2***", value, flags=re.IGNORECASE)


def _is_secret(name: str) -> bool:
    return re.search(rf"{_SECRET}$", name, re.IGNORECASE) is not None


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _allowed(rule: Forbidden) -> str:
    values = " or ".join(json.dumps(v) for v in rule.allowed)
    return f"{values}: {rule.why}" if values else f"not to be given: {rule.why}"
