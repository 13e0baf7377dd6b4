"""Checkpoints: whole or not there; the newest and the best stay; what is not one is refused."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import small_disk

from hsformat.problems import ForeignFileError, StoreError
from hsformat_trainer.checkpoint import (
    MODEL,
    STATE,
    checkpoints,
    clear_unfinished,
    folder_of,
    latest,
    prune,
    read_state,
    read_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.needs("torch")

PARTS: dict[str, Any] = {
    "tokens": 0,
    "config": {},
    "admitted": {},
    "spec": {},
    "loader": {},
    "random": [],
    "evaluation": None,
}


def write(out: Path, step: int, score: float | None = None, size: int = 4) -> Path:
    return write_checkpoint(
        out, step, state={**PARTS, "score": score}, tensors={MODEL: {"fc.weight": torch.full((size,), float(step))}}
    )


def score(state: Any) -> float | None:
    return state["score"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, 12, 0.1)
    assert folder == folder_of(tmp_path, 12) == latest(tmp_path)
    assert read_state(folder) == {"format": 1, "step": 12, "score": 0.1, **PARTS}
    assert torch.equal(read_tensors(folder, MODEL)["fc.weight"], torch.full((4,), 12.0))


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors 0.8 leaves files of mode 0600, which a server that runs as another user cannot read."""
    before = os.umask(0o027)
    try:
        folder = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {name: (folder / name).stat().st_mode & 0o777 for name in (MODEL, STATE)} == {MODEL: 0o640, STATE: 0o640}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step, value in ((9, None), (10, 2.0), (20, 3.5), (30, 3.0), (100, 1.0)):
        write(tmp_path, step, value)
    prune(tmp_path, keep=2, score=score)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-20", "step-30", "step-100"]
    prune(tmp_path, keep=1, score=lambda state: None)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-100"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-100"]


def test_unfinished_ones_are_none_and_are_cleared(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in (".step-4.new", ".step-2.old"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "mine").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-3"]
    clear_unfinished(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["mine", "step-3"]
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "HS602"), ('{"format": 1', "HS602"), ("[]", "HS603"), ('{"format": 2}', "HS603"), ('{"a": NaN}', "HS602")],
)
def test_a_damaged_state_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (write(tmp_path, 1) / STATE).write_text(text)
    with pytest.raises(ForeignFileError) as e:
        read_state(folder_of(tmp_path, 1))
    assert [p.code for p in e.value.problems] == [code]


def test_damaged_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-3])
    for name in (MODEL, "other.safetensors"):
        with pytest.raises(ForeignFileError) as e:
            read_tensors(folder, name)
        assert e.value.problems[0].code == "HS602"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of 1 MiB."""
    with small_disk(tmp_path / "disk", "1m") as path:
        yield path


def refuses(out: Path, size: int) -> str:
    with pytest.raises(StoreError) as e:
        write(out, 2, size=size)
    (found,) = e.value.problems
    assert (found.code, found.severity.value) == ("HS506", "error")
    assert [p.name for p in checkpoints(out)] == ["step-1"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-1"]
    assert torch.equal(read_tensors(folder_of(out, 1), MODEL)["fc.weight"], torch.full((1000,), 1.0))
    assert "step-1 is whole" in found.fix
    return found.fix


def test_a_full_disk_leaves_the_earlier_one_whole(disk: Path) -> None:
    write(disk, 1, size=1000)
    assert "free space" in refuses(disk, size=10**6)
    write(disk, 3, size=1000)  # nothing of what failed is left to fill it


def test_a_file_that_may_not_grow_leaves_the_earlier_one_whole(tmp_path: Path) -> None:
    write(tmp_path, 1, size=1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        refuses(tmp_path, size=10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


KILLED = f"""
import sys, torch
from pathlib import Path
from hsformat_trainer.checkpoint import MODEL, prune, write_checkpoint
for step in range(1, 10**6):
    tensors = {{MODEL: {{"fc.weight": torch.full((200_000,), float(step))}}}}
    write_checkpoint(Path(sys.argv[1]), step, state={PARTS}, tensors=tensors)
    prune(Path(sys.argv[1]), keep=2, score=lambda state: None)
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [1, 4])
def test_a_kill_leaves_whole_ones(tmp_path: Path, after: int) -> None:
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if int(line) >= after:
            os.kill(run.pid, signal.SIGKILL)  # most likely in the middle of writing the next one
            break
    run.wait()
    run.stdout.close()
    found = checkpoints(tmp_path)
    assert found
    for folder in found:
        state = read_state(folder)
        assert torch.equal(read_tensors(folder, MODEL)["fc.weight"], torch.full((200_000,), float(state["step"])))
    clear_unfinished(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == sorted(p.name for p in found)
