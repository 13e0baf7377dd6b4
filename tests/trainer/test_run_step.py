"""One step: two batches of accumulation, or two processes, give loss and gradient of one batch twice as large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import tiny_admitted, tiny_config, write_data
from training_processes import ended, start_ranks

from hsformat.torch import Packed, RecordDataset, pack
from hsformat_trainer.parts import Parts, build
from hsformat_trainer.processes import Processes
from hsformat_trainer.randomness import seed_all
from hsformat_trainer.sharding import whole
from hsformat_trainer.step import Numbers

pytestmark = pytest.mark.needs("torch")

LEFT, RIGHT = (0, 1), (2, 3, 4, 5, 6)
"""Records of two batches, of which the second has more supervised rows: a mean of means would be another number."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    return folder


def parts_of(folder: Path, **options: Any) -> tuple[Parts, RecordDataset, Processes]:
    config = tiny_config(folder, **options)
    admitted = tiny_admitted(config)
    seed_all(config.seed)
    processes = Processes(config)
    return build(config, admitted, processes, total=10), RecordDataset(admitted.sources[0].source), processes


def batch(dataset: RecordDataset, rows: Sequence[int]) -> Packed:
    return pack([dataset[row] for row in rows])


def weights(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in parts.draft.named_parameters()}


def a_step(folder: Path, batches: Sequence[Sequence[int]], **options: Any) -> tuple[Numbers, dict[str, torch.Tensor]]:
    parts, dataset, processes = parts_of(folder, **options)
    numbers = parts.stepper([batch(dataset, rows) for rows in batches])
    processes.close()
    return numbers, weights(parts)


def assert_same(got: Numbers, wanted: Numbers) -> None:
    """Compare up to the order of float32 sums."""
    assert got.tokens == wanted.tokens
    for name in ("loss", "grad_norm", "losses"):
        assert getattr(got, name) == pytest.approx(getattr(wanted, name), rel=1e-5), name
    assert got.accuracy == wanted.accuracy  # counts


def assert_same_weights(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            got[name], wanted[name], rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


SGD_LIKE = {"lr": 1e-3, "clip": 0.01}
"""Adam's first step is the sign of the gradient, which hides its size: the norm before clipping is compared, too."""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_is_one_larger_batch(data: Path, optimizer: str) -> None:
    options = {**SGD_LIKE, "optimizer": optimizer}
    wanted, weights_wanted = a_step(data, [LEFT + RIGHT], **options)
    got, weights_got = a_step(data, [LEFT, RIGHT], **options)
    assert_same(got, wanted)
    assert_same_weights(weights_got, weights_wanted)
    alone = [a_step(data, [rows], **options)[0].loss for rows in (LEFT, RIGHT)]
    assert abs(np.mean(alone) - wanted.loss) > 1e-3 * wanted.loss  # what the mean of means would have been


def rank_step(folder: Path, rows: Sequence[Sequence[Sequence[int]]], out: Path, options: dict[str, Any]) -> int:
    """Make two steps in this of several processes; the first writes what they gave."""
    parts, dataset, processes = parts_of(folder, **options)
    mine = rows[processes.rank]
    numbers = [parts.stepper([batch(dataset, r) for r in mine]) for _ in range(2)]
    held = weights(parts)
    if processes.first:
        save_file(held, out / "weights.safetensors")
        (out / "numbers.txt").write_text(repr(numbers))
    sharded = processes.sharded
    processes.close()
    torch.distributed.destroy_process_group()
    return 7 if sharded else 0


def read_numbers(out: Path) -> list[Numbers]:
    return eval((out / "numbers.txt").read_text(), {"Numbers": Numbers, "nan": float("nan")})


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("rows", "environment", "options"),
    [
        ([[LEFT[:1], LEFT[1:]], [RIGHT[:1], RIGHT[1:]]], {}, {"optimizer": "muon"}),
        ([[LEFT, RIGHT[:1]], [RIGHT[1:3], RIGHT[3:]]], FSDP2, {}),
    ],
    ids=["ddp", "fsdp2"],
)
def test_two_processes_are_one_larger_batch(
    data: Path, tmp_path: Path, rows: Any, environment: dict[str, str], options: dict[str, Any]
) -> None:
    options = {**SGD_LIKE, **options}
    processes = start_ranks(2, rank_step, data, rows, tmp_path, options, folder=tmp_path, **environment)
    codes = [ended(p) for p in processes]
    told = "".join(p.read_text() for p in sorted(tmp_path.glob("rank*.txt")))
    assert codes == [7 if environment else 0] * 2, told
    parts, dataset, _ = parts_of(data, **options)
    everything = [batch(dataset, LEFT + RIGHT)]
    for got in read_numbers(tmp_path):
        assert_same(got, parts.stepper(everything))
    # Muon rounds to bfloat16 inside: with DDP it sees the same gradient up to float32 sums.
    atol = 5e-5 if options.get("optimizer") == "muon" else 1e-6
    assert_same_weights(load_file(tmp_path / "weights.safetensors"), weights(parts), atol)
