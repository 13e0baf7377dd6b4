"""A run that is killed or stopped and resumed is the run that was never interrupted, float for float."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import run_tiny, tiny_admitted, tiny_config, write_data
from training_processes import ended, start_run, wait_for_lines

import hsformat as hs
from hsformat.problems import ContractMismatch, ForeignFileError
from hsformat.testing import build_store
from hsformat_trainer.checkpoint import MODEL, OPTIMIZER, STATE, checkpoints, folder_of, latest, read_state, step_of
from hsformat_trainer.content import source_digest
from hsformat_trainer.journal import read_journal
from hsformat_trainer.loop import train

pytestmark = pytest.mark.needs("torch")

TOTAL = 26
OPTIONS: dict[str, Any] = {"max_steps": TOTAL, "save_every": 3, "eval_every": 9, "accumulation": 2, "optimizer": "muon"}
"""Several epochs of an odd number of batches, so that a checkpoint lies in the middle of one."""

TIMES = ("seconds", "tokens_per_second", "loader_wait")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def whole(data: Path) -> Path:
    """Return the folder of a run that nothing interrupted."""
    out = data / "whole"
    assert ended(start_run(data, {**OPTIONS, "out": str(out)})) == 0
    return out


def curve(out: Path) -> list[dict[str, Any]]:
    """Return the log without what time decides."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_journal(out)]


def assert_same_run(out: Path, whole: Path) -> None:
    assert curve(out) == curve(whole)
    for name in (MODEL, OPTIMIZER):
        got, wanted = (load_file(folder_of(o, TOTAL) / name) for o in (out, whole))
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[k], wanted[k]) for k in wanted)


def test_a_checkpoint_is_in_the_middle_of_an_epoch(whole: Path) -> None:
    lines = [line for line in curve(whole) if line["kind"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, TOTAL + 1))
    assert lines[-1]["epoch"] > 2
    state = read_state(folder_of(whole, TOTAL))
    assert state["loader"]["batches"] > 0
    assert {p.suffix for p in folder_of(whole, TOTAL).iterdir()} == {".json", ".safetensors"}  # nothing is pickled


def test_killed_and_resumed(data: Path, whole: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "out": str(tmp_path)}
    run = start_run(data, options)
    wait_for_lines(tmp_path / "log.jsonl", 11, run)
    os.kill(run.pid or 0, signal.SIGKILL)
    assert ended(run) == -signal.SIGKILL
    kept = latest(tmp_path)
    assert kept is not None
    assert 6 <= step_of(kept) < TOTAL
    assert ended(start_run(data, options, resume=True)) == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_and_resumed(data: Path, whole: Path, tmp_path: Path, number: int, code: int) -> None:
    options = {**OPTIONS, "out": str(tmp_path), "save_every": 0}
    run = start_run(data, options)
    wait_for_lines(tmp_path / "log.jsonl", 8, run)
    os.kill(run.pid or 0, number)
    assert ended(run) == code
    kept = latest(tmp_path)
    assert kept is not None
    last = max(line["step"] for line in curve(tmp_path) if line["kind"] == "step")
    assert step_of(kept) == last < TOTAL  # the step in hand was finished, and saved
    assert ended(start_run(data, options, resume=True)) == 0
    assert_same_run(tmp_path, whole)


def test_what_is_begun_is_not_written_over(data: Path, whole: Path) -> None:
    before = [p.name for p in checkpoints(whole)]
    assert run_tiny(data, {**OPTIONS, "out": str(whole)}, resume=False) == 2
    assert [p.name for p in checkpoints(whole)] == before


