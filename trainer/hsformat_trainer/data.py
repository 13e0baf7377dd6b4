"""The records of a run: several sources with weights, held-out records, and loaders over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsformat_trainer.config import TrainConfig
from hsformat_trainer.gate import Admitted

if TYPE_CHECKING:
    from hsformat.torch import RecordLoader

__all__ = ["eval_loader", "train_loader"]


def train_loader(config: TrainConfig, admitted: Admitted, *, rank: int = 0, world_size: int = 1) -> RecordLoader:
    """Return the loader of the training records: packed, ``config.batch_tokens`` a batch, resumable by its state."""
    raise NotImplementedError


def eval_loader(
    config: TrainConfig, admitted: Admitted, *, rank: int = 0, world_size: int = 1, most: int | None = None
) -> RecordLoader | None:
    """Return a loader of the held-out records, in order; None: there are none. ``most``: of so many of them."""
    raise NotImplementedError
