"""One optimizer step: batches of accumulation in, new weights and the step's numbers out.

How many rows are supervised follows from masks alone, so that the loss is divided by the rows of all batches and all
processes before the first forward. Two processes, or two batches of accumulation, then give loss and gradient of one
batch twice as large (huggingface/transformers#34191 and #34242 tell what happens otherwise).
K: steps of training-time test. B: batches of the step in this process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hsformat.layout import Layout
from hsformat.problems import InvalidRecord, Problem, problem
from hsformat.torch import Packed
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.coverage import Coverage, keeps_coverage
from hsformat_trainer.draft import Draft
from hsformat_trainer.finite import states_not_finite
from hsformat_trainer.objective import ttt_loss
from hsformat_trainer.processes import Processes
from hsformat_trainer.target_head import TargetHead

__all__ = ["Numbers", "Objective", "Stepper"]


class Objective(nn.Module):
    """The draft with its loss, as one module whose forward is a whole batch: what DDP and FSDP2 wrap.

    The target's embedding, norm and head are frozen and the same everywhere: they are no part of it.

    Parameters
    ----------
    draft, target
        As they are trained; ``target`` on the device.
    """

    def __init__(self, draft: Draft, target: TargetHead, config: TrainConfig, processes: Processes) -> None:
        super().__init__()
        self.draft = draft
        self._target = (target,)  # in a tuple, so that it is no submodule
        self._config, self._processes = config, processes
        self._coverage = Coverage(target)

    def forward(self, batch: TrainBatch, normalizer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and [3, K] float64: sums of the loss, hits and rows.

        Parameters
        ----------
        normalizer
            [K] int64: supervised rows of the whole step. Integers, since FSDP2 casts what is floating.
        """
        with self._processes.autocast():
            loss, sums = self._of(batch, normalizer)
        if self._processes.count > 1:
            # DDP waits for the gradient of every parameter from every process, also where nothing is supervised.
            trained = [p.flatten()[:1].sum() for p in self.parameters() if p.requires_grad]
            loss = loss + 0.0 * torch.stack(trained).sum()
        return loss, sums

    def _of(self, batch: TrainBatch, normalizer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not len(batch.steps[0]):  # no row carries loss at any step
            nothing = torch.zeros((), device=normalizer.device)
            return nothing, torch.zeros(3, len(normalizer), dtype=torch.float64, device=normalizer.device)
        config = self._config
        result = ttt_loss(
            self.draft,
            self._target[0],
            batch,
            steps=config.steps,
            decay=config.decay,
            loss=config.loss,
            normalizer=normalizer,
            coverage=self._coverage,
        )
        return result.loss, torch.stack([result.loss_sums, result.hits, result.counted])


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a step gave, over all batches and processes.

    Attributes
    ----------
    loss
        What was minimised.
    losses, accuracy
        [K] mean loss and share of hits of the supervised rows; None where there are none.
    grad_norm
        Before clipping.
    tokens
        Of all batches.
    """

    loss: float
    losses: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    grad_norm: float
    tokens: int


class Stepper:
    """Makes optimizer steps.

    Parameters
    ----------
    model
        An :class:`Objective` as :meth:`Processes.prepare` returned it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        config: TrainConfig,
        layout: Layout,
        processes: Processes,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        if layout.last is None:
            raise ValueError("the layout names no last capture, so that the target's distribution is not known")
        self._last = layout.last
        self._config, self._layout, self._processes = config, layout, processes

    def __call__(self, packed: Sequence[Packed]) -> Numbers:
        """Make one step with the batches of this process.

        A step in which nothing at all is supervised changes no weight.

        Raises
        ------
        InvalidRecord
            HS201: loss or gradient is not finite. The weights are as before the step.
        """
        processes = self._processes
        planned = [self._batch(p) for p in packed]  # on the CPU, where masks are
        counts = torch.stack([b.counts for b in planned]).sum(0)  # [K]
        tokens = torch.tensor([sum(p.num_tokens for p in packed)])
        *rows, tokens_all = processes.sum(torch.cat([counts, tokens])).tolist()
        if not any(rows):
            none: tuple[None, ...] = (None,) * self._config.steps
            return Numbers(loss=0.0, losses=none, accuracy=none, grad_norm=0.0, tokens=int(tokens_all))
        normalizer = torch.tensor(rows, device=processes.device)
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        losses, sums = [], []
        for i, batch in enumerate(planned):
            apart = processes.accumulating(self._model) if i + 1 < len(planned) else nullcontext()
            with apart:
                loss, found = self._model(batch.to(processes.device, non_blocking=True), normalizer)
                processes.backward(loss)
            losses.append(loss.detach().double())
            sums.append(found)
        norm = self._clip()
        own = torch.stack(losses)  # [B]
        whole = processes.sum(torch.cat([own.sum()[None], torch.stack(sums).sum(0).flatten()]))
        (total,), (loss_sums, hits, _) = whole[:1].tolist(), whole[1:].reshape(3, -1).tolist()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._refuse(packed, torch.isfinite(own).tolist(), loss=total, norm=norm)
        for optimizer in self._optimizers.values():
            optimizer.step()
        return Numbers(
            loss=total,
            losses=_means(loss_sums, rows),
            accuracy=_means(hits, rows),
            grad_norm=norm,
            tokens=int(tokens_all),
        )

    def _batch(self, packed: Packed) -> TrainBatch:
        return TrainBatch.from_packed(
            packed,
            aux=self._layout.aux,
            last=self._last,
            steps=self._config.steps,
            rule=self._config.mask_rule,
            hashed=keeps_coverage(self._config),
        )

    def _clip(self) -> float:
        """Clip the gradient and return its norm before that."""
        most = math.inf if self._config.clip is None else self._config.clip
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, most)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _refuse(self, packed: Sequence[Packed], finite: Sequence[bool], *, loss: float, norm: float) -> None:
        """Name the records of the batches whose loss is not finite; of all, where the gradient alone is not."""
        suspects = [p for p, fine in zip(packed, finite, strict=True) if not fine]
        found = self._processes.join([_described(p) for p in suspects])
        if not found:
            found = self._processes.join([_described(p) for p in packed])
        ids = [record_id for batch, _ in found for record_id in batch]
        states = [p for _, problems in found for p in problems]
        got = f"loss {loss}, gradient norm {norm}"
        fix = "extract these records again or leave them out"
        if not states:
            got += "; the states of these records are finite"
            fix = "go on from the last checkpoint with a lower lr or clip (--resume --lr ... --clip ...)"
            if self._config.precision != "fp32":
                fix += ", or begin another run with --precision fp32"
        raise InvalidRecord(
            [
                *states,
                problem(
                    "HS201",
                    where=f"training on the records {', '.join(map(repr, ids))}",
                    got=got,
                    expected="finite numbers",
                    fix=f"the step was not applied: {fix}",
                ),
            ]
        )


def _means(sums: Sequence[float], rows: Sequence[int]) -> tuple[float | None, ...]:
    return tuple(s / n if n else None for s, n in zip(sums, rows, strict=True))


def _described(packed: Packed) -> tuple[list[str], list[Problem]]:
    return list(packed.ids), states_not_finite(packed)
