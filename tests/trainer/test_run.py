"""Whole runs of a tiny draft: it learns by heart, its loss curve is known, and what goes wrong is told and stops it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from small_disk import small_disk
from tiny_training import STEPS, spec, tiny_admitted, tiny_config, write_data

from hsformat.problems import ContractMismatch, HsError, InvalidRecord, NothingToOpen, StoreError
from hsformat_trainer import curves, tracking
from hsformat_trainer.admitted import Admitted
from hsformat_trainer.checkpoint import checkpoints, read_state
from hsformat_trainer.evaluate import walk
from hsformat_trainer.journal import Journal, read_journal
from hsformat_trainer.loop import RunResult, train

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    return folder


def run(data: Path, out: Path, *, held_out: int = 4, **options: Any) -> RunResult:
    config = tiny_config(data, out=str(out), **options)
    return train(config, tiny_admitted(config, held_out=held_out))


def on_its_training_records(config: Any) -> Admitted:
    """Return a run that is evaluated on what it is trained on."""
    admitted = tiny_admitted(config, held_out=0)
    (source,) = admitted.sources
    kept = np.arange(4)
    tokens = source.train_tokens[:4]
    source = replace(source, train=kept, held_out=kept, train_tokens=tokens, held_out_tokens=tokens)
    return replace(admitted, sources=(source,))


def perfect(admitted: Admitted) -> float:
    """Return the acceptance length of a draft that is always right: K + 1, but for rounds that a record's end cuts."""
    (source,) = admitted.sources
    rounds, accepted = 0, 0
    for row in source.held_out:
        tokens = source.source.read(int(row), captures=()).num_tokens
        right = np.array([[t + 2 + k < tokens for t in range(tokens)] for k in range(STEPS)])
        more, accepted_K = walk(right, 2, tokens)  # the first two tokens are the prompt
        rounds, accepted = rounds + more, accepted + int(accepted_K.sum())
    return 1 + accepted / rounds


def test_a_tiny_draft_learns_by_heart(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"max_steps": 60, "log_every": 30, "save_every": 0, "batch_tokens": 128, "lr": 5e-2, "loss": "ce"}
    config = tiny_config(data, out=str(tmp_path), **changes)
    admitted = on_its_training_records(config)
    admitted = replace(admitted, spec=spec(train_embedding=True, intermediate_size=64, num_kv_heads=2))
    result = train(config, admitted)
    before, after = result.evaluations
    assert (before["step"], after["step"]) == (0, 60)
    assert before["acceptance_length"] < 1.5
    assert after["accuracy"] == (1.0,) * STEPS
    assert after["acceptance_length"] == pytest.approx(perfect(admitted))
    assert after["acceptance_length"] > STEPS + 0.7
    assert (result.exit_code, result.step, result.checkpoint) == (0, 60, tmp_path / "checkpoints" / "step-60")
    assert result.best == result.checkpoint
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    for word in ("acceptance length", "before", "after", "accuracy, position 3", "tokens/s", "curves.png"):
        assert word in told
    lines = read_journal(tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 30, 60]
    assert all(0 <= line["loader_wait"] < 1 for line in lines if line["kind"] == "step")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_curve_is_the_known_one(data: Path, tmp_path: Path, optimizer: str) -> None:
    """Within 1e-3: sums in float32 differ between processors and versions of torch by some 1e-6, which steps amplify.

    A row more or less in the loss, or a shift of one, changes it by more than 1e-2.
    """
    run(data, tmp_path, optimizer=optimizer, max_steps=8)
    got = [line["loss"] for line in read_journal(tmp_path) if line["kind"] == "step"]
    golden = json.loads((Path(__file__).parent / "golden_loss.json").read_text())
    assert got == pytest.approx(golden[optimizer], rel=1e-3)


class Poisoned:
    """A store of which one state of one record is NaN."""

    def __init__(self, store: Any, record: str) -> None:
        self._store, self._record = store, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def read(self, key: Any, **options: Any) -> Any:
        record = self._store.read(key, **options)
        if record.id == self._record and "d2" in record.hidden:
            states = record.hidden["d2"].copy()
            states[4, 1] = np.nan
            record.hidden["d2"] = states
        return record


def test_a_record_that_is_not_finite_stops_it_before_the_step(data: Path, tmp_path: Path) -> None:
    """Training that went on with NaN states: speculators PR#615, PR#966."""
    config = tiny_config(data, out=str(tmp_path), save_every=1, seed=1)
    admitted = tiny_admitted(config)
    (source,) = admitted.sources
    with pytest.raises(InvalidRecord) as e:
        train(config, replace(admitted, sources=(replace(source, source=Poisoned(source.source, "r7")),)))
    first, second = e.value.problems
    assert {p.code for p in e.value.problems} == {"HS201"}
    assert (first.record, first.where) == ("r7", "record 'r7': d2: state 4")
    assert "'r7'" in second.where
    assert "loss nan" in second.got
    done = len([line for line in read_journal(tmp_path) if line["kind"] == "step"])
    assert done >= 1
    assert [p.name for p in checkpoints(tmp_path)][-1] == f"step-{done}"  # of the last good step


