"""What a checkpoint holds of a run, taken and put back: weights, optimizers, random states.

Names are the parameters' own, so that nothing depends on the order in which an optimizer has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hsformat.problems import ForeignFileError, Problem, problem
from hsformat_trainer.checkpoint import MODEL, OPTIMIZER, RNG, read_tensors
from hsformat_trainer.processes import Processes
from hsformat_trainer.randomness import load_random_states, random_states
from hsformat_trainer.sharding import placed, whole

__all__ = ["restore", "take"]

Optimizers = Mapping[str, torch.optim.Optimizer]


def take(
    draft: nn.Module, optimizers: Optimizers, processes: Processes
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the random states that are JSON-able, by process, and the tensors by file name.

    Every process asks for it; what it returns is for the first.
    """
    weights = {name: whole(tensor) for name, tensor in draft.state_dict().items()}
    names = {id(p): name for name, p in draft.named_parameters()}
    moments = {
        f"{optimizer}/{names[id(p)]}/{what}": whole(value)
        for optimizer, o in optimizers.items()
        for p, state in o.state.items()
        for what, value in state.items()
    }
    numbers, tensors = random_states()
    joined = processes.join([(numbers, tensors)])
    random = {f"{rank}/{device}": state for rank, (_, states) in enumerate(joined) for device, state in states.items()}
    return {"random": [n for n, _ in joined]}, {MODEL: weights, OPTIMIZER: moments, RNG: random}


def restore(
    folder: Path, state: Mapping[str, Any], draft: nn.Module, optimizers: Optimizers, processes: Processes
) -> None:
    """Put a checkpoint's weights, optimizer and random states back.

    Raises
    ------
    ForeignFileError
        HS602: a file is damaged, or holds other parameters than the run has. HS408: another draft vocabulary.
    """
    weights, moments, random = (read_tensors(folder, name) for name in (MODEL, OPTIMIZER, RNG))
    parameters = dict(draft.named_parameters())
    found = _unlike(folder / MODEL, {n: t.shape for n, t in draft.state_dict().items()}, weights)
    found += [
        problem(
            "HS408",
            where=f"{folder / MODEL}: {name}",
            got="another map than the data gives now",
            expected="the draft vocabulary that the run was begun with",
            fix="resume with the data that the run was begun with",
        )
        for name, buffer in draft.named_buffers()
        if not found and name in weights and not torch.equal(buffer.cpu(), weights[name])
    ]
    trained = {f"{o}/{n}" for o, opt in optimizers.items() for n in _names(opt, parameters)}
    if stray := sorted({key.rpartition("/")[0] for key in moments} - trained):
        expected, fix = "parameters that this run trains", "resume with the optimizer that it was begun with"
        found.append(problem("HS602", where=str(folder / OPTIMIZER), got=stray[:3], expected=expected, fix=fix))
    if found:
        raise ForeignFileError(found)
    with torch.no_grad():
        for name, tensor in draft.state_dict().items():
            tensor.copy_(placed(weights[name], tensor))
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in moments.items():
        owner, _, what = key.rpartition("/")
        by_parameter.setdefault(owner, {})[what] = value
    for optimizer, o in optimizers.items():
        o.state.clear()
        for name in _names(o, parameters):
            if values := by_parameter.get(f"{optimizer}/{name}"):
                o.state[parameters[name]] = {w: placed(v, parameters[name]) for w, v in values.items()}
    own = {key.partition("/")[2]: t for key, t in random.items() if key.startswith(f"{processes.rank}/")}
    load_random_states(state["random"][processes.rank], own)


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in parameters.items() if id(p) in held]


def _unlike(path: Path, wanted: Mapping[str, torch.Size], got: Mapping[str, torch.Tensor]) -> list[Problem]:
    shapes = {name: tuple(t.shape) for name, t in got.items()}
    differ = sorted(n for n in wanted.keys() | shapes.keys() if tuple(wanted.get(n, ())) != shapes.get(n))
    return [
        problem(
            "HS602",
            where=f"{path}: {name}",
            got=shapes.get(name, "nothing"),
            expected=tuple(wanted[name]) if name in wanted else "no such weight",
            fix="resume with the draft that it was begun with",
        )
        for name in differ
    ]
