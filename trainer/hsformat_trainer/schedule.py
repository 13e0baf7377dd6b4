"""The course of the learning rate: Transformers' schedules, one an optimizer.

A rate follows from the number of steps done and of steps in all, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from hsformat_trainer.config import ScheduleName

__all__ = ["Schedules", "warmup_steps"]


def warmup_steps(share: float, total: int) -> int:
    """Return in how many steps the rate rises: the share of all, rounded up; 0 for a share of 0."""
    return math.ceil(share * total)


class Schedules:
    """The schedules of a run's optimizers, stepped together.

    Parameters
    ----------
    optimizers
        By name.
    kind
        ``cosine`` and ``linear`` end at 0, ``constant`` stays; each after the warm-up.
    warmup
        Share of the steps in which the rate rises. The first step is made at 1 / warm-up of it, not at 0, which would
        waste a step.
    total
        Optimizer steps of the whole run.
    """

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], *, kind: ScheduleName, warmup: float, total: int
    ) -> None:
        self.total = total
        rising = warmup_steps(warmup, total)
        self._schedules = {name: self._schedule(o, kind, rising) for name, o in optimizers.items()}

    def _schedule(self, optimizer: torch.optim.Optimizer, kind: ScheduleName, rising: int) -> LambdaLR:
        # Transformers' first and last factors are 0, and a step at a rate of 0 is none: step i takes that of i + 1.
        if kind == "cosine":
            given = get_cosine_schedule_with_warmup(optimizer, rising, self.total + 1)
        elif kind == "linear":
            given = get_linear_schedule_with_warmup(optimizer, rising, self.total + 1)  # type: ignore[no-untyped-call] # it is
        else:
            given = get_constant_schedule_with_warmup(optimizer, rising)
        (factor, *_) = given.lr_lambdas
        return LambdaLR(optimizer, lambda step: factor(step + 1))

    def rates(self) -> dict[str, float]:
        """Return the rate of the next step by optimizer."""
        return {name: float(s.get_last_lr()[0]) for name, s in self._schedules.items()}

    def step(self) -> None:
        """Go on to the rates of the step after the one just made."""
        for schedule in self._schedules.values():
            schedule.step()

    def go_to(self, step: int) -> None:
        """Go on as if so many steps were made with these options; the optimizers' rates are set as well.

        Nothing of an earlier course enters, so that a run that is resumed with another rate has it.
        """
        for schedule in self._schedules.values():
            schedule.last_epoch = step
            rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
            schedule._last_lr = list(rates)
            for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
