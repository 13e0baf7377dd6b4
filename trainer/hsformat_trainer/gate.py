"""The refusal: whether data, draft and every engine that will serve it mean the same, before any weight is loaded.

Importing this module brings no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsformat.contract import Contract, TargetModel
from hsformat.layout import Layout, ServingLayout
from hsformat.problems import Problem
from hsformat_trainer.config import TrainConfig

if TYPE_CHECKING:
    from hsformat.source import RecordSource
    from hsformat_trainer.draft_spec import DraftSpec

__all__ = ["Admitted", "Source", "admit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Records that take part.

    Attributes
    ----------
    name
        The store's place.
    source
        The records; a store, or another source.
    weight
        How often its records come an epoch; 0: held out, all of them.
    """

    name: str
    source: RecordSource
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What was found to fit together.

    Attributes
    ----------
    contract
        Of the first store; the others have its compatibility digest.
    layout
        What the draft is trained on: aux captures in the order in which ``fc`` concatenates them, and the last capture.
    servings
        What each engine will do with the draft, in the order of ``--serve``.
    spec
        Sizes and options of the draft.
    target, target_folder
        The target, as its folder describes it, and the folder.
    training, held_out
        The sources that are trained on, and one of held-out records; None: they are a part of the others.
    special_ids
        Target ids that are in every draft vocabulary: the target's end-of-sequence and special tokens.
    notes
        Problems that are no errors: what is worth knowing.
    """

    contract: Contract
    layout: Layout
    servings: tuple[ServingLayout, ...]
    spec: DraftSpec
    target: TargetModel
    target_folder: Path
    training: tuple[Source, ...]
    held_out: Source | None
    special_ids: tuple[int, ...] = ()
    notes: tuple[Problem, ...] = field(default=())

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint says of the data and the layout that it was trained on, as JSON-able data."""
        raise NotImplementedError

    def differences(self, recorded: Mapping[str, Any]) -> list[Problem]:
        """Return in what this differs from :meth:`record` of another run; empty: that run may go on with this data."""
        raise NotImplementedError


def admit(config: TrainConfig) -> Admitted:
    """Compare stores, target, draft and engines.

    Raises
    ------
    ContractMismatch
        Every error that was found, with the engine and the store that it is of.
    """
    raise NotImplementedError
