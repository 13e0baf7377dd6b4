"""Whether a run may go on from a checkpoint: with what was begun, or not at all.

What decides the meaning of the next number (data, layout, target, vocabulary, batches, the draft, the objective, the
optimizer) is refused if it differs. What a user changes on purpose when a run goes on (rates, length of the run) is
allowed and reported; how often something is written is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsformat.problems import ContractMismatch, ForeignFileError, Problem, Severity, problem
from hsformat_trainer.admitted import differences
from hsformat_trainer.checkpoint import STATE, instead_of
from hsformat_trainer.checkpoint_state import ResumedState, parse_state
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.mixture import MixedLoader

__all__ = ["check_resume"]

_FIXED = ("steps", "decay", "loss", "mask_rule", "accumulation", "optimizer", "precision", "seed")
"""Options that must not change. Data, target, layout, engines, draft are compared by content, batches by the loader."""

_FREE = ("epochs", "max_steps", "lr", "muon_lr", "weight_decay", "beta1", "beta2", "schedule", "warmup", "clip")
"""Options that may change, and change what the uninterrupted run would have been."""

_AS_BEGUN = "resume with the options that the run was begun with, or begin another in another --out"
_NOTHING = "nothing: this option may change when a run goes on"


def check_resume(
    folder: Path, state: Mapping[str, Any], *, config: TrainConfig, record: Mapping[str, Any], loader: MixedLoader
) -> list[Problem]:
    """Let the loader go on where the checkpoint was, and return notes about options that changed and may.

    Parameters
    ----------
    record
        :meth:`hsformat_trainer.admitted.Admitted.record` of this run.

    Raises
    ------
    ContractMismatch
        One problem a difference: what was admitted; HS507 for options that must not change, and for other batches.
    ForeignFileError
        HS602: a part of the state is damaged, or two of them contradict each other.
    """
    file, instead = str(folder / STATE), instead_of(folder)
    parsed, damage = parse_state(ResumedState, state, where=file, fix=instead)
    if parsed is None:
        raise ForeignFileError(damage)
    found = differences(record, state["admitted"])
    before, now = state["config"], config.model_dump(mode="json")
    for names, severity in ((_FIXED, Severity.ERROR), (_FREE, Severity.NOTE)):
        found += [
            problem(
                "HS507",
                where=f"{folder}: {name}",
                got=now[name],
                expected=f"{before.get(name)}, as the run had",
                fix=_AS_BEGUN if severity is Severity.ERROR else _NOTHING,
                severity=severity,
            )
            for name in names
            if now[name] != before.get(name)
        ]
    begun, taken = {**state["loader"], "batches": 0}, parsed.loader.batches
    try:
        loader.load_state_dict(begun)  # whether the batches are the same; then how many of them are behind
    except ValueError as e:
        expected = "the batches that the run was begun with"
        fix = "resume with the same records, batch_tokens, seed and number of processes, or begin another run"
        found.append(problem("HS507", where=f"{folder}: loader", got=e, expected=expected, fix=fix))
    else:
        if taken > (most := len(loader)):
            expected = f"at most {most}, the batches of the epoch"
            found.append(problem("HS602", where=f"{file}: loader.batches", got=taken, expected=expected, fix=instead))
        else:
            loader.load_state_dict(state["loader"])
    errors = [p for p in found if p.severity is Severity.ERROR]
    if errors:
        raise ContractMismatch(errors)
    return found