def test_a_held_out_record_that_is_not_finite_is_told_and_no_miss(data: Path, tmp_path: Path) -> None:
    """The evaluation counted what the draft said of NaN as wrong, and the run went on to choose checkpoints by it."""
    config = tiny_config(data, out=str(tmp_path))
    admitted = tiny_admitted(config)
    (source,) = admitted.sources
    poisoned = replace(source, source=Poisoned(Poisoned(source.source, "r21"), "r23"))
    with pytest.raises(InvalidRecord) as e:
        train(config, replace(admitted, sources=(poisoned,)))
    assert [(p.code, p.record) for p in e.value.problems] == [("HS201", "r21"), ("HS201", "r23")]
    assert e.value.problems[0].where == f"held out of {source.name}: record 'r21': d2: state 4"
    assert checkpoints(tmp_path) == []
    assert train(config, admitted).exit_code == 0


def test_a_loss_that_diverges_stops_it(data: Path, tmp_path: Path) -> None:
    """NaN from the first step on, and nothing said which records: speculators#238."""
    with pytest.raises(InvalidRecord) as e:
        run(data, tmp_path, lr=1e30, clip=None, schedule="constant")
    (found,) = e.value.problems
    assert found.code == "HS201"
    assert "states of these records are finite" in found.got
    assert "lower lr" in found.fix
    assert "fp32" not in found.fix  # the run is in it; and a run that goes on may not change it


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of 250 kB."""
    with small_disk(tmp_path / "disk", "250k") as path:
        yield path


def test_a_full_disk_stops_it_and_the_checkpoint_before_is_whole(data: Path, disk: Path) -> None:
    with pytest.raises(StoreError) as e:
        run(data, disk, max_steps=200, save_every=2, keep=100, log_every=100)
    (found,) = e.value.problems
    assert found.code == "HS506"
    kept = checkpoints(disk)
    assert f"{kept[-1].name} is whole" in found.fix
    for path in kept[:-1]:
        shutil.rmtree(path)  # room to go on
    config = tiny_config(data, out=str(disk), max_steps=read_state(kept[-1])["step"] + 1, save_every=0, keep=1)
    assert train(config, tiny_admitted(config), resume=True).step == config.max_steps


def test_a_full_disk_met_by_the_log_is_told(tmp_path: Path) -> None:
    def log(full: TextIO) -> None:
        with Journal(tmp_path, after=0, writes=True) as journal:
            journal._file = full
            journal.evaluation(1, {"records": 4})

    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    with pytest.raises(StoreError) as e:
        log(full)
    (found,) = e.value.problems
    assert (found.code, found.severity.value, found.where) == ("HS506", "error", str(tmp_path / "log.jsonl"))
    assert "free space" in found.fix


@pytest.mark.filterwarnings("error")
def test_curves_of_many_positions_have_room(tmp_path: Path) -> None:
    accuracy = [0.5] * 64
    line = {"loss": 1.0, "accuracy": accuracy, "lr": {"adamw": 1e-4}, "grad_norm": 1.0}
    steps = [{"kind": "step", "step": i, **line} for i in (1, 2)]
    evaluation = {"kind": "evaluation", "step": 2, "accuracy": accuracy, "acceptance_length": 2.0, "interval": None}
    curves.draw_curves([*steps, evaluation], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_the_best_checkpoint_stays(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, out=str(tmp_path), max_steps=12, eval_every=2, save_every=2, keep=1, lr=3e-2)
    result = train(config, on_its_training_records(config))
    lengths = {e["step"]: e["acceptance_length"] for e in result.evaluations if e["step"]}
    best = max(lengths, key=lambda step: (lengths[step], step))
    assert result.best is not None
    assert result.best.name == f"step-{best}"
    assert {p.name for p in checkpoints(tmp_path)} == {f"step-{best}", "step-12"}


def test_checkpoints_are_compared_over_the_same_records(data: Path, tmp_path: Path) -> None:
    """The last evaluation is of all records: its length is no better for their being easier."""
    options = {"eval_every": 2, "eval_records": 2, "schedule": "constant", "warmup": 0, "lr": 3e-2}
    at_end = run(data, tmp_path / "a", max_steps=4, **options).evaluations
    on_the_way = run(data, tmp_path / "b", max_steps=6, **options).evaluations
    assert [e["records"] for e in at_end] == [4, 2, 4]
    assert [e["records"] for e in on_the_way] == [4, 2, 2, 4]
    assert at_end[2]["compared_length"] == on_the_way[2]["compared_length"] == on_the_way[2]["acceptance_length"]
    assert at_end[2]["acceptance_length"] != at_end[2]["compared_length"]
    result = run(data, tmp_path / "c", max_steps=4, save_every=1, keep=9, **options)
    best = max(result.evaluations[1:], key=lambda e: (e["compared_length"], e["step"]))
    assert result.best == tmp_path / "c" / "checkpoints" / f"step-{best['step']}"


def test_a_vocabulary_without_supervised_ids_is_refused(data: Path, tmp_path: Path) -> None:
    """It trained nothing, at a loss of 0.0000, and ended well."""
    config = tiny_config(data, out=str(tmp_path), max_steps=1)
    admitted = tiny_admitted(config, draft_vocab_size=1)
    (source,) = admitted.sources
    said = {int(i) for row in source.train for i in source.source.read(int(row), captures=()).input_ids}
    admitted = replace(admitted, special_ids=(min(set(range(100)) - said),))
    with pytest.raises(ContractMismatch) as e:
        train(config, admitted)
    assert [(p.code, p.where) for p in e.value.problems] == [("HS408", "--draft-vocab-size")]
    assert checkpoints(tmp_path) == []


def test_memory_that_is_not_there_is_told(data: Path, tmp_path: Path) -> None:
    """A draft of 16 TiB: the allocator's own words, and what to lower."""
    config = tiny_config(data, out=str(tmp_path), max_steps=1)
    admitted = tiny_admitted(config)
    admitted = replace(admitted, spec=admitted.spec.model_copy(update={"intermediate_size": 2**38}))
    with pytest.raises(HsError) as e:
        train(config, admitted)
    (p,) = e.value.problems
    assert (p.code, p.where) == ("HS410", "--device cpu")
    assert "--batch-tokens" in str(p.fix)


