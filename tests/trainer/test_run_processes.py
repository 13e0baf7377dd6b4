"""Whole runs in two processes: the curve of one process that makes the same batches one after the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_training import run_tiny, tiny_admitted, tiny_config, write_data
from training_processes import ended, start_ranks

from hsformat.problems import ForeignFileError, problem
from hsformat_trainer.checkpoint import MODEL, folder_of, read_state
from hsformat_trainer.data import train_loader
from hsformat_trainer.journal import read_journal
from hsformat_trainer.loop import train

pytestmark = pytest.mark.needs("torch")

TOTAL = 7
OPTIONS: dict[str, Any] = {
    "max_steps": TOTAL,
    "save_every": 4,
    "eval_every": 4,
    "lr": 1e-3,
    "schedule": "constant",
    "warmup": 0,
    "batch_tokens": 90,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def alone(data: Path) -> Path:
    """Return the folder of a run in one process, two batches a step."""
    config = tiny_config(data, out=str(data / "alone"), accumulation=2, **OPTIONS)
    loader = train_loader(config, tiny_admitted(config))
    assert all(loader.batches_of(e) % 2 == 0 for e in range(4))  # otherwise two processes cut batches in halves
    train(config, tiny_admitted(config))
    return data / "alone"


def in_two(data: Path, out: Path, environment: dict[str, str], *, resume: bool = False, **options: Any) -> None:
    given = {**OPTIONS, "out": str(out), **options}
    ranks = start_ranks(2, run_tiny, data, given, resume, folder=out.parent, **environment)
    codes = [ended(p) for p in ranks]
    assert codes == [0, 0], "".join(p.read_text() for p in sorted(out.parent.glob("rank*.txt")))


@pytest.mark.parametrize(
    "environment", [{}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}], ids=["ddp", "fsdp2"]
)
def test_two_processes_give_the_curve_of_one(
    data: Path, alone: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    in_two(data, out, environment, max_steps=4)
    in_two(data, out, environment, resume=True)  # from the middle, in two processes again
    wanted = [line for line in read_journal(alone) if line["kind"] == "step"]
    got = [line for line in read_journal(out) if line["kind"] == "step"]
    assert [line["tokens"] for line in got] == [line["tokens"] for line in wanted]
    for name in ("loss", "grad_norm"):  # the schedule of the first part was for 4 steps: constant in this one
        assert [line[name] for line in got] == pytest.approx([line[name] for line in wanted], rel=1e-4), name
    for mine, theirs in zip(
        *((x for x in read_journal(o) if x["kind"] == "evaluation") for o in (out, alone)), strict=True
    ):
        assert mine["records"] == theirs["records"]
        assert mine["acceptance_length"] == pytest.approx(theirs["acceptance_length"])
    shapes = [{k: v.shape for k, v in load_file(folder_of(o, TOTAL) / MODEL).items()} for o in (out, alone)]
    assert shapes[0] == shapes[1]  # whole weights, under their served names
    assert len(read_state(folder_of(out, TOTAL))["random"]) == 2
    one = tiny_config(data, out=str(out), **{**OPTIONS, "max_steps": TOTAL + 1})
    with pytest.raises(ValueError, match="world_size was 2 and is 1"):
        train(one, tiny_admitted(one), resume=True)


def run_unless_second(folder: Path, options: dict[str, Any], resume: bool) -> int:
    """Train, but let the second process meet an error that the first does not."""
    if os.environ["RANK"] == "1":
        from hsformat_trainer import loop

        def fails(*_: Any, **__: Any) -> None:
            raise ForeignFileError(problem("HS602", where="weights", got="damaged", expected="weights"))

        loop.build = fails  # type: ignore[assignment]  # in a process of its own
    return run_tiny(folder, {**options, "max_steps": 1}, resume)


def test_an_error_of_another_process_is_told_by_it(data: Path, tmp_path: Path) -> None:
    first, second = start_ranks(2, run_unless_second, data, {"out": str(tmp_path / "out")}, False, folder=tmp_path)
    try:
        assert ended(second) == 1
    finally:
        first.kill()
    assert "where     process 1: weights\n" in (tmp_path / "rank1.txt").read_text()
