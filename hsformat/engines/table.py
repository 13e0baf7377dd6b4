"""The tables of all engines, and finding the rows that hold: by engine, version and architecture, never the nearest.

A version is the one that a row names, or it is unknown. A profile (``profile``) adds rows for its own version. May
import ``rows``, ``profile`` and the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from packaging.version import InvalidVersion, Version

from hsformat.engines import sglang, transformers, vllm
from hsformat.engines.profile import EngineProfile
from hsformat.engines.rows import CaptureRow, DraftRow, NotRun, Row, Unsupported
from hsformat.problems import Problem, ResolveError, problem

__all__ = ["ENGINES", "Engine", "capture_row", "draft_row", "engine_of", "known_versions", "parse_version"]

R = TypeVar("R", bound=Row)

_PROBE = (
    "prove it where it is installed (hsformat engines probe) and pass the profile (--engine-profile FILE; to extract, "
    "--option engine_profile=FILE), or describe the layout yourself"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What is known of one engine; ``title`` is how its people write it."""

    name: str
    title: str
    captures: tuple[CaptureRow, ...]
    drafts: tuple[DraftRow, ...]
    unsupported: tuple[Unsupported, ...]
    not_run: tuple[NotRun, ...]


ENGINES: dict[str, Engine] = {
    name: Engine(
        name=name,
        title=module.TITLE,
        captures=module.CAPTURES,
        drafts=module.DRAFTS,
        unsupported=module.UNSUPPORTED,
        not_run=module.NOT_RUN,
    )
    for name, module in (("transformers", transformers), ("vllm", vllm), ("sglang", sglang))
}
"""In the order in which they are shown."""


def engine_of(name: str, *, serving: bool = False) -> Engine:
    """Return an engine's tables.

    Parameters
    ----------
    serving
        Of those that may be named instead, only those that serve drafts are offered.

    Raises
    ------
    ResolveError
        HS410: no such engine.
    """
    if name not in ENGINES:
        offered = [e.name for e in ENGINES.values() if e.drafts or not serving]
        expected, fix = f"one of {', '.join(offered)}", "name an engine that is listed"
        raise ResolveError(problem("HS410", where="engine", got=name, expected=expected, fix=fix))
    return ENGINES[name]


def parse_version(engine: str, text: str) -> str:
    """Return a version as the rows write it, without its local part: ``0.32.0`` for ``v0.32.0+cpu``.

    Raises
    ------
    ResolveError
        HS410: it is no version.
    """
    known = known_versions(engine)
    if not text:
        fix = f"give the version that will serve: {engine}@{known[-1]}, where engines are named with commas"
        expected = f"one of {_join(known)}"
        raise ResolveError(problem("HS410", where=f"{engine}: version", got="none", expected=expected, fix=fix))
    try:
        version = Version(Version(text).public)
    except InvalidVersion as e:
        expected = f"a version, as pip shows it; known: {_join(known)}"
        raise ResolveError(problem("HS410", where=f"{engine}: version", got=repr(text), expected=expected)) from e
    return next((v for v in known if Version(v) == version), str(version))


@cache
def known_versions(engine: str) -> tuple[str, ...]:
    """Return the versions that some row of an engine names, ascending."""
    rows = (*ENGINES[engine].captures, *ENGINES[engine].drafts)
    return tuple(sorted({v for row in rows for v in row.versions}, key=Version))


def capture_row(
    engine: str,
    version: str,
    architecture: str,
    profile: EngineProfile | None = None,
    *,
    since: str | None = None,
) -> CaptureRow:
    """Return how a version of an engine numbers the depths of a target.

    Parameters
    ----------
    since
        The oldest version that whoever asks can use: of a version that is not known, no older ones are named.

    Raises
    ------
    ResolveError
        HS410: engine, version or architecture are not known together, or known to capture something else.
    """
    found, version = engine_of(engine), parse_version(engine, version)
    proved = _proved(engine, version, profile)
    if proved is not None and proved.architecture == architecture:
        return proved.captures
    _require_version(found.captures, engine, version, profile, since)
    for refused in found.unsupported:
        if version in refused.versions and architecture in refused.architectures:
            got, fix = f"{architecture}: {refused.reason}", f"{found.title} cannot be used for it ({refused.source})"
            raise ResolveError(_unknown(f"{engine} {version}: architecture", got, "the residual stream", fix))
    rows = [row for row in found.captures if version in row.versions]
    for row in rows:
        if architecture in row.architectures:
            return row
    known = sorted({a for row in rows for a in row.architectures})
    raise ResolveError(_unknown(f"{engine} {version}: architecture", architecture, f"one of {_join(known)}"))


def draft_row(
    engine: str, version: str, layout: str, architecture: str, profile: EngineProfile | None = None
) -> DraftRow:
    """Return what a version of an engine makes of draft folders of a config layout and an architecture.

    Raises
    ------
    ResolveError
        HS410: not known.
    """
    found, version = engine_of(engine, serving=True), parse_version(engine, version)
    if not found.drafts:
        fix = f"{found.title} serves no EAGLE-3 drafts; name the engine that will"
        raise ResolveError(_unknown("engine", engine, "an engine that serves drafts", fix))
    proved = _proved(engine, version, profile)
    own = proved.drafts if proved is not None else ()
    if not own:
        _require_version(found.drafts, engine, version, profile)
    rows = [*own, *(row for row in found.drafts if version in row.versions)]
    for row in rows:
        if row.layout == layout and architecture in row.architectures:
            return row if row.loading is not None else _with_loading(row, found.drafts, architecture)
    known = sorted({a for row in rows if row.layout == layout for a in row.architectures})
    expected = f"one of {_join(known)}" if known else "a config in SafeAILab's layout"
    where = f"{engine} {version}: draft architecture ({layout} layout)"
    raise ResolveError(_unknown(where, architecture, expected))


def _with_loading(row: DraftRow, known: Sequence[DraftRow], architecture: str) -> DraftRow:
    """Return a profile's row with what no probe tries, as the newest row that is known of such drafts says it."""
    alike = [r for r in known if r.layout == row.layout and architecture in r.architectures]
    if not alike:
        got = f"{architecture}, of which a profile alone knows"
        raise ResolveError(_unknown(f"draft architecture ({row.layout} layout)", got, "one that the tables know"))
    newest = max(alike, key=lambda r: max(Version(v) for v in r.versions))
    return row.model_copy(update={"loading": newest.loads})


def _proved(engine: str, version: str, profile: EngineProfile | None) -> EngineProfile | None:
    """Return the profile if it is of this engine and version."""
    own = profile is not None and profile.engine == engine and parse_version(engine, profile.version) == version
    return profile if own else None


def _require_version(
    rows: Sequence[R], engine: str, version: str, profile: EngineProfile | None, since: str | None = None
) -> None:
    known = sorted({v for row in rows for v in row.versions}, key=Version)
    if version not in known:
        usable = [v for v in known if since is None or Version(v) >= Version(since)]
        expected = f"one of {_join(usable)}"
        if profile is not None:
            expected += f"; the profile is of {profile.engine} {profile.version}, {profile.architecture}"
        raise ResolveError(_unknown(f"{engine}: version", version, expected))


def _unknown(where: str, got: str, expected: str, fix: str = _PROBE) -> Problem:
    return problem("HS410", where=where, got=got, expected=expected, fix=fix)


def _join(items: Sequence[str]) -> str:
    return ", ".join(items)
