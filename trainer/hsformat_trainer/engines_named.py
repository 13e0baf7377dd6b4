"""The engines that a draft is for, as ``--serve`` names them: ``sglang@0.5.23``, ``custom:layout.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsformat.engines.custom import PREFIX, load_custom
from hsformat.engines.emission import ARCHITECTURE
from hsformat.engines.profile import EngineProfile
from hsformat.engines.table import draft_row
from hsformat.problems import NothingToOpen, problem

__all__ = ["NamedEngine", "engines_to_export", "parse_serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEngine:
    """An engine and its version; None: a custom layout, or what a profile says."""

    engine: str
    version: str | None

    @property
    def is_custom(self) -> bool:
        """Whether a file states what it does."""
        return self.engine.startswith(PREFIX)

    def __str__(self) -> str:
        return self.engine if self.version is None else f"{self.engine} {self.version}"

    def later_layers_norm(self, profile: EngineProfile | None) -> str:
        """Return the norm before the attention of a draft's layers after the first.

        Raises
        ------
        HsError
            HS410, HS602, HS603: the engine is not known.
        """
        if self.is_custom:
            return load_custom(self.engine.removeprefix(PREFIX)).later_layers_norm
        version = self.version_or(profile)
        return draft_row(self.engine, version, "plain", ARCHITECTURE, profile).later_layers_norm

    def version_or(self, profile: EngineProfile | None) -> str:
        """Return the version; of an engine that is named without one, the profile's, else none (HS410 where used)."""
        if self.version is None and profile is not None and profile.engine == self.engine:
            return profile.version
        return self.version or ""


def parse_serve(texts: Sequence[str]) -> tuple[NamedEngine, ...]:
    """Return the engines that are named; whether they are known is found out where they are looked up."""
    out = []
    for text in texts:
        name, _, version = text.partition("@")
        custom = text.startswith(PREFIX)
        out.append(NamedEngine(engine=text if custom else name, version=None if custom else version or None))
    return tuple(out)


def engines_to_export(text: str, version: str | None, trained_for: Sequence[str]) -> tuple[NamedEngine, ...]:
    """Return the engines of ``--engine``; a version that is not given is that of the training.

    Parameters
    ----------
    text
        ``sglang``, ``vllm``, ``both``, or engines as ``--serve`` names them.
    version
        Of the one engine that is named without one.
    trained_for
        ``--serve`` of the training.

    Raises
    ------
    NothingToOpen
        HS410: a version for two engines, or for one that has its own.
    """
    named = parse_serve(("sglang", "vllm") if text == "both" else [t.strip() for t in text.split(",")])
    open_ = [e for e in named if e.version is None and not e.is_custom]
    if version is not None and len(open_) != 1:
        expected, fix = "one engine without a version", "name them with their versions: sglang@0.5.23,vllm@0.32.0"
        raise NothingToOpen(problem("HS410", where="--engine-version", got=text, expected=expected, fix=fix))
    known: dict[str, str | None] = {}
    for e in parse_serve(trained_for):
        known.setdefault(e.engine, e.version)
    return tuple(
        e if e not in open_ else NamedEngine(engine=e.engine, version=version or known.get(e.engine)) for e in named
    )
