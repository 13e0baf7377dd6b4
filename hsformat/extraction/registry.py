"""Finding extractors (entry points of group ``hsformat.extractors``), and isolating what they die of.

May import ``problems`` and ``extraction.protocol``.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points

from hsformat.extraction.protocol import Extractor
from hsformat.problems import HsError, ResolveError, problem

__all__ = ["GROUP", "available", "find_extractor", "isolated"]

GROUP = "hsformat.extractors"


def available() -> dict[str, EntryPoint]:
    """Return the installed extractors by name, without loading any."""
    return {e.name: e for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def find_extractor(name: str) -> Extractor:
    """Load and construct the extractor of this name.

    Raises
    ------
    ResolveError
        HS410: none has the name, or the plugin cannot be loaded.
    """
    known = available()
    where = f"--engine {name}"
    if name not in known:
        raise ResolveError(
            problem("HS410", where=where, got=name, expected=f"one of {list(known)}", fix="install the extra or plugin")
        )
    entry = known[name]
    try:
        extractor = entry.load()()
    except Exception as e:  # isolates a plugin
        raise ResolveError(
            problem(
                "HS410",
                where=f"{where} ({entry.value})",
                got=f"{type(e).__name__}: {e}",
                expected="an extractor that can be loaded",
                fix=f"install what it needs, for example pip install 'hsformat[{name}]'",
            )
        ) from e
    if not isinstance(extractor, Extractor):
        raise ResolveError(
            problem(
                "HS410",
                where=f"{where} ({entry.value})",
                got=type(extractor).__name__,
                expected="an object with the methods of hsformat.extraction.Extractor",
                fix="ask the plugin's author to follow the protocol",
            )
        )
    return extractor


@contextmanager
def isolated(extractor: Extractor) -> Iterator[None]:
    """Call an extractor: whatever it dies of becomes a problem with the place where it died.

    Raises
    ------
    HsError
        As the extractor raised it; anything else as HS410, with the cause chained.
    """
    try:
        yield
    except HsError:
        raise
    except Exception as e:  # isolates a plugin
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise ResolveError(
            problem(
                "HS410",
                where=f"engine {extractor.name}: {at.filename}:{at.lineno}",
                got=f"{type(e).__name__}: {e}",
                expected="an engine that runs this target",
                fix="run the target with the engine alone; what is committed stays, and the same command goes on",
            )
        ) from e
