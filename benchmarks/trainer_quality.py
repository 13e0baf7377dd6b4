"""What a draft is worth after a bounded training: walked acceptance length on held-out records, and CPU seconds.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/trainer_quality.py --data FILE --target build/demo/target \
        --cache build/quality --seeds 0,1,2

``FILE`` is JSON Lines with ``ids`` (prompt and answer, which the target wrote greedily), ``prompt_len`` and
``split`` (``train`` or ``val``). Their states are extracted once into ``--cache`` (the Transformers extractor;
captures d2, d15, d27 and d30 before the final norm); the share of answer tokens that are the argmax of the stored
states is printed, since only for the target's own greedy answers the walk is what a server would do. Then each seed
is trained: K = 3, decay 0.8, draft vocabulary of 8,192 ids, frozen head, a norm of each capture (``fc_norm``), linear
schedule from 1e-3, batches of 176 packed tokens (mostly one record), four epochs: the best of what docs/benchmarks.md
names. ``--set`` changes an option of the trainer (``--set epochs=6 --set lr=2e-3``),
``--records`` takes few records, to try it out; ``--float32`` runs the target in float32, for processors without
instructions for bfloat16 (there, extraction from ten records took 58 CPU seconds, from twenty in float32 16).

CPU seconds are those of the whole process while it trains, the evaluations before and after left out and told apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

import hsformat as hs
from hsformat.extraction import ExtractionRequest, eagle3_depths, extract_to_store, find_extractor, make_contract
from hsformat.record import Generation, TokenSample
from hsformat.target import describe
from hsformat_trainer import loop
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.evaluator import Evaluator
from hsformat_trainer.gate import admit
from hsformat_trainer.target_head import TargetHead


def rows_of(data: Path, count: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield id and line; if only ``count`` are wanted, the first ones of both splits, a tenth of them held out."""
    left = {"train": -1, "val": -1} if count is None else {"train": count - count // 10, "val": count // 10}
    for i, line in enumerate(data.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        if left[row["split"]]:
            left[row["split"]] -= 1
            yield f"{row['split']}-{i}", row


def in_float32(model: Path, folder: Path) -> Path:
    """Return a copy of a target with its weights in float32, made if it is not there."""
    from safetensors.numpy import load_file, save_file

    if not (folder / "config.json").exists():
        shutil.copytree(
            model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True
        )
        for file in model.glob("*.safetensors"):
            tensors = {k: v.astype(np.float32) for k, v in load_file(file).items()}
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def sample_of(record_id: str, row: dict[str, Any]) -> TokenSample:
    ids = np.array(row["ids"], np.int32)
    mask = (np.arange(len(ids)) >= row["prompt_len"]).astype(np.uint8)
    return TokenSample(id=record_id, input_ids=ids, loss_mask=mask)


def prepare(data: Path, model: Path, cache: Path, count: int | None) -> Path:
    """Extract the states into ``cache``, what is there already left out; return the store."""
    target = describe(model)
    contract = make_contract(
        target.model,
        tokenizer_digest=target.tokenizer_digest,
        aux=eagle3_depths(target.model.num_layers),
        last="pre",
        codec="compact",
    )
    request = ExtractionRequest(
        model=model,
        target=target.model,
        captures=contract.captures,
        generation=Generation(mode="none"),
        batch_tokens=2048,
    )
    samples = [sample_of(record_id, row) for record_id, row in rows_of(data, count)]
    extractor, store = find_extractor("transformers"), cache / "data.hs.zarr"
    if problems := extractor.preflight(request):
        sys.exit("\n".join(map(str, problems)))
    began = time.process_time()
    report = extract_to_store(extractor, samples, request=request, contract=contract, out=store)
    if report.problems:
        sys.exit("\n".join(map(str, report.problems)))
    held_out = [s.id for s in samples if s.id.startswith("val-")]
    (cache / "held_out.txt").write_text("".join(f"{i}\n" for i in held_out))
    cpu = time.process_time() - began
    print(f"{len(samples)} records, {len(held_out)} of them held out; extraction took {cpu:.0f} CPU s")
    return store


@torch.no_grad()
def greedy_share(store: Path, model: Path) -> float:
    """Return the share of answer tokens that are the argmax of the stored states before them."""
    head = TargetHead.load(model, describe(model).model, dtype=torch.float32, device="cpu")
    same = total = 0
    source = hs.open(store)
    for i in range(len(source)):
        record = source[i]
        answer = np.flatnonzero(record.loss_mask)
        states = torch.from_numpy(record.hidden["d30"][answer - 1].astype(np.float32))
        argmax = head.logits(states, normed=False).argmax(-1).numpy()
        same += int((argmax == record.input_ids[answer]).sum())
        total += len(answer)
    return same / total


def config_of(store: Path, model: Path, cache: Path, seed: int, changes: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "stores": [str(store)], "held_out": f"ids:{cache / 'held_out.txt'}", "target": str(model),
            "serve": ["sglang@0.5.23", "vllm@0.32.0"], "out": str(cache / f"run-{seed}"), "seed": seed,
            "draft_vocab_size": 8_192, "train_head": False, "steps": 3, "decay": 0.8, "epochs": 4, "batch_tokens": 176,
            "fc_norm": True, "lr": 1e-3,
            "schedule": "linear", "device": "cpu", "eval_every": 0, "save_every": 0, **changes,
        }
    )  # fmt: skip


def train(config: TrainConfig) -> dict[str, Any]:
    """Train from the beginning; return the last evaluation with ``cpu`` and ``evaluation_cpu`` in seconds."""
    shutil.rmtree(config.out, ignore_errors=True)
    apart = 0.0

    class Timed(Evaluator):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
            nonlocal apart
            began = time.process_time()
            try:
                return super().__call__(*args, **kwargs)
            finally:
                apart += time.process_time() - began

    loop.Evaluator = Timed  # type: ignore[misc]  # as timed
    admitted = admit(config)
    began, wall = time.process_time(), time.perf_counter()
    result = loop.train(config, admitted)
    cpu = time.process_time() - began
    if result.exit_code:
        sys.exit(result.exit_code)
    times = {"cpu": cpu - apart, "evaluation_cpu": apart, "seconds": time.perf_counter() - wall, "steps": result.step}
    return {**result.evaluations[-1], **times, "step": result.step, "tokens": result.tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--float32", action="store_true", help="run the target in float32")
    parser.add_argument("--records", type=int, help="so many records, for a try")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the trainer")
    parser.add_argument("--cpu-seconds", type=float, default=1043, help="what training may take")
    args = parser.parse_args()
    changes = {k: yaml.safe_load(v) for k, _, v in (one.partition("=") for one in args.set)}
    cache = args.cache if args.records is None else args.cache / f"first-{args.records}"
    cache /= "float32" if args.float32 else "own-dtype"
    cache.mkdir(parents=True, exist_ok=True)
    target = in_float32(args.target, args.cache / "target-float32") if args.float32 else args.target
    store = prepare(args.data, target, cache, args.records)
    print(f"answer tokens that are the target's argmax: {greedy_share(store, target):.2%}")

    found = {int(s): train(config_of(store, target, cache, int(s), changes)) for s in args.seeds.split(",")}
    table = Table(
        "seed", "steps", "tokens", "CPU s", "evaluations, CPU s", "wall s", "accepted by position", "walked (95%)"
    )
    for seed, f in found.items():
        low, high = f["interval"] or (float("nan"), float("nan"))
        table.add_row(
            str(seed), str(f["step"]), str(f["tokens"]), f"{f['cpu']:.0f}", f"{f['evaluation_cpu']:.0f}",
            f"{f['seconds']:.0f}", " ".join(f"{x:.3f}" for x in f["acceptance_by_position"]),
            f"{f['acceptance_length']:.3f} ({low:.3f} to {high:.3f})",
        )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(f"{f['records']} held-out records; {f['basis']}")
    lengths, most = [f["acceptance_length"] for f in found.values()], max(f["cpu"] for f in found.values())
    within = "within" if most <= args.cpu_seconds else "MORE THAN"
    cpu = f"CPU seconds at most {most:.0f}, {within} {args.cpu_seconds:.0f}"
    console.print(f"mean of {len(lengths)}: {statistics.mean(lengths):.3f}; {cpu}")


if __name__ == "__main__":
    main()