@pytest.mark.parametrize("line", [b'{"x', b'{"x": 1}', b"[1]", b"\xff", b'{"kind": "step"}', b"[" * 100_000])
def test_a_log_with_a_line_of_another_hand_is_named(tmp_path: Path, line: bytes) -> None:
    whole = b'{"kind": "step", "step": 1, "loss": 2.0, "accuracy": [0.5, null], "lr": {"adamw": 0.1}, "grad_norm": 1.0}'
    (tmp_path / "log.jsonl").write_bytes(whole + b"\n" + line + b"\n" + b'{"kind": "st')
    with pytest.raises(HsError) as e:
        read_journal(tmp_path)
    assert {p.code for p in e.value.problems} == {"HS602"}
    assert all(p.where.startswith(f"{tmp_path / 'log.jsonl'}: line 2") for p in e.value.problems)


def test_numbers_that_a_line_of_the_log_lacks_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"kind": "evaluation", "step": 3, "records": "x"}) + "\n")
    with pytest.raises(HsError) as e:
        read_journal(tmp_path)
    named = {p.where.rpartition(".")[2] for p in e.value.problems}
    assert {"records", "accuracy", "acceptance_length", "compared_length"} <= named


def test_tensorboard_is_told_the_numbers(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, max_steps=2, trackers=["tensorboard"], project="drafts", precision="bf16")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = [p for p in (tmp_path / "drafts").iterdir() if p.name.startswith("events")]
    told = EventAccumulator(str(file)).Reload()
    losses = [line["loss"] for line in read_journal(tmp_path) if line["kind"] == "step"]
    assert [x.value for x in told.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
    assert "evaluation/acceptance_length" in told.Tags()["scalars"]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_missing_is_refused(
    data: Path, tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(NothingToOpen) as e:
        run(data, tmp_path / "out", trackers=[tracker])
    assert [p.fix for p in e.value.problems] == [f"pip install {tracker}"]
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_is_missing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    assert run(data, tmp_path, max_steps=1).exit_code == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "curves.png").exists()


def test_nothing_held_out_is_no_evaluation(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(data, tmp_path, held_out=0, max_steps=2)
    assert (result.evaluations, result.best) == ([], None)
    assert "training loss" in capsys.readouterr().out


def test_epochs_have_all_their_steps(data: Path, tmp_path: Path) -> None:
    result = run(data, tmp_path, max_steps=None, epochs=2, accumulation=3, save_every=0)
    lines = [line for line in read_journal(tmp_path) if line["kind"] == "step"]
    assert result.step == result.total == len(lines)
    per_epoch = [sum(line["epoch"] == e for line in lines) for e in (0, 1)]
    assert per_epoch[0] == per_epoch[1] > 1
    assert lines[-1]["tokens"] == 2 * int(tiny_admitted(tiny_config(data)).sources[0].train_tokens.sum())


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(data: Path, tmp_path: Path, device: str) -> None:
    with pytest.raises(HsError) as e:
        run(data, tmp_path, device=device)
    assert e.value.problems[0].code == "HS410"
