"""Evaluation inside a run: held-out records shared among the processes, and the scores of all of them put together."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import Any

import torch

from hsformat.problems import InvalidRecord, Problem, problem
from hsformat_trainer.admitted import Admitted
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.data import eval_loader
from hsformat_trainer.evaluate import RecordScore, acceptance_length, evaluate_records, summarize
from hsformat_trainer.parts import Parts
from hsformat_trainer.processes import Processes
from hsformat_trainer.stop import Stop

__all__ = ["Evaluator"]

_SHOWN = 20
"""Most captures of held-out records that are named one by one."""


class Evaluator:
    """Evaluates a draft as it is.

    Parameters
    ----------
    stop
        Ends an evaluation that is under way.
    """

    def __init__(self, config: TrainConfig, admitted: Admitted, processes: Processes, stop: Stop) -> None:
        self._config, self._admitted, self._processes, self._stop = config, admitted, processes, stop

    def __call__(self, parts: Parts, *, most: int | None) -> dict[str, Any] | None:
        """Return the evaluation as JSON-able data; None: nothing is held out, or it was stopped.

        Added are ``compared_length``, the acceptance length over those records alone that every evaluation of the run
        has (``eval_records``), and ``seconds``.

        Parameters
        ----------
        most
            Of so many held-out records; None: of all.

        Raises
        ------
        InvalidRecord
            HS201: states of held-out records are NaN or infinite, in every process with the records of all.
        """
        began = time.monotonic()
        processes, config = self._processes, self._config
        loader = eval_loader(config, self._admitted, rank=processes.rank, world_size=processes.count, most=most)
        if loader is None:
            return None
        batches = iter(loader)
        if len(loader.dataset) < processes.count and not processes.first:
            batches = iter(())  # too few to be shared: the loader gives all of them to each process
        scores: list[RecordScore] = []
        broken: list[Problem] = []
        with torch.no_grad(), processes.autocast(), processes.gathered(parts.model):
            try:
                scores = evaluate_records(
                    parts.draft,
                    parts.target,
                    takewhile(lambda _: not self._stop.asked(), batches),
                    layout=self._admitted.layout,
                    steps=config.steps,
                )
            except InvalidRecord as e:
                broken = e.problems
        if broken := processes.join(broken):  # so that no process waits for one that has ended
            raise InvalidRecord(self._placed(broken))
        scores = processes.join(scores)
        if processes.most(int(self._stop.asked())):
            return None
        found = summarize(scores, steps=config.steps).to_json()
        compared = {"compared_length": acceptance_length(self._compared(scores))}
        return found | compared | {"seconds": time.monotonic() - began}

    def _placed(self, problems: list[Problem]) -> list[Problem]:
        """Return the first problems of records, each with the source that its record is held out of, and a count."""
        out = []
        for p in problems[:_SHOWN]:
            of = [s.name for s in self._admitted.sources if any(s.source.ids[int(r)] == p.record for r in s.held_out)]
            out.append(p.at(f"held out of {' or '.join(of)}"))
        if more := len(problems) - len(out):
            fix = "hsformat validate names every such record"
            got = f"NaN or infinity in {more:,} more captures of held-out records"
            out.append(problem("HS201", where="held-out records", got=got, expected="finite numbers", fix=fix))
        return out

    def _compared(self, scores: list[RecordScore]) -> list[RecordScore]:
        """Return the scores of the records that every evaluation of the run has, by which checkpoints are compared."""
        few = eval_loader(self._config, self._admitted, most=self._config.eval_records)
        kept = frozenset(() if few is None else few.dataset.ids)
        return [s for s in scores if s.id in kept]
