"""The loss of a row, and its gradient: what the draft's distribution q lacks of the target's, p.

Both over the draft's vocabulary, p renormalised over it. Shapes: C rows of a chunk, Vd the draft's vocabulary.

============== =========================================================================================================
``kl``         Forward KL, ``sum p log(p / q)``: soft cross-entropy less the entropy of p; the same gradient, ``q - p``.
``ce``         Cross-entropy with the target's argmax.
``reverse_kl`` ``sum q log(q / p)``.
``lk``         The hybrid of "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding"
               (arXiv:2602.23881): with acceptance ``a = sum min(p, q)``, ``w KL + (1 - w) (1 - a)``, where
               ``w = exp(-3 a)`` carries no gradient: KL while the draft is far off, then the acceptance itself.
============== =========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["LK_DECAY", "LossName", "TargetRows", "row_losses"]

LossName = Literal["kl", "ce", "reverse_kl", "lk"]

LK_DECAY = 3.0
"""Eta of the LK hybrid: its authors' value for a trained-from-scratch draft, and the default of other trainers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetRows:
    """The target's distribution at some rows.

    Attributes
    ----------
    logits
        [C, Vd] of the draft's vocabulary.
    p
        [C, Vd] their softmax.
    top, logsum
        [C] the largest of them, and the logarithm of the sum of their exponentials.
    best
        [C] int64: where the largest is, as a draft id.
    negative_entropy
        [C] ``sum p log p``.
    """

    logits: torch.Tensor
    p: torch.Tensor
    top: torch.Tensor
    logsum: torch.Tensor
    best: torch.Tensor
    negative_entropy: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> TargetRows:
        """Return what follows from [C, Vd] logits, float32 or wider."""
        top, best = logits.max(-1)
        p = torch.softmax(logits, -1)
        logsum = top - p.gather(-1, best[:, None])[:, 0].log()
        negative_entropy = torch.linalg.vecdot(p, logits) - logsum
        return cls(logits=logits, p=p, top=top, logsum=logsum, best=best, negative_entropy=negative_entropy)

    def take(self, rows: torch.Tensor | None) -> TargetRows:
        """Return some of the rows; None: all."""
        if rows is None:
            return self
        return TargetRows(
            logits=self.logits[rows],
            p=self.p[rows],
            top=self.top[rows],
            logsum=self.logsum[rows],
            best=self.best[rows],
            negative_entropy=self.negative_entropy[rows],
        )


def row_losses(
    name: LossName, z: torch.Tensor, top: torch.Tensor, best: torch.Tensor, target: TargetRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row, [C], and its gradient with respect to the draft's logits, [C, Vd].

    Parameters
    ----------
    name
        Which loss.
    z
        [C, Vd] the draft's logits, float32 or wider.
    top, best
        [C] the largest logit of each row and where it is.
    target
        Of the same rows.
    """
    q = torch.softmax(z, -1)
    logsum = top - q.gather(-1, best[:, None])[:, 0].log()
    if name == "ce":
        loss = logsum - z.gather(-1, target.best[:, None])[:, 0]
        return loss, q.scatter_add_(-1, target.best[:, None], torch.full_like(loss, -1.0)[:, None])
    if name == "reverse_kl":
        ratio = (z - target.logits).add_((target.logsum - logsum)[:, None])  # log q - log p
        loss = torch.linalg.vecdot(q, ratio)
        return loss, ratio.sub_(loss[:, None]).mul_(q)
    kl = target.negative_entropy - torch.linalg.vecdot(target.p, z) + logsum
    if name == "kl":
        return kl, q.sub_(target.p)
    if name != "lk":
        raise ValueError(f"loss {name!r}; known: kl, ce, reverse_kl, lk")
    accepted = torch.minimum(q, target.p).sum(-1)
    weight = torch.exp(-LK_DECAY * accepted)
    below = (q < target.p).to(q.dtype)
    below = below.sub_(torch.linalg.vecdot(below, q)[:, None]).mul_(q)  # the gradient of the acceptance
    gradient = q.sub_(target.p).mul_(weight[:, None]).sub_(below.mul_((1 - weight)[:, None]))
    return weight * kl + (1 - weight) * (1 - accepted), gradient
