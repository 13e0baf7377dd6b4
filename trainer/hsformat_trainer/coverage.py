"""Whether a target's argmax over its whole vocabulary is in the draft's: the largest of the logits outside it.

They are a fifth of all products of a small draft's training, for a bit a state that never changes while it is trained.
So :class:`Coverage` takes that bit from the tokens where the target wrote them greedily, each being the argmax, and
elsewhere keeps it over epochs. It is found record by record: what a record's rows give must not depend on the batch
that they were in, or a run that is resumed would not be the one that went on.

Shapes: C states, Vd draft vocabulary, V target vocabulary, P states of a batch whose distributions are asked for.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.precision import PRODUCT_ROWS, head_product
from hsformat_trainer.target_head import SplitHead, TargetHead

__all__ = ["Coverage", "argmax_of", "keeps_coverage", "outside_logits"]

ROWS = 1024
"""Most states of a record whose logits are computed at a time."""


def keeps_coverage(config: TrainConfig) -> bool:
    """Return whether a run may see a record again."""
    return config.epochs > 1 or config.max_steps is not None


class Coverage:
    """The bits of the records seen so far, by their content: of one target, one vocabulary, on one device.

    Parameters
    ----------
    target
        Frozen.
    most
        States that are kept, a byte each; those of further records are found anew each time.
    """

    def __init__(self, target: TargetHead, *, most: int = 2**30) -> None:
        self._target = target
        self._ids: npt.NDArray[np.int64] | None = None
        self._known: dict[int, torch.Tensor] = {}
        self._left = most

    @torch.no_grad()
    def of(self, batch: TrainBatch, target_ids: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return [P] bool of a batch, on its device.

        None: it is not known, and finding it here would save nothing, since the batch was planned without ``hashed``,
        so that it could not be kept.

        A record that says that it is greedy is believed: at two tokens that are all but equally likely, the precision
        of products may make the other one the argmax here.

        Parameters
        ----------
        target_ids
            [Vd] of the draft's vocabulary, strictly rising, the same at each call; None: it is the target's, and
            covers all.
        dtype
            Of products; as for the draft's logits.
        """
        states = batch.distributions
        if target_ids is None:
            return torch.ones(len(states), dtype=torch.bool, device=states.device)
        if self._ids is None:
            self._ids = target_ids.cpu().numpy()
        found = []
        for r, (first, end) in enumerate(itertools.pairwise(batch.distribution_starts)):
            content = batch.content_hash[r] if batch.content_hash else None
            inside = None if content is None else self._known.get(content)
            if inside is None:
                written = batch.written[first:end]
                if content is None and first < end and (written < 0).all():
                    return None
                inside = torch.from_numpy(np.isin(written, self._ids)).to(states.device)
                if len(others := np.flatnonzero(written < 0)):
                    at = torch.from_numpy(others).to(states.device)
                    split = self._target.split(target_ids, dtype)
                    inside[at] = self._look(batch, states[first:end][at], split, dtype)
                if content is not None and len(inside) <= self._left:
                    self._left -= len(inside)
                    self._known[content] = inside
            found.append(inside)
        return torch.cat(found)

    def _look(self, batch: TrainBatch, states: torch.Tensor, split: SplitHead, dtype: torch.dtype) -> torch.Tensor:
        target = self._target
        parts = [torch.empty(0, dtype=torch.bool, device=states.device)]
        for i in range(0, len(states), ROWS):
            last = batch.last[states[i : i + ROWS]]
            hidden = (last if batch.last_normed else target.final_norm(last)).to(dtype)
            found = target.shaped(head_product(hidden, split.inside), split.inside_bias).max(-1)
            _, inside = argmax_of(found.values, found.indices, split, *outside_logits(target, split, hidden, 0.0)[:2])
            parts.append(inside)
        return torch.cat(parts)


def argmax_of(
    top: torch.Tensor, best: torch.Tensor, split: SplitHead, other_top: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [C] the argmax over the whole vocabulary as a target id, and whether it is in the draft's.

    Parameters
    ----------
    top, best
        [C] the largest logit in the draft's vocabulary, and its draft id.
    other_top, other
        [C] the largest one outside it, and its target id.
    """
    expected = split.inside_ids[best]
    # Equal logits, which rounding to bfloat16 makes common: the lower id wins, as argmax over all has it.
    inside = (top > other_top) | ((top == other_top) & (expected < other))
    return torch.where(inside, expected, other), inside


def outside_logits(
    target: TargetHead, split: SplitHead, hidden_CH: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return of the logits outside the draft's vocabulary the largest, its id, and the logsum; never all at once."""
    rows = PRODUCT_ROWS if hidden_CH.device.type == "cpu" else 2**15
    tops, best, logsums = [], [], []
    for i in range(0, len(split.outside_ids), rows):
        bias = None if split.outside_bias is None else split.outside_bias[i : i + rows]
        logits = target.shaped(hidden_CH @ split.outside[i : i + rows].T, bias)
        found = logits.max(-1)
        tops.append(found.values)
        best.append(found.indices + i)
        if temperature > 0:
            logsums.append(torch.logsumexp(logits / temperature, -1))
    top, block = torch.stack(tops, -1).max(-1)
    index = torch.stack(best, -1).gather(-1, block[:, None])[:, 0]
    logsum = torch.logsumexp(torch.stack(logsums, -1), -1) if logsums else None
    return top, split.outside_ids[index], logsum
