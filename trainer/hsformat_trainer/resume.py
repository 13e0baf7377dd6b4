"""Whether a run may go on from a checkpoint: with what was begun, or not at all.

What decides which number comes next in the same sense (data, layout, target, vocabulary, batches, the draft, the objective, the
optimizer) is refused if it differs. What a user changes on purpose when a run goes on (rates, length of the run, how often
something is written) is allowed, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsformat.problems import ContractMismatch, Problem, Severity, problem
from hsformat.torch import RecordLoader

from hsformat_trainer.config import TrainConfig
from hsformat_trainer.gate import Admitted

__all__ = ["check_resume", "load_loader"]

_FREE = frozenset(
    {
        "epochs",
        "max_steps",
        "lr",
        "muon_lr",
        "weight_decay",
        "beta1",
        "beta2",
        "schedule",
        "warmup",
        "clip",
        "device",
        "workers",
        "save_every",
        "keep",
        "eval_every",
        "eval_records",
        "log_every",
        "trackers",
        "project",
        "out",
    }
)
"""Options that may change. What a store, a target or an engine is named may change too: their digests are compared."""

_BY_CONTENT = frozenset({"stores", "target", "serve", "engine_profile", "held_out", "init", "draft_config"})


def check_resume(folder: Path, state: Mapping[str, Any], config: TrainConfig, admitted: Admitted) -> list[Problem]:
    """Return notes about options that changed and may.

    Raises
    ------
    ContractMismatch
        One problem a difference: what was admitted, or HS507 for options that must not change.
    """
    found = admitted.differences(state["admitted"])
    errors = [p for p in found if p.severity is Severity.ERROR]
    notes = [p for p in found if p.severity is not Severity.ERROR]
    before, now = state["config"], config.model_dump(mode="json")
    for name in sorted(now.keys() | before.keys()):
        if before.get(name) == now.get(name) or name in _BY_CONTENT:
            continue
        changed = problem(
            "HS507",
            where=f"{folder}: {name}",
            got=now.get(name),
            expected=before.get(name),
            fix="resume with the options that the run was begun with, or begin another in another --out",
            severity=Severity.NOTE if name in _FREE else Severity.ERROR,
        )
        (notes if name in _FREE else errors).append(changed)
    if errors:
        raise ContractMismatch(errors)
    return notes


def load_loader(folder: Path, state: Mapping[str, Any], loader: RecordLoader) -> None:
    """Let a loader go on where the checkpoint was.

    Raises
    ------
    ContractMismatch
        HS507: it would give other batches; the loader's own words say why.
    """
    try:
        loader.load_state_dict(state["loader"])
    except ValueError as e:
        expected = "the batches that the run was begun with"
        fix = "resume with the same records, batch_tokens, seed and number of processes, or begin another run"
        raise ContractMismatch(
            problem("HS507", where=f"{folder}: loader", got=e, expected=expected, fix=fix)
        ) from e
