"""The ids with which an engine would feed a draft what data holds. May import ``inspection`` and ``ids``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hsformat.engines.drafts import read_draft
from hsformat.engines.ids import ids_of
from hsformat.engines.inspection import rules_for
from hsformat.engines.layer_ids import shared_key
from hsformat.engines.profile import EngineProfile, load_profile
from hsformat.engines.targets import Target, target_facts
from hsformat.layout import parse_capture_key
from hsformat.problems import HsError

__all__ = ["matching_ids"]


def matching_ids(
    wanted: Sequence[str],
    engine: str,
    *,
    draft: str | os.PathLike[str],
    target: Target,
    version: str | None = None,
    profile: EngineProfile | str | os.PathLike[str] | None = None,
) -> tuple[str, list[int]] | None:
    """Return a place in a draft's config and the ids that make the engine feed captures there, in this order.

    Parameters
    ----------
    wanted
        Keys of captures: ``("d2", "d15", "d27")``.
    engine, draft, target, version, profile
        As of :func:`hsformat.engines.inspect`.

    Returns
    -------
    None: no ids stand for them, the engine is not known by its ids, or a file cannot be read.
    """
    folder, _ = read_draft(draft)
    if folder is None:
        return None
    try:
        proved = load_profile(profile) if isinstance(profile, (str, os.PathLike)) else profile
        facts = target_facts(target)
        rules = rules_for(engine, version, folder, facts, proved)
    except HsError:
        return None
    captures = rules.captures
    if captures is None:
        return None
    parsed = [parse_capture_key(key) for key in wanted]
    if any(normed != (captures.norm == "final" and depth == facts.num_layers) for depth, normed in parsed):
        return None
    ids = ids_of(captures, [depth for depth, _ in parsed], facts.num_layers)
    key = shared_key(rules.draft)
    if ids is None or key is None or min(ids) < key.plus:
        return None
    return key.path, [i - key.plus for i in ids]
