"""The draft's vocabulary: the target ids that it can propose, by frequency in what it is trained on.

NumPy alone: importing this module brings no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsformat_trainer.admitted import Admitted
from hsformat_trainer.config import TrainConfig

__all__ = ["DraftVocabulary", "vocabulary_for"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftVocabulary:
    """A map between the draft's ids and the target's. Vd: size of the draft's vocabulary, V: of the target's.

    Attributes
    ----------
    d2t
        [Vd] int64 offsets: draft id i stands for target id ``i + d2t[i]``.
    t2d
        [V] bool: whether a target id is in the draft's vocabulary.
    coverage
        Share of the supervised tokens, of those that were counted, whose ids are in it.
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """[Vd] the target ids, strictly rising."""
        ids: npt.NDArray[np.int64] = self.d2t + np.arange(len(self.d2t), dtype=np.int64)
        return ids


def vocabulary_for(config: TrainConfig, admitted: Admitted) -> DraftVocabulary | None:
    """Return the draft's vocabulary; None: it is the target's."""
    raise NotImplementedError
