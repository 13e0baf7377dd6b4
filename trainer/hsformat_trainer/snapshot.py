"""What a checkpoint holds of a run, taken and put back: weights, optimizers, random states.

Names are the parameters' own, so that nothing depends on the order in which an optimizer has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hsformat.problems import ForeignFileError, Problem, problem
from hsformat_trainer.checkpoint import MODEL, OPTIMIZER, RNG, STATE, instead_of, read_tensors
from hsformat_trainer.finite import weights_not_finite
from hsformat_trainer.processes import Processes
from hsformat_trainer.randomness import load_random_numbers, load_random_tensors, random_states
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
        HS602: a file is damaged, or holds other parameters than the run has. HS408: another draft vocabulary. HS201: a
        weight, or what an optimizer holds of one, is not finite.
    """
    weights, moments, random = (read_tensors(folder, name) for name in (MODEL, OPTIMIZER, RNG))
    instead = instead_of(folder)
    parameters = dict(draft.named_parameters())
    found = list(_unlike(folder / MODEL, draft.state_dict(), weights, instead))
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
    for optimizer, o in optimizers.items():
        own = {key.removeprefix(f"{optimizer}/"): v for key, v in moments.items() if key.startswith(f"{optimizer}/")}
        found += _moment_problems(f"{folder / OPTIMIZER}: {optimizer}", own, _parameters(o, parameters), instead)
    if stray := sorted(key for key in moments if key.partition("/")[0] not in optimizers):
        expected = f"optimizers of this run: {', '.join(optimizers)}"
        found.append(problem("HS602", where=str(folder / OPTIMIZER), got=stray[:3], expected=expected, fix=instead))
    for name, tensors in ((MODEL, weights), (OPTIMIZER, moments)):
        found += weights_not_finite(tensors.items(), where=str(folder / name), fix=instead)
    states, rank = state["random"], processes.rank
    if len(states) != processes.count:
        where, expected = f"{folder / STATE}: random", f"states of {processes.count} process(es)"
        found.append(problem("HS602", where=where, got=len(states), expected=expected, fix=instead))
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
        for name, p in _parameters(o, parameters).items():
            if values := by_parameter.get(f"{optimizer}/{name}"):
                o.state[p] = {w: placed(v, p) for w, v in values.items()}
    with _told(f"{folder / STATE}: random[{rank}]", instead):
        load_random_numbers(states[rank])
    with _told(f"{folder / RNG}: {rank}", instead):
        load_random_tensors({k.partition("/")[2]: t for k, t in random.items() if k.startswith(f"{rank}/")})


@contextmanager
def _told(where: str, fix: str) -> Iterator[None]:
    try:
        yield
    except ValueError as e:
        expected = "a state of this generator, as hsformat train writes it"
        raise ForeignFileError(problem("HS602", where=where, got=e, expected=expected, fix=fix)) from e


def _parameters(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return those of an optimizer, by name."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in parameters.items() if id(p) in held}


def _moment_problems(
    where: str, moments: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter], fix: str
) -> Iterator[Problem]:
    """Yield HS602 for what an optimizer cannot have held: ``moments`` by ``<parameter>/<what>``.

    It holds the same of each of its parameters, each a scalar or of the parameter's shape; or nothing of any.
    """
    whats = sorted({key.rpartition("/")[2] for key in moments})
    for key in sorted({*moments, *(f"{name}/{what}" for name in parameters for what in whats)}):
        name, _, _ = key.rpartition("/")
        expected: object = "nothing: no parameter that this optimizer trains"
        if name in parameters:
            expected = f"floats of {tuple(parameters[name].shape)}, or one number"
        got = moments.get(key)
        if got is None or name not in parameters:
            told: object = "nothing" if got is None else tuple(got.shape)
        elif got.is_floating_point() and tuple(got.shape) in ((), tuple(parameters[name].shape)):
            continue
        else:
            told = f"{got.dtype} of {tuple(got.shape)}"
        yield problem("HS602", where=f"{where}/{key}", got=told, expected=expected, fix=fix)


def _unlike(
    path: Path, wanted: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], fix: str
) -> Iterator[Problem]:
    """Yield HS602 for each weight that is missing, unknown, or of another shape or type."""
    for name in sorted({*wanted, *got}):
        there, here = (_kind(tensors[name]) if name in tensors else "no such weight" for tensors in (wanted, got))
        if there != here:
            yield problem("HS602", where=f"{path}: {name}", got=here, expected=there, fix=fix)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