def begun(data: Path, whole: Path, tmp_path: Path) -> dict[str, Any]:
    """Return options of a copy of the run."""
    shutil.copytree(whole, tmp_path / "out")
    return {**OPTIONS, "out": str(tmp_path / "out")}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps": 2}, "steps"),
        ({"decay": 0.5, "loss": "ce"}, "decay loss"),
        ({"mask_rule": "input"}, "mask_rule"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"accumulation": 1}, "accumulation"),
        ({"batch_tokens": 63}, "loader"),
        ({"seed": 1}, "seed loader"),
    ],
)
def test_other_options_are_refused(
    data: Path, whole: Path, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    """A resume that nobody compared with what was begun: NeMo Automodel PR#2478."""
    config = tiny_config(data, **{**begun(data, whole, tmp_path), **changed})
    with pytest.raises(ContractMismatch) as e:
        train(config, tiny_admitted(config), resume=True)
    assert [p.where.rpartition(": ")[2] for p in e.value.problems if p.severity.value == "error"] == named.split()
    assert {p.code for p in e.value.problems} == {"HS507"}
    assert curve(Path(config.out)) == curve(whole)  # nothing was written


def test_other_data_is_refused_with_the_difference(data: Path, whole: Path, tmp_path: Path) -> None:
    """Other records, or the same in another order, under one manifest: NeMo Automodel PR#3396."""
    config = tiny_config(data, **begun(data, whole, tmp_path))
    with pytest.raises(ContractMismatch) as e:
        train(config, tiny_admitted(config, held_out=5), resume=True)
    assert any("train" in p.where for p in e.value.problems)
    assert any(p.where.endswith("loader") for p in e.value.problems)
    with pytest.raises(ContractMismatch) as e:
        train(config, tiny_admitted(config, rope={"rope_type": "default", "rope_theta": 5000.0}), resume=True)
    assert "HS407" in {p.code for p in e.value.problems}


def test_other_content_under_the_same_ids_is_refused(data: Path, whole: Path, tmp_path: Path) -> None:
    """The ids and lengths are those of the run, and one state is another."""
    given = begun(data, whole, tmp_path)
    store = hs.open(data / "data.hs.zarr")
    records = list(store)
    for key in ("d1", "d2"):
        records[3].hidden[key] = -records[3].hidden[key]
    other = build_store(tmp_path / "data.hs.zarr", store.contract, records, segments=3)
    config = tiny_config(data, **given, stores=[str(other)])
    with pytest.raises(ContractMismatch) as e:
        train(config, tiny_admitted(config), resume=True)
    assert [p.where for p in e.value.problems] == ["resume: sources[0].content"]


def test_a_source_that_is_no_store_is_known_by_its_tokens(data: Path) -> None:
    class Records(list):  # type: ignore[type-arg] # of records
        def read(self, row: int, **_: Any) -> Any:
            return self[row]

    records = Records(hs.open(data / "data.hs.zarr"))
    before = source_digest(records)  # type: ignore[arg-type] # as far as it is asked
    assert source_digest(Records(records)) == before  # type: ignore[arg-type]  # as little of a source as is asked for
    records[2].input_ids[3] += 1
    assert source_digest(records) != before  # type: ignore[arg-type]  # as little of a source as is asked for


def test_a_longer_run_at_another_rate_goes_on_and_says_so(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"max_steps": TOTAL + 2, "save_every": 0, "lr": 0.5, "muon_lr": 0.25, "schedule": "constant"}
    options = {**begun(data, whole, tmp_path), **changed}
    config = tiny_config(data, **options)
    result = train(config, tiny_admitted(config), resume=True)
    assert result.step == TOTAL + 2
    assert [p.where.rpartition(": ")[2] for p in result.notes] == ["max_steps", "lr", "muon_lr", "schedule"]
    told = capsys.readouterr().out
    assert all(str(note) in told for note in result.notes)
    assert all(note.fix.startswith("nothing") for note in result.notes)  # nothing is wrong
    (last,) = [line for line in curve(Path(config.out)) if line["step"] == TOTAL + 2 and line["kind"] == "step"]
    assert last["lr"] == {"adamw": 0.5, "muon": 0.25}
    assert [line["step"] for line in curve(Path(config.out))][-1] == TOTAL + 2


def test_resuming_where_nothing_is_begins(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, out=str(tmp_path / "new"), max_steps=1)
    assert train(config, tiny_admitted(config), resume=True).step == 1


def test_a_finished_run_that_is_resumed_still_has_its_best(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(data, **begun(data, whole, tmp_path))
    result = train(config, tiny_admitted(config), resume=True)
    assert result.best is not None
    assert result.best in checkpoints(config.out)
    assert f"the best: {result.best}" in capsys.readouterr().out


def test_a_state_that_lacks_a_part_is_refused(data: Path, whole: Path, tmp_path: Path) -> None:
    config = tiny_config(data, **begun(data, whole, tmp_path))
    path = folder_of(config.out, TOTAL) / STATE
    state = json.loads(path.read_text())
    for key in ("loader", "config"):
        path.write_text(json.dumps({k: v for k, v in state.items() if k != key}))
        with pytest.raises(ForeignFileError) as e:
            train(config, tiny_admitted(config), resume=True)
        assert [(p.code, p.got) for p in e.value.problems] == [("HS602", f"no {key}")]
    config = config.model_copy(update={"clip": 2.0})
    path.write_text(json.dumps({**state, "config": {"steps": 3}}))
    with pytest.raises(ContractMismatch):
        train(config, tiny_admitted(config), resume=True)
