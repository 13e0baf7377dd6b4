"""The run: from what the gate admitted to checkpoints, a log, a table and curves.

``parts`` builds, ``step`` makes one optimizer step, ``checkpoint`` and ``snapshot`` write and read, ``journal`` logs,
``report`` tells at the end; here is only the order of things.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hsformat.cli.output import echo_problems
from hsformat.problems import HsError, Problem, problem
from hsformat.torch import Packed
from hsformat_trainer.admitted import Admitted
from hsformat_trainer.checkpoint import best_of, clear_unfinished, latest, prune, read_state, write_checkpoint
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.curves import MISSING, can_draw, draw_curves
from hsformat_trainer.data import train_loader
from hsformat_trainer.evaluator import Evaluator
from hsformat_trainer.journal import Journal, StepLine, read_journal, writing
from hsformat_trainer.memory import memory_problem
from hsformat_trainer.parts import Parts, build
from hsformat_trainer.processes import Processes
from hsformat_trainer.progress import Show, training_progress
from hsformat_trainer.randomness import seed_all
from hsformat_trainer.report import print_summary
from hsformat_trainer.resume import check_resume
from hsformat_trainer.snapshot import restore, take
from hsformat_trainer.step import Numbers
from hsformat_trainer.stop import Stop
from hsformat_trainer.timer import Spent, Timer

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
    trained
        What the steps of this process took, without evaluations and checkpoints.
    checkpoint
        The newest one; None: nothing was saved.
    best
        The checkpoint of the longest walked acceptance length, over the records of every evaluation; None: nothing is
        held out.
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
    trained: Spent = field(default_factory=Spent)
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
        HS501: ``out`` holds checkpoints and ``resume`` is not asked for; HS410: a tracker or a device is not there, or
        its memory is used up.
    ContractMismatch
        The checkpoint is of other data, another layout, target, vocabulary, of other batches or options.
    InvalidRecord
        HS201: loss or gradient is not finite; the step was not applied, and the last checkpoint stays.
    StoreError
        HS506: a checkpoint, the log or the curves cannot be written; the last checkpoint is whole.
    """
    seed_all(config.seed)
    processes = Processes(config)
    try:
        begun = latest(config.out)
        if begun is not None and not resume:
            got, expected = f"a run with {begun.name}", "a new folder"
            fix = "--resume goes on with it; another --out begins another"
            raise HsError(problem("HS501", where=config.out, got=got, expected=expected, fix=fix))
        with Stop() as stop:
            try:
                return _Run(config, admitted, processes, stop)(begun)
            except (RuntimeError, MemoryError) as e:
                if (used_up := memory_problem(e, config)) is None:
                    raise
                raise HsError(used_up) from e
    except HsError as e:
        if processes.first:
            raise
        echo_problems((p.at(f"process {processes.rank}") for p in e.problems), err=True)
        sys.exit(1)
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
        self.evaluator = Evaluator(config, admitted, processes, stop)
        self.record = admitted.record()  # once: a source that is no store is read for it

    def _steps_of_epochs(self) -> int:
        """Return the optimizer steps of all epochs: the last step of an epoch may have fewer batches."""
        batches = (self.loader.batches_of(epoch) for epoch in range(self.config.epochs))
        return sum(-(-n // self.config.accumulation) for n in batches)

    def __call__(self, begun: Path | None) -> RunResult:
        result, config, writes = self.result, self.config, self.processes.first
        evaluated = begun is not None and self._resume(begun)
        if writes:
            clear_unfinished(config.out)
        self.processes.wait()
        with (
            Journal(config.out, after=result.step, writes=writes) as self.journal,
            training_progress(result.total, done=result.step, shows=writes) as show,
        ):
            result.evaluations = [line for line in read_journal(config.out) if line["kind"] == "evaluation"]
            if not evaluated and (begun is None or self._due(config.eval_every)):
                self._evaluate(most=config.eval_records if begun else None)
            self._steps(show)
        if writes:
            self._report()
        return result

    def _resume(self, folder: Path) -> bool:
        """Put everything back, and return whether the checkpoint was evaluated."""
        state = read_state(folder)
        notes = check_resume(folder, state, config=self.config, record=self.record, loader=self.loader)
        self.result.notes += notes
        if self.processes.first:
            echo_problems(notes)
        restore(folder, state, self.parts.draft, self.parts.optimizers, self.processes)
        self.parts.schedules.go_to(state["step"])
        self.result.step, self.result.tokens = state["step"], state["tokens"]
        self.result.checkpoint = folder
        self.result.best = best_of(self.config.out, score=_score)
        return state.get("evaluation") is not None

    def _due(self, every: int) -> bool:
        """Return whether something that comes every so many steps comes after this one; 0: at the end alone."""
        step = self.result.step
        return step == self.result.total or bool(every and step % every == 0)

    def _steps(self, show: Show) -> None:
        """Make the steps that are left, with what is due between them."""
        result, config = self.result, self.config
        timer = Timer()
        saved, stopped = result.step, self._stopped()
        while result.step < result.total and not stopped:
            epoch, batches = self.loader.epoch, iter(self.loader)
            while result.step < result.total and not stopped:
                timer.begin()
                packed: list[Packed] = list(islice(batches, config.accumulation))
                if not packed:
                    break  # the end of the epoch
                timer.loaded()
                rates = self.parts.schedules.rates()
                numbers = self.parts.stepper(packed)
                del packed
                self.parts.schedules.step()
                result.step += 1
                result.tokens += numbers.tokens
                timer.end(numbers.tokens)
                show(result.step, numbers.loss, timer.speed, timer.wait_share)
                if result.step == 1 or self._due(config.log_every):
                    self._log(numbers, rates, epoch, timer)
                stopped = self._stopped()
                better = False
                if not stopped and self._due(config.eval_every):
                    better = self._evaluate(most=config.eval_records if result.step < result.total else None)
                    stopped = self._stopped()
                if better or stopped or self._due(config.save_every):
                    self._save()
                    saved = result.step
        if stopped and saved != result.step:
            self._save()
        result.trained = timer.whole

    def _stopped(self) -> bool:
        """Return whether any process was asked to stop; all of them give the same answer."""
        number = self.processes.most(int(self.stop.signal or 0))
        if number:
            self.result.interrupted = signal.Signals(number)
        return bool(number)

    def _log(self, numbers: Numbers, rates: dict[str, float], epoch: int, timer: Timer) -> None:
        spent = timer.since_last()
        line = StepLine(
            step=self.result.step,
            epoch=epoch,
            loss=numbers.loss,
            losses=numbers.losses,
            accuracy=numbers.accuracy,
            lr=rates,
            grad_norm=numbers.grad_norm,
            tokens=self.result.tokens,
            tokens_per_second=spent.speed,
            loader_wait=spent.wait_share,
            seconds=spent.seconds,
        )
        self.journal.step(line)
        self.processes.track(line.numbers(), line.step)

    def _evaluate(self, *, most: int | None) -> bool:
        """Evaluate the draft as it is; return whether no checkpoint has been better."""
        result = self.result
        found = self.evaluator(self.parts, most=most)
        if found is None:
            return False
        before = [e["compared_length"] for e in result.evaluations if e["step"] > 0]
        self.journal.evaluation(result.step, found)
        numbers = {k: v for k, v in found.items() if isinstance(v, float)}
        accuracy = {f"accuracy/position_{k + 1}": v for k, v in enumerate(found["accuracy"]) if v is not None}
        self.processes.track({f"evaluation/{k}": v for k, v in (numbers | accuracy).items()}, result.step)
        result.evaluations.append({"kind": "evaluation", "step": result.step, **found})
        return result.step > 0 and all(found["compared_length"] > length for length in before)

    def _save(self) -> None:
        """Write a checkpoint and remove those that are no longer kept."""
        result, config = self.result, self.config
        state, tensors = take(self.parts.draft, self.parts.optimizers, self.processes)
        state |= {
            "config": config.model_dump(mode="json"),
            "admitted": self.record,
            "spec": self.admitted.spec.model_dump(mode="json"),
            "epoch": self.loader.epoch,
            "loader": self.loader.state_dict(),
            "tokens": result.tokens,
            "evaluation": next((e for e in reversed(result.evaluations) if e["step"] == result.step), None),
        }

        def write() -> None:
            write_checkpoint(config.out, result.step, state=state, tensors=tensors)
            prune(config.out, keep=config.keep, score=_score)

        self.processes.once(write)
        result.checkpoint = latest(config.out)
        result.best = best_of(config.out, score=_score)

    def _report(self) -> None:
        """Draw the curves and print the table."""
        lines, out = read_journal(self.config.out), Path(self.config.out)
        told = [f"checkpoint: {self.result.checkpoint}, the best: {self.result.best}"]
        if can_draw():
            with writing(out / "curves.png"):
                draw_curves(lines, out / "curves.png")
            told.append(f"curves: {out / 'curves.png'}, log: {out / 'log.jsonl'}")
        else:
            told.append(MISSING)
        print_summary(lines, self.result.trained, notes=told)


def _score(state: Mapping[str, Any]) -> float | None:
    """Return the walked acceptance length of a checkpoint, over the records that all have; None: not evaluated."""
    evaluation = state.get("evaluation")
    return None if evaluation is None else float(evaluation["compared_length"])
