"""Whether data is what a draft was to be trained on: 4xx, from the draft's folder and the engine that will serve it.

May import ``compare``, ``contract`` and ``engines``; the engines' tables, which take longer to import than 100,000
records to check, when there is a draft.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hsformat.compare import compare
from hsformat.contract import Contract
from hsformat.problems import Problem

if TYPE_CHECKING:
    from hsformat.engines.profile import EngineProfile

__all__ = ["DraftCheck", "check_draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheck:
    """A draft and the engine that will serve it, as :func:`hsformat.engines.inspect` takes them."""

    draft: str | os.PathLike[str]
    engine: str
    version: str | None = None
    profile: EngineProfile | str | os.PathLike[str] | None = None

    @property
    def profile_path(self) -> str | os.PathLike[str] | None:
        """Where the profile is read from; None: it is given, or there is none."""
        return self.profile if isinstance(self.profile, (str, os.PathLike)) else None


def check_draft(
    contract: Contract,
    check: DraftCheck,
    *,
    target: str | os.PathLike[str] | None,
    longest: int,
    where: str,
) -> list[Problem]:
    """Compare a store's contract with what an engine does with a draft.

    Parameters
    ----------
    target
        The model's folder; None: the contract's target stands for it, so that embeddings cannot be compared.
    longest
        Tokens of the store's longest record.
    where
        The store's place.

    Returns
    -------
    Everything that is wrong with the draft by itself, and everything that the data and the engine disagree on. Where
    ids can make the engine feed what the data is laid out for, the fix of HS401 names them.
    """
    from hsformat.engines.inspection import inspect
    from hsformat.engines.matching import matching_ids
    from hsformat.engines.positions import check_record_length

    model = contract if target is None else target
    layout, problems = inspect(
        check.engine, draft=check.draft, target=model, version=check.version, profile=check.profile
    )
    if layout is None:
        return problems
    found = compare(contract, layout)
    if any(p.code == "HS401" for p in found) and len(contract.layout.aux) == len(layout.aux):
        instead = matching_ids(
            contract.layout.aux, check.engine, draft=check.draft, target=model, version=check.version,
            profile=check.profile,
        )  # fmt: skip
        if instead is not None:
            key, ids = instead
            found = [replace(p, fix=f"{p.fix}; or write ids {ids} to {key}") if p.code == "HS401" else p for p in found]
    problems += [p.at(where) for p in found]
    problems += check_record_length(layout.max_positions, longest, where=where, draft=str(check.draft))
    return problems
