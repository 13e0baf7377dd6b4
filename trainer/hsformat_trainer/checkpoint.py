"""Checkpoints: whole or not there, and nothing in them is ever executed.

::

    OUT/checkpoints/step-120/model.safetensors      the draft, under the names in which it is served, float32
                             optimizer.safetensors  <optimizer>/<parameter>/<what> of every parameter
                             rng.safetensors        torch's random states, by process
                             state.json             step, configuration, what was admitted, loader,
                                                    Python's and NumPy's random states, the evaluation at this step

A checkpoint is written to a hidden folder beside it, flushed, and renamed: a kill at any time leaves the last whole
one. One that is no longer kept is renamed before it is removed. Importing this module brings no torch, so that a
command can look at a checkpoint before it loads any library.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hsformat.problems import ForeignFileError, Problem, Severity, StoreError, problem
from hsformat.strict_json import parse_json
from hsformat_trainer.checkpoint_state import Evaluated, model_problems
from hsformat_trainer.tensor_files import write_tensors

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMAT",
    "MODEL",
    "OPTIMIZER",
    "RNG",
    "STATE",
    "Score",
    "best_of",
    "checkpoints",
    "clear_unfinished",
    "folder_of",
    "instead_of",
    "latest",
    "prune",
    "read_state",
    "read_tensors",
    "step_of",
    "write_checkpoint",
]

Score = Callable[[Mapping[str, Any]], float | None]
"""What a checkpoint is worth, from its state; the highest is the best, None has none."""

FORMAT = 1
"""Version of the folder; a reader refuses another."""

MODEL, OPTIMIZER, RNG, STATE = "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"

_PARTS: dict[str, type] = {
    "step": int, "tokens": int, "config": dict, "admitted": dict, "spec": dict, "loader": dict, "random": list,
}  # fmt: skip
"""What a reader takes out of ``state.json`` beside ``evaluation``, and its kind in Python.

What is in them, :mod:`.checkpoint_state` knows; of the evaluation a run reads a number in every checkpoint.
"""

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.step-\d+\.(new|old)")


def folder_of(out: str | Path, step: int) -> Path:
    """Return where the checkpoint of a step is, whether or not it exists."""
    return Path(out) / "checkpoints" / f"step-{step}"


def step_of(folder: str | Path) -> int:
    """Return the step of a checkpoint by its name.

    Raises
    ------
    ValueError
        It has another name.
    """
    match = _NAME.fullmatch(Path(folder).name)
    if match is None:
        raise ValueError(f"a checkpoint is named step-N, not {Path(folder).name!r}")
    return int(match[1])


def checkpoints(out: str | Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first. Unfinished ones have other names and are none."""
    folder = Path(out) / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def latest(out: str | Path) -> Path | None:
    """Return the newest checkpoint of a run; None: it has none."""
    return next(reversed(checkpoints(out)), None)


def clear_unfinished(out: str | Path) -> None:
    """Remove what a run that was killed left behind: parts of a checkpoint, or one that it was removing."""
    folder = Path(out) / "checkpoints"
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)


