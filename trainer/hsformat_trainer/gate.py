"""The refusal: whether data, draft and every engine that will serve it mean the same, before any weight is loaded.

Importing this module brings no torch.
"""

from __future__ import annotations

from hsformat_trainer.admitted import Admitted, Source
from hsformat_trainer.config import TrainConfig

__all__ = ["Admitted", "Source", "admit"]


def admit(config: TrainConfig) -> Admitted:
    """Compare stores, target, draft and engines.

    Raises
    ------
    ContractMismatch
        Every error that was found, with the engine and the store that it is of.
    """
    raise NotImplementedError
