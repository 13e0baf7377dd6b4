"""The seam to probes: what one is asked, and finding them (entry points of group ``hsformat.probes``).

A probe runs an engine, so none is part of the core; those of this distribution are in ``hsformat_extractors.probes``.
May import ``profile`` and everything below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

from hsformat.engines.profile import EngineProfile
from hsformat.problems import ResolveError, problem

__all__ = ["GROUP", "EngineProbe", "ProbeRequest", "available_probes", "find_probe"]

GROUP = "hsformat.probes"


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What a probe is asked.

    Attributes
    ----------
    architecture
        Of the target, as the first entry of ``architectures`` in a config.
    dtype
        ``float32`` or ``bfloat16``: what the engine runs in.
    drafts
        Whether to prove what is made of draft folders as well, which takes several times as long.
    seconds
        Time limit of one start of the engine.
    report
        Told each step in words.
    """

    architecture: str
    dtype: str
    drafts: bool
    seconds: float
    report: Callable[[str], None]


@runtime_checkable
class EngineProbe(Protocol):
    """Proves what an engine does, by running it. Construction is cheap and takes no argument."""

    name: str
    """As in ``--engine``."""

    def probe(self, request: ProbeRequest) -> EngineProfile:
        """Run the engine that is installed, and return what was proved of it.

        Raises
        ------
        HsError
            HS410: the engine is not installed, cannot be run here, or does what no row can say.
        """
        ...


def available_probes() -> dict[str, EntryPoint]:
    """Return the installed probes by name, without loading any."""
    return {e.name: e for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def find_probe(name: str) -> EngineProbe:
    """Load and construct the probe of this name.

    Raises
    ------
    ResolveError
        HS410: none has the name, or it cannot be loaded.
    """
    known = available_probes()
    if name not in known:
        raise ResolveError(
            problem("HS410", where=f"--engine {name}", got=name, expected=f"one of {', '.join(known) or 'none'}",
                    fix="name an engine that has a probe, or describe the layout yourself")
        )  # fmt: skip
    entry = known[name]
    try:
        found = entry.load()()
    except Exception as e:  # isolates a plugin
        raise ResolveError(
            problem("HS410", where=f"--engine {name} ({entry.value})", got=f"{type(e).__name__}: {e}",
                    expected="a probe that can be loaded", fix="install what it needs, or ask the plugin's author")
        ) from e  # fmt: skip
    if not isinstance(found, EngineProbe):
        raise ResolveError(
            problem("HS410", where=f"--engine {name} ({entry.value})", got=type(found).__name__,
                    expected="an object with the methods of hsformat.engines.probing.EngineProbe",
                    fix="ask the plugin's author to follow the protocol")
        )  # fmt: skip
    return found