def write_checkpoint(
    out: str | Path, step: int, *, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> Path:
    """Write a checkpoint and return its folder; one that is there already stays as it is.

    Parameters
    ----------
    state
        JSON-able; ``format`` and ``step`` are added.
    tensors
        File name to its tensors by name, contiguous and on the CPU.

    Raises
    ------
    StoreError
        HS506: it cannot be written, as to a full disk. What had been written of it is removed, and every earlier
        checkpoint is as it was.
    """
    folder = folder_of(out, step)
    if folder.is_dir():
        return folder
    new = folder.with_name(f".{folder.name}.new")
    with _told(folder, new):
        new.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        for name, content in tensors.items():
            write_tensors(new / name, content)
            _sync(new / name)
        text = json.dumps({"format": FORMAT, "step": step, **state}, indent=1, allow_nan=False)
        (new / STATE).write_text(text, "utf-8")
        _sync(new / STATE)
        _sync(new)
        new.rename(folder)
        _sync(folder.parent)
    return folder


def prune(out: str | Path, *, keep: int, score: Score) -> None:
    """Remove all checkpoints but the newest ``keep`` and the best.

    Parameters
    ----------
    score
        Of a checkpoint's state; the highest is the best, None has none.
    """
    best = best_of(out, score=score)
    for path in checkpoints(out)[:-keep]:
        if path != best:
            old = path.with_name(f".{path.name}.old")
            path.rename(old)  # so that no part of it is ever taken for a checkpoint
            shutil.rmtree(old)


def best_of(out: str | Path, *, score: Score) -> Path | None:
    """Return the checkpoint of the highest score, the newest of equal ones; None: none has one."""
    scores = [(score(read_state(path)), step_of(path), path) for path in checkpoints(out)]
    return max(((s, step, path) for s, step, path in scores if s is not None), default=(0.0, 0, None))[2]


def read_state(folder: str | Path) -> dict[str, Any]:
    """Return what ``state.json`` of a checkpoint says.

    Raises
    ------
    ForeignFileError
        HS602: there is none, it is no JSON object, a part of it is missing or wrong, or it is of another step than the
        folder's name says. HS603: it is of another version of the format.
    """
    path, fix = Path(folder) / STATE, instead_of(folder)
    try:
        state = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        expected = "a checkpoint of hsformat train"
        raise ForeignFileError([problem("HS602", where=str(path), got=e, expected=expected, fix=fix)]) from e
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        got = state.get("format") if isinstance(state, dict) else type(state).__name__
        expected, fix = f"format {FORMAT}", f"use the version of hsformat that wrote it; otherwise {fix}"
        raise ForeignFileError([problem("HS603", where=str(path), got=got, expected=expected, fix=fix)])
    wrong = [
        problem(
            "HS602",
            where=f"{path}: {key}",
            got=_got(key, state),
            expected=f"{key} as hsformat train writes it",
            fix=fix,
        )
        for key, kind in _PARTS.items()
        if type(state.get(key)) is not kind
    ]
    wrong += _evaluation_problems(state, path, fix)
    named = _NAME.fullmatch(path.parent.name)
    if not wrong and named is not None and int(named[1]) != state["step"]:
        expected = f"{named[1]}, as the folder's name says"
        renamed = f"rename the folder to step-{state['step']} if its name is wrong; otherwise {fix}"
        wrong.append(problem("HS602", where=f"{path}: step", got=state["step"], expected=expected, fix=renamed))
    if wrong:
        raise ForeignFileError(wrong)
    return state


def instead_of(folder: str | Path) -> str:
    """Return what to do about a checkpoint that is damaged, with options that there are."""
    own = Path(folder)
    others = [p.name for p in checkpoints(own.absolute().parent.parent) if p.name != own.name]
    if not others:
        return "begin another run in another --out: this one has no other checkpoint"
    return f"use {others[-1]}: --resume takes it when {own.name} is removed, and export-draft takes the one it is given"


def _evaluation_problems(state: Mapping[str, Any], path: Path, fix: str) -> list[Problem]:
    if "evaluation" in state and state["evaluation"] is None:
        return []
    if type(state.get("evaluation")) is not dict:
        expected = "null or an evaluation, as hsformat train writes it"
        got = _got("evaluation", state)
        return [problem("HS602", where=f"{path}: evaluation", got=got, expected=expected, fix=fix)]
    try:
        Evaluated.model_validate_json(json.dumps(state["evaluation"]))
    except ValidationError as e:
        return model_problems(e, where=str(path), fix=fix, inside=("evaluation",))
    return []


def _got(key: str, state: Mapping[str, Any]) -> str:
    return f"{type(state[key]).__name__} {state[key]!r}"[:300] if key in state else f"no {key}"


def read_tensors(folder: str | Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one file of a checkpoint, on the CPU.

    Raises
    ------
    ForeignFileError
        HS602: it is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / name
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        expected, fix = "tensors of a checkpoint", instead_of(folder)
        raise ForeignFileError([problem("HS602", where=str(path), got=e, expected=expected, fix=fix)]) from e


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told(folder: Path, new: Path) -> Iterator[None]:
    """Remove what is unfinished, and say what did not work and what still holds."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as e:
        shutil.rmtree(new, ignore_errors=True)
        earlier = [p.name for p in checkpoints(folder.parent.parent)]
        kept = f"{earlier[-1]} is whole: resume from it with --resume" if earlier else "there is no earlier one"
        full = getattr(e, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC})" in str(e)
        fix = "free space on this disk, or give another --out" if full else "see the error of the system"
        expected = "a checkpoint that is written as a whole"
        found = problem(
            "HS506", where=str(folder), got=e, expected=expected, fix=f"{fix}; {kept}", severity=Severity.ERROR
        )
        raise StoreError([found]) from e
    except BaseException:  # raised again: nothing unfinished stays
        shutil.rmtree(new, ignore_errors=True)
        raise
