"""The draft's vocabulary: the target ids that it can propose, by frequency in what it is trained on.

Counted are the supervised tokens of the training records, weighted as they are trained on, by reading ids and masks and
never the states. The ids that end a text and the target's special tokens are always inside. Where the data has fewer
different supervised ids than are asked for, the rest are ids of its prompts, and then the lowest ids (of a byte-pair
encoding the earliest merges); how many they are is said. NumPy alone: importing this module brings no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsformat.engines.drafts import read_draft
from hsformat.engines.vocabulary import check_map
from hsformat.problems import ContractMismatch, ForeignFileError, problem
from hsformat_trainer.admitted import Admitted, Source
from hsformat_trainer.config import TrainConfig

__all__ = ["DraftVocabulary", "check_coverage", "count_tokens", "make_vocabulary", "vocabulary_for"]

Tick = Callable[[int, int], None]


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
    filled
        How many of its ids are neither supervised in the data nor special.
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float
    filled: int = 0

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """[Vd] the target ids, strictly rising."""
        ids: npt.NDArray[np.int64] = self.d2t + np.arange(len(self.d2t), dtype=np.int64)
        return ids

    @property
    def line(self) -> str:
        """What it is, for people."""
        covered = f"{len(self.d2t):,} of {len(self.t2d):,} ids, {self.coverage:.2%} of supervised tokens"
        filled = f"; {self.filled:,} of the ids are not supervised in the data" if self.filled else ""
        return f"draft vocabulary: {covered}{filled}"


def vocabulary_for(
    config: TrainConfig, admitted: Admitted, *, tick: Tick = lambda done, total: None
) -> DraftVocabulary | None:
    """Return the draft's vocabulary; None: it is the target's, and there is no map.

    A draft that training begins with (``config.init``) brings its own. Otherwise it is counted for each run, and a map
    that another run has left beside the data is never used (speculators PR#1081).

    Parameters
    ----------
    tick
        Called with the number of records that were read, and of all.

    Raises
    ------
    ForeignFileError
        The map of ``config.init`` cannot be read any more.
    """
    size, total = admitted.spec.draft_vocab_size, admitted.spec.vocab_size
    if size >= total:
        return None
    counts, others = count_tokens(admitted.sources, total, tick=tick)
    if config.init is None:
        return make_vocabulary(counts, size, others=others, always=admitted.special_ids)
    draft, problems = read_draft(config.init)
    if draft is None or draft.d2t is None:
        raise ForeignFileError(problems)  # the gate has read it: it has changed since
    inside = np.zeros(total, np.bool_)
    inside[draft.d2t + np.arange(size, dtype=np.int64)] = True
    return _checked(draft.d2t, inside, counts)


def check_coverage(vocabulary: DraftVocabulary) -> None:
    """Refuse a vocabulary in which nothing could be learned.

    Raises
    ------
    ContractMismatch
        HS408: it holds no supervised token.
    """
    if vocabulary.coverage > 0:
        return
    expected, fix = "ids of supervised tokens", "raise --draft-vocab-size, or begin with a draft of this data"
    raise ContractMismatch(
        problem("HS408", where="--draft-vocab-size", got=vocabulary.line, expected=expected, fix=fix)
    )


def count_tokens(
    sources: Sequence[Source], vocab_size: int, *, tick: Tick = lambda done, total: None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return [V] and [V]: how often each target id is supervised in the training records, and how often it is not.

    Both times the weight of the source.
    """
    counts, others = np.zeros((2, vocab_size), np.float64)
    total, done = sum(len(s.train) for s in sources), 0
    for s in sources:
        for row in s.train:
            record = s.source.read(int(row), captures=())
            for found, chosen in ((counts, record.loss_mask != 0), (others, record.loss_mask == 0)):
                ids, n = np.unique(record.input_ids[chosen], return_counts=True)
                found[ids] += n * s.weight
            done += 1
            tick(done, total)
    return counts, others


def make_vocabulary(
    counts: npt.NDArray[np.float64],
    size: int,
    *,
    always: Sequence[int],
    others: npt.NDArray[np.float64] | None = None,
) -> DraftVocabulary:
    """Return the vocabulary of the ``size`` most frequent ids; of equally frequent ones, the lower.

    Parameters
    ----------
    counts
        [V] how often each target id is supervised.
    always
        Ids that are inside in any case, the first of them if they are more than ``size``.
    others
        [V] how often each id is there and not supervised, which decides between ids that are never supervised.

    Raises
    ------
    ContractMismatch
        HS408: the map does not hold what was asked for: a defect.
    """
    total = len(counts)
    inside = np.zeros(total, np.bool_)
    inside[np.array(always[:size], np.int64)] = True
    special = inside.copy()
    second = np.zeros(total) if others is None else others
    order = np.lexsort((np.arange(total), -second, -counts, inside))  # those inside already come last
    inside[order[: size - int(inside.sum())]] = True
    ids = np.flatnonzero(inside).astype(np.int64)
    filled = int((inside & ~special & (counts == 0)).sum())
    return _checked(ids - np.arange(size, dtype=np.int64), inside, counts, filled=filled)


def _checked(
    d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_], counts: npt.NDArray[np.float64], *, filled: int = 0
) -> DraftVocabulary:
    if wrong := check_map(d2t, t2d, size=len(d2t), total=len(t2d), where="draft vocabulary"):
        raise ContractMismatch(wrong)
    coverage = float(counts[t2d].sum() / max(counts.sum(), 1e-300))
    return DraftVocabulary(d2t=d2t, t2d=t2d, coverage=coverage, filled=filled)
