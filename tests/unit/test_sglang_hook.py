"""SGLang's hook and what is made of its files, without SGLang: batches as its scheduler gives them."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hsformat_extractors.hosted import sglang_hook
from hsformat_extractors.hosted.sglang_hook import HookConfig, Writer
from hsformat_extractors.hosted.sglang_parts import Incomplete, Parts
from hsformat_extractors.hosted.wire import TOKENS

pytestmark = pytest.mark.needs("torch")

RUN, H, KEYS = "hs0123abcd", 4, ("d2", "d5", "d9", "d9n")
OURS, OTHER = f"{RUN}-1", f"{RUN}-2"


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "idle"

    def is_decode(self) -> bool:
        return self.name == "decode"


class Scheduler:
    """Runs a made-up model whose state of depth d of token t at position p is ``100 d + 10 p + t % 7``."""

    def __init__(self, folder: Path, **config: Any) -> None:
        given = {"aux": ["d2", "d5"], "before_norm": "d9", "after_norm": "d9n", "hidden_size": H, **config}
        self.writer = Writer(HookConfig.of({"staging": str(folder), **given}), writes=True)
        self.packed, self.padding = False, 0

    def state(self, depth: float, tokens: list[int], positions: list[int]) -> Any:
        rows = [[100 * depth + 10 * p + t % 7] * H for t, p in zip(tokens, positions, strict=True)]
        return torch.tensor(rows + [[-1.0] * H] * self.padding)

    def run(self, requests: dict[str, tuple[int, list[int]]], mode: str = "extend") -> None:
        """Run tokens of requests, which begin at a position."""
        tokens = [t for _, ts in requests.values() for t in ts]
        positions = [s + i for s, ts in requests.values() for i in range(len(ts))]
        counts = [len(ts) for _, ts in requests.values()]
        batch = SimpleNamespace(
            forward_mode=Mode(mode), rids=list(requests), positions=torch.tensor(positions),
            extend_prefix_lens_cpu=[s for s, _ in requests.values()] if mode == "extend" else None,
            extend_seq_lens_cpu=counts if mode == "extend" else None,
        )  # fmt: skip
        aux = [self.state(d, tokens, positions) for d in (2, 5)]
        residual, normed = self.state(9, tokens, positions), self.state(9.5, tokens, positions)
        self.writer.hook(None, (residual, residual), (normed, residual))
        ids = torch.tensor(tokens + [0] * self.padding, dtype=torch.int32)
        given = torch.cat(aux, -1) if self.packed else aux
        self.writer.hook(None, (ids, normed, None, batch, given), SimpleNamespace(next_token_logits=None))


@pytest.fixture
def scheduler(tmp_path):
    (tmp_path / "out").mkdir()
    return Scheduler(tmp_path)


@pytest.fixture
def parts(tmp_path):
    found = Parts(tmp_path, RUN, KEYS)
    found.expect(OURS)
    found.expect(OTHER)
    return found


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "out")


def assert_states(path: Path, tokens: list[int], scheduler: Scheduler) -> None:
    arrays, positions = load_file(path), list(range(len(tokens)))
    assert sorted(arrays) == sorted([*KEYS, TOKENS])
    assert arrays[TOKENS].tolist() == tokens
    scheduler.padding = 0
    for key, depth in zip(KEYS, (2, 5, 9, 9.5), strict=True):
        assert torch.equal(arrays[key], scheduler.state(depth, tokens, positions)), key


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_prompt_in_one_pass_beside_others(scheduler, parts, tmp_path, packed, padding):
    scheduler.packed, scheduler.padding = packed, padding
    scheduler.run({"HEALTH_CHECK_7": (0, [9]), OTHER: (0, [3, 4]), OURS: (0, [5, 6, 7]), "../../x": (0, [1, 2])})
    assert parts.take(OURS, 3, tmp_path / "out" / "a") == [5, 6, 7]
    assert_states(tmp_path / "out" / "a", [5, 6, 7], scheduler)
    parts.drop(OURS)
    assert [n.split(".")[0] for n in left(tmp_path)] == [OTHER]


def test_chunks_and_an_answer_are_joined_and_removed(scheduler, parts, tmp_path):
    scheduler.run({OURS: (0, [5, 6])})
    scheduler.run({OTHER: (0, [8]), OURS: (2, [7])})
    scheduler.padding = 2
    scheduler.run({OURS: (3, [11]), OTHER: (1, [12])}, mode="decode")
    scheduler.run({}, mode="idle")
    scheduler.run({OURS: (4, [13]), OTHER: (2, [14])}, mode="decode")
    assert parts.take(OURS, 5, tmp_path / "out" / "a") == [5, 6, 7, 11, 13]
    assert_states(tmp_path / "out" / "a", [5, 6, 7, 11, 13], scheduler)
    parts.drop(OURS)
    assert len(left(tmp_path)) == 3  # OTHER's
    # A step beyond the last token, which an engine that works ahead runs, is no state of the record.
    assert parts.take(OTHER, 2, tmp_path / "out" / "b") == [8, 12]
    parts.drop(OTHER)
    assert left(tmp_path) == []
    scheduler.run({OURS: (5, [15])}, mode="decode")
    assert parts.look()
    assert left(tmp_path) == []


def test_a_decode_step_that_is_run_as_an_extension(scheduler, parts, tmp_path):
    scheduler.run({OURS: (0, [5, 6])})
    batch_mode = Mode("decode")
    original = scheduler.writer.hook

    def relabelled(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) > 3:
            inputs[3].forward_mode, inputs[3]._original_forward_mode = Mode("extend"), batch_mode
        original(module, inputs, output)

    scheduler.writer.hook = relabelled
    scheduler.padding = 3
    scheduler.run({OURS: (2, [7])}, mode="decode")
    assert parts.take(OURS, 3, tmp_path / "out" / "a") == [5, 6, 7]
    assert_states(tmp_path / "out" / "a", [5, 6, 7], scheduler)


def test_a_request_that_was_taken_back_begins_anew(scheduler, parts, tmp_path):
    scheduler.run({OURS: (0, [5, 6])})
    scheduler.run({OURS: (2, [7])}, mode="decode")
    scheduler.run({OURS: (0, [5, 6, 7])})
    scheduler.run({OURS: (3, [8])}, mode="decode")
    assert parts.take(OURS, 4, tmp_path / "out" / "a") == [5, 6, 7, 8]
    assert_states(tmp_path / "out" / "a", [5, 6, 7, 8], scheduler)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([(3, [8, 9])], "rows 0 to 2 are missing"),  # a prefix cache
        ([(0, [5, 6]), (3, [8, 9])], "rows 2 to 2 are missing"),
        ([(0, [5, 6, 7]), (2, [7, 8, 9])], "rows 2 to 2 came twice"),
        ([(0, [5, 6, 7])], "3 rows came, not 5"),
        ([], "0 rows came, not 5"),
    ],
)
def test_gaps_and_overlaps_are_refused(scheduler, parts, tmp_path, passes, message):
    for start, tokens in passes:
        scheduler.run({OURS: (start, tokens)})
    with pytest.raises(Incomplete, match=message):
        parts.take(OURS, 5, tmp_path / "out" / "a")
    parts.drop(OURS)
    assert left(tmp_path) == []


def test_captures_that_are_not_wanted_are_left_out(scheduler, tmp_path):
    parts = Parts(tmp_path, RUN, ("d5",))
    parts.expect(OURS)
    scheduler.run({OURS: (0, [5, 6])})
    parts.take(OURS, 2, tmp_path / "out" / "a")
    assert sorted(load_file(tmp_path / "out" / "a")) == ["d5", TOKENS]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"aux": ["d2", "d5", "d7"]}, "aux states of widths"),
        ({"hidden_size": 8}, "aux states of widths"),
    ],
)
def test_what_the_engine_gives_otherwise_ends_the_run(tmp_path, parts, config, message):
    (tmp_path / "out").mkdir()
    Scheduler(tmp_path, **config).run({OURS: (0, [5, 6])})
    with pytest.raises(RuntimeError, match=message):
        parts.take(OURS, 2, tmp_path / "out" / "a")


def test_a_norm_that_is_not_the_final_one_is_not_taken_for_it(scheduler, parts, tmp_path):
    kept = sglang_hook._same
    sglang_hook._same = lambda a, b: False
    try:
        scheduler.run({OURS: (0, [5, 6])})
    finally:
        sglang_hook._same = kept
    with pytest.raises(RuntimeError, match="no final norm was seen"):
        parts.take(OURS, 2, tmp_path / "out" / "a")


def test_rows_that_are_shared_among_ranks_end_the_run(scheduler, parts, tmp_path):
    scheduler.state = lambda depth, tokens, positions: torch.zeros(len(tokens) // 2, H)
    scheduler.run({OURS: (0, [5, 6, 7, 8])})
    with pytest.raises(RuntimeError, match="ran 4 tokens, and gave 2 rows"):
        parts.take(OURS, 4, tmp_path / "out" / "a")


def test_a_disk_that_is_full_is_told_with_its_number(scheduler, parts, tmp_path, monkeypatch):
    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scheduler.writer, "_save", full)
    scheduler.run({OURS: (0, [5, 6])})
    with pytest.raises(OSError, match="No space") as e:
        parts.take(OURS, 2, tmp_path / "out" / "a")
    assert e.value.errno == errno.ENOSPC
    parts.drop(OURS)
    (tmp_path / f"{OURS}.aa.000000001.fault").touch()  # not even the reason could be written
    parts.expect(OURS)
    with pytest.raises(OSError, match="took nothing more"):
        parts.take(OURS, 2, tmp_path / "out" / "a")


def test_another_rank_writes_nothing(tmp_path):
    scheduler = Scheduler(tmp_path)
    scheduler.writer.writes = False
    scheduler.run({OURS: (0, [5, 6])})
    assert left(tmp_path) == []


def test_nothing_is_left_of_a_run_that_is_cleared(scheduler, parts, tmp_path):
    scheduler.run({OURS: (0, [5, 6]), OTHER: (0, [5])})
    (tmp_path / "hsffffffff-1.aa.000000001.0.2.part").touch()  # another run's
    parts.clear()
    assert left(tmp_path) == ["hsffffffff-1.aa.000000001.0.2.part"]


def test_the_metadata_of_a_step_names_its_rows(scheduler, tmp_path):
    scheduler.run({OURS: (7, [5]), OTHER: (9, [6])}, mode="decode")
    (name,) = left(tmp_path)
    with safe_open(str(tmp_path / name), framework="pt") as f:
        assert json.loads(f.metadata()["segments"]) == [[OURS, 7], [OTHER, 9]]
