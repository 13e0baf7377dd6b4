"""The draft's vocabulary: the target ids that it can propose, by frequency in what it is trained on.

Counted are the supervised tokens of the training records, weighted as they are trained on, by reading ids and masks and
never the states. The ids that end a text and the target's special tokens are always inside. NumPy alone: importing this
module brings no torch.
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

__all__ = ["DraftVocabulary", "count_tokens", "make_vocabulary", "vocabulary_for"]

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
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """[Vd] the target ids, strictly rising."""
        ids: npt.NDArray[np.int64] = self.d2t + np.arange(len(self.d2t), dtype=np.int64)
        return ids

    @property
    def line(self) -> str:
        """What it is, for people."""
        return f"draft vocabulary: {len(self.d2t):,} of {len(self.t2d):,} ids, {self.coverage:.2%} of supervised tokens"


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
    ContractMismatch
        HS408: the training records have fewer different supervised tokens.
    ForeignFileError
        The map of ``config.init`` cannot be read any more.
    """
    size, total = admitted.spec.draft_vocab_size, admitted.spec.vocab_size
    if size >= total:
        return None
    counts = count_tokens(admitted.sources, total, tick=tick)
    if config.init is None:
        return make_vocabulary(counts, size, always=admitted.special_ids)
    draft, problems = read_draft(config.init)
    if draft is None or draft.d2t is None:
        raise ForeignFileError(problems)  # the gate has read it: it has changed since
    inside = np.zeros(total, np.bool_)
    inside[draft.d2t + np.arange(size, dtype=np.int64)] = True
    return _checked(draft.d2t, inside, counts)


def count_tokens(
    sources: Sequence[Source], vocab_size: int, *, tick: Tick = lambda done, total: None
) -> npt.NDArray[np.float64]:
    """Return [V]: how often each target id is supervised in the training records, times the weight of their source."""
    counts = np.zeros(vocab_size, np.float64)
    total, done = sum(len(s.train) for s in sources), 0
    for s in sources:
        own = np.zeros(vocab_size, np.int64)
        for row in s.train:
            record = s.source.read(int(row), captures=())
            own += np.bincount(record.input_ids[record.loss_mask != 0], minlength=vocab_size)
            done += 1
            tick(done, total)
        counts += own * s.weight
    return counts


def make_vocabulary(counts: npt.NDArray[np.float64], size: int, *, always: Sequence[int]) -> DraftVocabulary:
    """Return the vocabulary of the ``size`` most frequent ids; of equally frequent ones, the lower.

    Parameters
    ----------
    counts
        [V] how often each target id occurs.
    always
        Ids that are inside in any case, the first of them if they are more than ``size``.

    Raises
    ------
    ContractMismatch
        HS408: fewer than ``size`` ids occur (SafeAILab/EAGLE#248: a map of 1,746 ids beside a head of 32,000).
    """
    total = len(counts)
    inside = np.zeros(total, np.bool_)
    inside[np.array(always[:size], np.int64)] = True
    room = size - int(inside.sum())
    order = np.argsort(-np.where(inside, -1.0, counts), kind="stable")
    chosen = order[:room]
    occur = int((counts[chosen] > 0).sum())
    if occur < room:
        most = occur + int(inside.sum())
        got = f"{most} target ids that are supervised in the training records, or special"
        fix = f"say --draft-vocab-size {most} or fewer, give more data, or leave it out for the whole vocabulary"
        expected = f"at least {size}, the size of the draft's vocabulary"
        raise ContractMismatch(problem("HS408", where="--draft-vocab-size", got=got, expected=expected, fix=fix))
    inside[chosen] = True
    ids = np.flatnonzero(inside).astype(np.int64)
    return _checked(ids - np.arange(size, dtype=np.int64), inside, counts)


def _checked(
    d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_], counts: npt.NDArray[np.float64]
) -> DraftVocabulary:
    if wrong := check_map(d2t, t2d, size=len(d2t), total=len(t2d), where="draft vocabulary"):
        raise ContractMismatch(wrong)
    return DraftVocabulary(d2t=d2t, t2d=t2d, coverage=float(counts[t2d].sum() / max(counts.sum(), 1e-300)))
