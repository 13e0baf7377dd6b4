"""The objective of training-time test over a packed batch, in chunks: no logits are kept, whatever their number.

The draft runs all K steps first: what is fed in are the record's own tokens, so that no step waits for logits. Then the
states whose distributions are asked for are taken a chunk at a time: the target's logits once, and from them the loss
of every step's rows, with its gradient for the draft's outputs (and the head), which is all that the backward pass
needs.

Shapes: K steps, P states, C of a chunk, s rows of a step, Vd draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.coverage import Coverage, argmax_of, outside_logits
from hsformat_trainer.draft import Draft
from hsformat_trainer.losses import LossName, TargetRows, row_losses
from hsformat_trainer.precision import head_product, product_dtype, products
from hsformat_trainer.target_head import TargetHead

__all__ = ["CHUNK_ELEMENTS", "Predictions", "StepResult", "predictions", "ttt_loss"]

CHUNK_ELEMENTS = 2**22
"""Most logits of a chunk over the draft's vocabulary (16 MiB in float32), of at least 64 states."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a batch gives.

    Attributes
    ----------
    loss
        Scalar: the sum over steps of ``decay ** k`` times the sum of row losses by the normalizer.
    loss_sums, hits, counted, covered
        [K] float64, detached, on the batch's device. Sums of row losses before any weight; rows whose argmax is the
        target's over its whole vocabulary; rows that carry loss or would, were their target in the draft's vocabulary;
        those for which it is.
    """

    loss: torch.Tensor
    loss_sums: torch.Tensor
    hits: torch.Tensor
    counted: torch.Tensor
    covered: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """What the draft says, a step and supervised row, as [s] tensors in the order of the batch's rows.

    Attributes
    ----------
    drafted
        The target id of the draft's argmax.
    expected
        The target's argmax over its whole vocabulary.
    covered
        Whether that is in the draft's vocabulary.
    accepted
        ``sum min(p, q)`` over the target's vocabulary: how likely sampling accepts what the draft samples; None at
        temperature 0.
    """

    drafted: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor, ...]
    covered: tuple[torch.Tensor, ...]
    accepted: tuple[torch.Tensor, ...] | None


def ttt_loss(
    draft: Draft,
    target: TargetHead,
    batch: TrainBatch,
    *,
    steps: int,
    decay: float,
    loss: LossName,
    normalizer: torch.Tensor | None = None,
    coverage: Coverage | None = None,
) -> StepResult:
    """Return the loss of a batch and its counts.

    Parameters
    ----------
    steps
        K; that of the batch.
    decay
        Weight of step k: ``decay ** k``.
    loss
        Of a row.
    normalizer
        [K] what the sum of a step is divided by; None: the batch's own counts. A step of 0 contributes nothing.
    coverage
        Of this target and the draft's vocabulary: what it knows is not computed again. None: nothing is kept.

    Raises
    ------
    ValueError
        The batch was planned for another number of steps.
    """
    if steps != len(batch.steps):
        raise ValueError(f"the batch is planned for {len(batch.steps)} steps, not {steps}")
    device = batch.last.device
    with products(device):
        outputs = draft(batch, target)
        counts = (batch.counts if normalizer is None else normalizer).to(device, torch.float64)
        weights = decay ** torch.arange(steps, device=device, dtype=torch.float64)
        weights = torch.where(counts > 0, weights / counts.clamp(min=1e-30), torch.zeros_like(weights))
        known = None
        if coverage is not None:
            known = coverage.of(batch, draft.target_ids, product_dtype(device, outputs[0].dtype))
        what = (draft, target, batch, loss, weights, known)
        total, *sums = _ChunkedLoss.apply(what, draft.lm_head.weight, *outputs)  # type: ignore[no-untyped-call] # torch's
    loss_sums, hits, covered = sums
    counted = batch.counts.to(device, torch.float64)
    return StepResult(loss=total, loss_sums=loss_sums, hits=hits, counted=counted, covered=covered)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        what: tuple[Draft, TargetHead, TrainBatch, LossName, torch.Tensor, torch.Tensor | None],
        head: torch.Tensor,
        *outputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        draft, target, batch, name, weights, known = what
        dtype = product_dtype(head.device, outputs[0].dtype)
        weight_VH = draft.head_for(dtype)
        wanted = any(o.requires_grad for o in outputs)
        gradients = [torch.zeros_like(o) for o in outputs] if wanted else []
        head_gradient = torch.zeros_like(head) if head.requires_grad else None
        sums = torch.zeros((3, len(outputs)), dtype=torch.float64, device=head.device)
        step_weights = weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
        with torch.no_grad():
            for chunk in _chunks(draft, target, batch, dtype, known=known):
                for k, (rows, at) in enumerate(chunk.steps):
                    if rows.start == rows.stop:
                        continue
                    out = outputs[k][rows].to(dtype)
                    z = _wide(head_product(out, weight_VH))
                    top, best = z.max(-1)
                    inside = chunk.inside if at is None else chunk.inside[at]
                    mine = chunk.target.take(at)
                    losses, gradient = row_losses(name, z, top, best, mine)
                    losses = torch.where(inside, losses, torch.zeros_like(losses))
                    sums[0, k] += losses.sum(dtype=torch.float64)
                    sums[1, k] += (inside & (best == mine.best)).sum()
                    sums[2, k] += inside.sum()
                    if not wanted and head_gradient is None:
                        continue
                    # A row's weight is applied to its H numbers, not to its Vd logits.
                    factor = (inside.to(gradient.dtype) * step_weights[k])[:, None]
                    gradient = gradient.to(dtype)
                    if wanted:
                        gradients[k][rows] = ((gradient @ weight_VH) * factor).to(gradients[k].dtype)
                    if head_gradient is not None:
                        head_gradient += gradient.T @ (out * factor).to(dtype)
        ctx.save_for_backward(*gradients)
        ctx.head_gradient = head_gradient
        loss = (sums[0] * weights).sum().to(_wide_dtype(outputs[0].dtype))
        parts = sums.unbind(0)
        ctx.mark_non_differentiable(*parts)
        return (loss, *parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        head = None if ctx.head_gradient is None else ctx.head_gradient * grad
        return (None, head, *(g * grad.to(g.dtype) for g in ctx.saved_tensors))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """Some states.

    Attributes
    ----------
    target
        The target's rows over the draft's vocabulary.
    inside, expected
        [C] whether the target's argmax is in the draft's vocabulary; the argmax as a target id.
    outside_logsum
        [C] logarithm of the sum of the exponentials of all other logits, at the temperature that was asked for.
    steps
        A step: a slice of its supervised rows, and where in the chunk their states are (None: one each, in order).
    """

    target: TargetRows
    inside: torch.Tensor
    expected: torch.Tensor
    outside_logsum: torch.Tensor | None
    steps: tuple[tuple[slice, torch.Tensor | None], ...]


def _chunks(
    draft: Draft,
    target: TargetHead,
    batch: TrainBatch,
    dtype: torch.dtype,
    *,
    temperature: float = 0.0,
    known: torch.Tensor | None = None,
) -> Iterator[_Chunk]:
    """Yield the states in order, the target's logits computed once; above temperature 0 with ``outside_logsum``.

    Parameters
    ----------
    known
        [P] ``inside`` of all states: what is outside the draft's vocabulary is not computed, and ``expected`` is right
        where that is true alone.
    """
    split = target.split(draft.target_ids, dtype)
    states = batch.distributions
    size = max(64, CHUNK_ELEMENTS // draft.spec.draft_vocab_size)
    firsts = range(0, len(states), size)
    bounds = [np.searchsorted(s.host, [*firsts, len(states)]).tolist() for s in batch.steps]
    for c, first in enumerate(firsts):
        last = batch.last[states[first : first + size]]
        hidden = (last if batch.last_normed else target.final_norm(last)).to(dtype)
        rows = TargetRows.of(target.shaped(head_product(hidden, split.inside), split.inside_bias))
        expected, is_inside = split.inside_ids[rows.best], torch.ones_like(rows.best, dtype=torch.bool)
        logsum = None
        if known is not None:
            is_inside = known[first : first + size]
        elif len(split.outside_ids):
            top, other, logsum = outside_logits(target, split, hidden, temperature)
            expected, is_inside = argmax_of(rows.top, rows.best, split, top, other)
        steps = []
        for k, s in enumerate(batch.steps):
            mine = slice(bounds[k][c], bounds[k][c + 1])
            whole = mine.stop - mine.start == len(last)
            steps.append((mine, None if whole else s.distribution[mine] - first))
        yield _Chunk(target=rows, inside=is_inside, expected=expected, outside_logsum=logsum, steps=tuple(steps))


@torch.no_grad()
def predictions(
    draft: Draft, target: TargetHead, batch: TrainBatch, *, steps: int, temperature: float = 0.0
) -> Predictions:
    """Return what draft and target say at every supervised row of every step.

    Parameters
    ----------
    temperature
        Above 0: that of both distributions, for ``accepted``.

    Raises
    ------
    ValueError
        The batch was planned for another number of steps.
    """
    if steps != len(batch.steps):
        raise ValueError(f"the batch is planned for {len(batch.steps)} steps, not {steps}")
    with products(batch.last.device):
        outputs = draft(batch, target)
        dtype = product_dtype(batch.last.device, outputs[0].dtype)
        weight_VH = draft.head_for(dtype)
        drafted, expected, covered, accepted = ([torch.empty(0)] * steps for _ in range(4))
        for k, out in enumerate(outputs):
            drafted[k], expected[k] = torch.zeros((2, len(out)), dtype=torch.int64, device=out.device)
            covered[k] = torch.zeros(len(out), dtype=torch.bool, device=out.device)
            accepted[k] = torch.zeros(len(out), device=out.device)
        for chunk in _chunks(draft, target, batch, dtype, temperature=temperature):
            p = None if temperature == 0 else _sampled(chunk, temperature)
            for k, (rows, at) in enumerate(chunk.steps):
                z = _wide(head_product(outputs[k][rows].to(dtype), weight_VH))
                some = slice(None) if at is None else at
                drafted[k][rows] = draft.to_target(z.max(-1).indices) if len(z) else drafted[k][rows]
                expected[k][rows] = chunk.expected[some]
                covered[k][rows] = chunk.inside[some]
                if p is not None:
                    q = torch.softmax(z / temperature, -1)
                    accepted[k][rows] = torch.minimum(p[some], q).sum(-1).to(accepted[k].dtype)
    return Predictions(
        drafted=tuple(drafted),
        expected=tuple(expected),
        covered=tuple(covered),
        accepted=tuple(accepted) if temperature else None,
    )


def _sampled(chunk: _Chunk, temperature: float) -> torch.Tensor:
    """Return the target's probabilities of the draft's vocabulary, [C, Vd], out of those of its whole vocabulary."""
    logits = chunk.target.logits / temperature
    logsum = torch.logsumexp(logits, -1)
    if chunk.outside_logsum is not None:
        logsum = torch.logaddexp(logsum, chunk.outside_logsum)
    return logits.sub_(logsum[:, None]).exp_()


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_wide_dtype(x.dtype))
