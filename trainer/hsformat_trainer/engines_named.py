"""The engines that a draft is for, as ``--serve`` names them: ``sglang@0.5.23``, ``custom:layout.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsformat.engines.custom import PREFIX, load_custom
from hsformat.engines.emission import ARCHITECTURE
from hsformat.engines.profile import EngineProfile
from hsformat.engines.table import draft_row

__all__ = ["NamedEngine", "parse_serve"]


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
