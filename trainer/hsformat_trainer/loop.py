"""The run: from what the gate admitted to checkpoints, a log, a table and curves.

``parts`` builds, ``step`` makes one optimizer step, ``checkpoint`` and ``snapshot`` write and read, ``journal`` logs,
``report`` tells at the end; here is only the order of things.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hsformat.problems import HsError, Problem, problem
from hsformat.torch import Packed

from hsformat_trainer.checkpoint import checkpoints, clear_unfinished, latest, prune, read_state, write_checkpoint
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.curves import MISSING, can_draw, draw_curves
from hsformat_trainer.data import train_loader
from hsformat_trainer.gate import Admitted
from hsformat_trainer.held_out import HeldOut
from hsformat_trainer.journal import Journal, StepLine, read_journal
from hsformat_trainer.parts import Parts, build
from hsformat_trainer.processes import Processes
from hsformat_trainer.progress import Show, training_progress
from hsformat_trainer.randomness import seed_all
from hsformat_trainer.report import print_summary
from hsformat_trainer.resume import check_resume, load_loader
from hsformat_trainer.snapshot import restore, take
from hsformat_trainer.step import Numbers
from hsformat_trainer.stop import Stop

__all__ = ["RunResult", "train"]


@dataclass(kw_only=True)
class RunResult:
    """What a run did.

    Attributes
    ----------
    step, total
        Optimizer steps made, those before it was resumed included, and those of the whole run.
    tokens
        Trained on, over all processes, by the whole run.
    seconds, waited
        Wall time of the steps that this process made, without evaluations and checkpoints; how much of it the first
        process waited for the loader.
    checkpoint
        The newest one; None: nothing was saved.
    best
        The checkpoint of the longest walked acceptance length; None: nothing is held out.
    evaluations
        Each with its step, as in the log; the first is from before the first step.
    interrupted
        The signal that ended the run, or None.
    notes
        Problems that are no errors.
    """

    step: int = 0
    total: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    checkpoint: Path | None = None
    best: Path | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    interrupted: signal.Signals | None = None
    notes: list[Problem] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number after an interruption, otherwise 0."""
        return 0 if self.interrupted is None else 128 + int(self.interrupted)


def train(config: TrainConfig, admitted: Admitted, *, resume: bool = False) -> RunResult:
    """Train a draft.

    SIGINT or SIGTERM ends the run after the step in hand, with a checkpoint; a second one, later, ends it at once.

    Parameters
    ----------
    admitted
        Of the same configuration.
    resume
        Go on from the newest checkpoint in ``config.out``; from the start, if there is none.

    Raises
    ------
    HsError
        HS501: ``out`` holds checkpoints and ``resume`` is not asked for; HS410: a tracker or a device is not there.
    ContractMismatch
        The checkpoint is of other data, another layout, target, vocabulary, of other batches or options.
    InvalidRecord
        HS201: loss or gradient is not finite; the step was not applied, and the last checkpoint stays.
    StoreError
        HS506: a checkpoint cannot be written; the one before it is whole.
    """
    begun = latest(config.out)
    if begun is not None and not resume:
        got, expected = f"a run with {begun.name}", "a new folder"
        fix = "--resume goes on with it; another --out begins another"
        raise HsError(problem("HS501", where=config.out, got=got, expected=expected, fix=fix))
    seed_all(config.seed)
    processes = Processes(config)
    try:
        with Stop() as stop:
            return _Run(config, admitted, processes, stop)(begun)
    except HsError:
        if processes.first:
            raise
        sys.exit(1)  # the first process says why
    finally:
        processes.close()


