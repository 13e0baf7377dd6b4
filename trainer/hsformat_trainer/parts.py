"""The parts of a run, built in one order: target, vocabulary, draft, optimizers, schedules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hsformat_trainer.config import TrainConfig
from hsformat_trainer.draft import Draft
from hsformat_trainer.gate import Admitted
from hsformat_trainer.optim import build_optimizers
from hsformat_trainer.processes import Processes
from hsformat_trainer.schedule import Schedules
from hsformat_trainer.step import Objective, Stepper
from hsformat_trainer.target_head import TargetHead
from hsformat_trainer.vocabulary import check_coverage, vocabulary_for

__all__ = ["Parts", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes
    ----------
    target
        Frozen, whole in every process.
    draft
        As it is trained; in parts with FSDP2.
    model
        The module around it that is called (:class:`hsformat_trainer.step.Objective`, DDP's or FSDP2's).
    """

    target: TargetHead
    draft: Draft
    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    schedules: Schedules
    stepper: Stepper


def build(config: TrainConfig, admitted: Admitted, processes: Processes, *, total: int) -> Parts:
    """Load the target's part and make the rest; random weights are the same in every process.

    Parameters
    ----------
    total
        Optimizer steps of the run.

    Raises
    ------
    HsError
        A folder of weights cannot be read; HS408: the draft's vocabulary holds no supervised token.
    """
    target = TargetHead.load(admitted.target_folder, admitted.target, dtype=None, device=processes.device)
    vocabulary = vocabulary_for(config, admitted)
    if processes.first:
        print(
            f"vocabulary: {admitted.target.vocab_size} ids, all" if vocabulary is None else vocabulary.line, flush=True
        )
    if vocabulary is not None:
        check_coverage(vocabulary)
    draft = Draft(admitted.spec, vocabulary=vocabulary, target=target, init=config.init or "random")
    draft.float()  # master weights; products are autocast's
    model = processes.prepare(Objective(draft, target, config, processes))
    optimizers = build_optimizers(draft.named_parameters(), config)
    schedules = Schedules(optimizers, kind=config.schedule, warmup=config.warmup, total=total)
    stepper = Stepper(model, optimizers, config=config, layout=admitted.layout, processes=processes)
    return Parts(target=target, draft=draft, model=model, optimizers=optimizers, schedules=schedules, stepper=stepper)
