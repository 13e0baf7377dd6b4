"""A run that is to go on from a checkpoint that is damaged: told with file and field, and what can be done about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import tiny_admitted, tiny_config, write_data

from hsformat.problems import HsError, Problem
from hsformat_trainer.checkpoint import MODEL, OPTIMIZER, RNG, STATE, folder_of
from hsformat_trainer.loop import train

pytestmark = pytest.mark.needs("torch")

TOTAL = 4
OPTIONS: dict[str, Any] = {"max_steps": TOTAL, "save_every": 2, "workers": 0, "optimizer": "muon"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    config = tiny_config(folder, **OPTIONS, out=str(folder / "whole"))
    assert train(config, tiny_admitted(config)).step == TOTAL
    return folder


@pytest.fixture
def out(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data / "whole", tmp_path / "out")
    return tmp_path / "out"


def resumed(data: Path, out: Path) -> int:
    config = tiny_config(data, **OPTIONS, out=str(out))
    return train(config, tiny_admitted(config), resume=True).step


def refused(data: Path, out: Path) -> list[Problem]:
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(HsError) as e:
        resumed(data, out)
    assert (out / "log.jsonl").read_bytes() == before
    return e.value.problems


def edit(out: Path, *path: str | int, to: Any) -> Path:
    """Put a value into the newest state; ``...`` removes what is there."""
    file = folder_of(out, TOTAL) / STATE
    state = inner = json.loads(file.read_text())
    for key in path[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    file.write_text(json.dumps(state))
    return file


RNG_KEYS = [0] * 625
DAMAGE: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("step",), True, "step"),
    (("tokens",), -1, "tokens"),
    (("epoch",), ..., "epoch"),
    (("evaluation",), ..., "evaluation"),
    (("evaluation",), [1], "evaluation"),
    (("evaluation", "compared_length"), ..., "evaluation.compared_length"),
    (("evaluation", "compared_length"), "2.0", "evaluation.compared_length"),
    (("random",), [], "random"),
    (("random",), [{}], "random.0.python"),
    (("random", 0, "python"), None, "random.0.python"),
    (("random", 0, "python", 1), RNG_KEYS[:5], "random[0]"),
    (("random", 0, "python", 1), [-1, *RNG_KEYS[1:]], "random[0]"),
    (("random", 0, "numpy", 1), RNG_KEYS[:5], "random[0]"),
    (("random", 0, "numpy", 0), "PCG64", "random[0]"),
    (("admitted",), {}, "admitted.target"),
    (("admitted", "sources"), 5, "admitted.sources"),
    (("admitted", "sources"), ["x"], "admitted.sources.0"),
    (("admitted", "servings"), ["x"], "admitted.servings.0"),
    (("admitted", "layout"), ..., "admitted.layout"),
    (("spec",), {}, "spec.target_hidden_size"),
    (("spec", "num_heads"), "2", "spec.num_heads"),
    (("loader",), {}, "loader.weights"),
    (("loader", "batching"), 5, "loader.batching"),
    (("loader", "epoch"), -1, "loader.epoch"),
    (("loader", "batches"), 1.5, "loader.batches"),
    (("loader", "batches"), 10**6, "loader.batches"),
]


@pytest.mark.parametrize(("path", "to", "named"), DAMAGE, ids=lambda x: str(x)[:40])
def test_each_part_of_the_state(data: Path, out: Path, path: tuple[str | int, ...], to: Any, named: str) -> None:
    """Of each of them the run ended with a traceback, or went on from something else than it was."""
    file = edit(out, *path, to=to)
    found = refused(data, out)
    assert {p.code for p in found} == {"HS602"}
    assert f"{file}: {named}" in {p.where for p in found}


@pytest.mark.parametrize(
    ("path", "to", "named", "other"),
    [
        (("spec", "intermediate_size"), 64, "spec.intermediate_size", "admitted.spec.intermediate_size"),
        (("admitted", "spec", "norm_output"), True, "spec.norm_output", "admitted.spec.norm_output"),
        (("admitted", "layout", "aux"), ["d1", "d2"], "spec.num_aux", "admitted.layout.aux"),
        (("admitted", "target", "hidden_size"), 16, "spec.target_hidden_size", "admitted.target.hidden_size"),
        (("evaluation", "step"), 2, "evaluation.step", "step"),
        (("epoch",), 7, "epoch", "loader.epoch"),
        (("step",), 3, "step", "the folder's name"),
    ],
)
def test_parts_that_contradict_each_other(
    data: Path, out: Path, path: tuple[str, ...], to: Any, named: str, other: str
) -> None:
    file = edit(out, *path, to=to)
    (found,) = refused(data, out)
    assert (found.code, found.where) == ("HS602", f"{file}: {named}")
    assert f"{other} says" in found.expected


def test_a_folder_of_another_name_is_no_later_step(data: Path, out: Path) -> None:
    folder_of(out, TOTAL).rename(folder_of(out, 100))
    (found,) = refused(data, out)
    assert (found.code, found.got, found.expected) == ("HS602", "4", "100, as the folder's name says")
    assert "rename the folder to step-4" in found.fix
    folder_of(out, 100).rename(folder_of(out, TOTAL))
    assert resumed(data, out) == TOTAL


def test_what_to_do_can_be_done(data: Path, out: Path) -> None:
    """It said to name another folder, which --resume does not take."""
    edit(out, "random", to=[])
    (found,) = refused(data, out)
    assert "use step-2: --resume takes it when step-4 is removed" in found.fix
    shutil.rmtree(folder_of(out, TOTAL))
    assert resumed(data, out) == TOTAL
    shutil.rmtree(folder_of(out, 2))
    (folder_of(out, TOTAL) / STATE).write_text("{")
    (found,) = refused(data, out)
    assert "begin another run in another --out" in found.fix


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = float("nan")
    return tensor


TENSORS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = [
    (MODEL, "fc.weight", _nan, "HS201"),
    (MODEL, "fc.weight", lambda t: t[1:].contiguous(), "HS602"),
    (MODEL, "norm.weight", lambda t: t.long(), "HS602"),
    (MODEL, "norm.weight", lambda t: t.to(torch.float8_e4m3fn), "HS602"),
    (OPTIMIZER, "muon/fc.weight/momentum_buffer", _nan, "HS201"),
    (OPTIMIZER, "muon/fc.weight/momentum_buffer", lambda t: None, "HS602"),
    (OPTIMIZER, "muon/fc.weight/momentum_buffer", lambda t: t[1:].contiguous(), "HS602"),
    (OPTIMIZER, "adamw/norm.weight/exp_avg", lambda t: t.long(), "HS602"),
    (RNG, "0/cpu", lambda t: None, "HS602"),
    (RNG, "0/cpu", lambda t: t[:9].contiguous(), "HS602"),
    (RNG, "0/cpu", lambda t: t.float(), "HS602"),
]


@pytest.mark.parametrize(("name", "key", "change", "code"), TENSORS)
def test_each_file_of_tensors(data: Path, out: Path, name: str, key: str, change: Any, code: str) -> None:
    file = folder_of(out, TOTAL) / name
    tensors = load_file(file)
    changed = change(tensors.pop(key))
    save_file(tensors if changed is None else {**tensors, key: changed}, file)
    found = refused(data, out)
    assert {p.code for p in found} == {code}
    assert all(p.where.startswith(str(file)) for p in found)