class _Run:
    """The state of one run."""

    def __init__(self, config: TrainConfig, admitted: Admitted, processes: Processes, stop: Stop) -> None:
        self.config, self.admitted, self.processes, self.stop = config, admitted, processes, stop
        self.result = RunResult(notes=list(admitted.notes))
        self.loader = train_loader(config, admitted, rank=processes.rank, world_size=processes.count)
        self.result.total = config.max_steps or self._steps_of_epochs()
        self.parts: Parts = build(config, admitted, processes, total=self.result.total)
        self.held_out = HeldOut(config, admitted, processes)

    def _steps_of_epochs(self) -> int:
        """Return the optimizer steps of all epochs: the last step of an epoch may have fewer batches."""
        steps = 0
        for epoch in range(self.config.epochs):
            self.loader.set_epoch(epoch)
            steps += -(-len(self.loader) // self.config.accumulation)
        self.loader.set_epoch(0)
        return steps

    def __call__(self, begun: Path | None) -> RunResult:
        result = self.result
        if begun is not None:
            self._resume(begun)
        if self.processes.first:
            clear_unfinished(self.config.out)
        self.processes.wait()
        writes = self.processes.first
        with (
            Journal(self.config.out, after=result.step, writes=writes) as self.journal,
            training_progress(result.total, done=result.step, shows=writes) as show,
        ):
            result.evaluations = [x for x in read_journal(self.config.out) if x["kind"] == "evaluation"]
            if begun is None:
                self._evaluate(most=None)
            self._steps(show)
        if writes:
            if can_draw():
                draw_curves(read_journal(self.config.out), Path(self.config.out) / "curves.png")
            else:
                print(MISSING, file=sys.stderr)
            print_summary(result, read_journal(self.config.out))
        return result

    def _resume(self, folder: Path) -> None:
        state = read_state(folder)
        self.result.notes += check_resume(folder, state, self.config, self.admitted)
        load_loader(folder, state, self.loader)
        restore(folder, state, self.parts.draft, self.parts.optimizers, self.processes)
        self.parts.schedules.load_state_dict(state["schedule"])
        self.result.step, self.result.tokens = state["step"], state["tokens"]
        self.result.checkpoint = folder

    def _steps(self, show: Show) -> None:
        """Make the steps that are left, with what is due between them."""
        result, config = self.result, self.config
        timer = _Timer()
        saved = result.step
        interrupted = self._interrupted()
        while result.step < result.total and not interrupted:
            epoch = self.loader.epoch
            batches = iter(self.loader)
            while result.step < result.total and not interrupted:
                began = time.monotonic()
                packed: list[Packed] = list(islice(batches, config.accumulation))
                waited = time.monotonic() - began
                if not packed:
                    break  # the end of the epoch
                rates = self.parts.schedules.rates()
                numbers = self.parts.stepper(packed)
                del packed
                self.parts.schedules.step()
                result.step += 1
                result.tokens += numbers.tokens
                timer.add(time.monotonic() - began, waited, numbers.tokens)
                result.seconds, result.waited = timer.seconds, timer.waited
                show(result.step, numbers.loss, timer.speed, timer.wait_share)
                last = result.step == result.total
                if result.step % config.log_every == 0 or result.step == 1 or last:
                    self._log(numbers, rates, epoch, timer)
                interrupted = self._interrupted()
                if interrupted:
                    break
                evaluated = last or (config.eval_every and result.step % config.eval_every == 0)
                best = self._evaluate(most=None if last else config.eval_records) if evaluated else False
                interrupted = self._interrupted()
                if best or last or (config.save_every and result.step % config.save_every == 0):
                    self._save()
                    saved = result.step
        if interrupted and saved != result.step:
            self._save()

    def _interrupted(self) -> bool:
        """Return whether any process was asked to stop; all of them give the same answer."""
        number = self.processes.most(int(self.stop.signal or 0))
        if number:
            self.result.interrupted = signal.Signals(number)
        return bool(number)

    def _log(self, numbers: Numbers, rates: dict[str, float], epoch: int, timer: _Timer) -> None:
        line = StepLine(
            step=self.result.step,
            epoch=epoch,
            loss=numbers.loss,
            losses=numbers.losses,
            accuracy=numbers.accuracy,
            lr=rates,
            grad_norm=numbers.grad_norm,
            tokens=self.result.tokens,
            **timer.since(),
        )
        self.journal.step(line)
        self.processes.track(line.numbers(), line.step)

    def _evaluate(self, *, most: int | None) -> bool:
        """Evaluate the draft as it is; return whether it is better than it ever was after a step."""
        ...
        raise NotImplementedError

    def _save(self) -> None:
        """Write a checkpoint and remove those that are no longer kept."""
        result, config = self.result, self.config
        state, tensors = take(self.parts.draft, self.parts.optimizers, self.processes)
        state |= {
            "config": config.model_dump(mode="json"),
            "admitted": self.admitted.record(),
            "spec": self.admitted.spec.model_dump(mode="json"),
            "epoch": self.loader.epoch,
            "loader": self.loader.state_dict(),
            "schedule": self.parts.schedules.state_dict(),
            "tokens": result.tokens,
            "evaluation": next((e for e in reversed(result.evaluations) if e["step"] == result.step), None),
        }
        self.processes.once(lambda: self._write(state, tensors))
        result.checkpoint = latest(config.out)
