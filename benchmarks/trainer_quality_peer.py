"""A draft of speculators 0.9 beside ours on the same held-out records: walked acceptance length, paired by record.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/trainer_quality_peer.py train --cache build/quality/float32 \
        --target build/quality/target-float32 --peer-python PEER/bin/python --out build/peer
    python benchmarks/trainer_quality_peer.py compare --cache build/quality/float32 \
        --target build/quality/target-float32 --peer build/peer DRAFT ...

``--cache`` is what trainer_quality.py extracted. ``train`` writes its records but the held-out ones as speculators
reads them and runs ``speculators train`` on a CPU (speculators_on_cpu.py): K = 3, draft vocabulary of 16,384 ids,
frozen head, linear schedule from 1e-3, sequences packed to 512 tokens, four epochs, float32. ``compare`` walks the
held-out records with each draft (ours exported by ``hsformat export-draft``), greedily, and resamples records (the
same for both sides) for the difference of the lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_peers import export, peer_flags

from hsformat.target import describe
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.data import eval_loader
from hsformat_trainer.draft import Draft
from hsformat_trainer.evaluate import RecordScore, acceptance_length, evaluate_records
from hsformat_trainer.gate import admit
from hsformat_trainer.target_head import TargetHead
from hsformat_trainer.vocabulary import vocabulary_for

HERE = Path(__file__).parent
VOCABULARY, K, TOKENS = 16_384, 3, 512
RESAMPLES = 20_000


def config_of(args: argparse.Namespace, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "stores": [str(args.cache / "data.hs.zarr")], "held_out": f"ids:{args.cache / 'held_out.txt'}",
            "target": str(args.target), "serve": ["vllm@0.32.0"], "out": str(args.cache / "none"), "steps": K,
            "draft_vocab_size": VOCABULARY, "train_head": False, "device": "cpu", "precision": "fp32", **changes,
        }
    )  # fmt: skip


def train(args: argparse.Namespace) -> None:
    """Write the data and run speculators' trainer to its end."""
    held_out = frozenset((args.cache / "held_out.txt").read_text().split())
    layers = export(args.cache / "data.hs.zarr", config_of(args), args.out, str(args.peer_python), without=held_out)
    driver = [str(args.peer_python), str(HERE / "speculators_on_cpu.py")]
    options = {
        "epochs": 4, "total-seq-len": TOKENS, "draft-vocab-size": VOCABULARY, "hidden-states-dtype": "float32",
        "train-data-ratio": 0.995, "ttt-steps": K, "draft-attn-impl": "sdpa",
    }  # fmt: skip
    flags = peer_flags(args.target, args.out, layers, options)
    began, before = time.monotonic(), os.times()
    command = [*driver, "train", str(args.out / "marks.json"), "0", str(10**9), "--", *flags]
    subprocess.run(command, check=True, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"})
    used = os.times()
    cpu = used.children_user + used.children_system - before.children_user - before.children_system
    print(f"speculators: {cpu:.0f} CPU s, {time.monotonic() - began:.0f} s")


@torch.no_grad()
def scores_of(args: argparse.Namespace, config: TrainConfig, weights: Path) -> list[RecordScore]:
    """Walk the held-out records with the draft in a folder: of speculators, or one that was exported."""
    admitted = admit(config)
    target = TargetHead.load(args.target, describe(args.target).model, dtype=torch.float32, device="cpu")
    draft = Draft(admitted.spec, vocabulary=vocabulary_for(config, admitted), target=target, init=str(weights))
    loader = eval_loader(config, admitted)
    assert loader is not None
    scores = evaluate_records(draft.float(), target, loader, layout=admitted.layout, steps=K)
    return sorted(scores, key=lambda s: s.id)


def compare(args: argparse.Namespace) -> None:
    """Print the length of each draft and the interval of the difference, by resampling records."""
    peer_weights = max((p.parent for p in args.peer.glob("checkpoints/*/model.safetensors")), key=_number)
    sides = {"speculators": [scores_of(args, config_of(args), peer_weights)]}
    sides["hsformat"] = [scores_of(args, *_ours(args, draft)) for draft in args.drafts]
    for name, found in sides.items():
        print(name, " ".join(f"{acceptance_length(scores):.3f}" for scores in found))
    theirs, ours = ([_sums(scores) for scores in sides[name]] for name in ("speculators", "hsformat"))
    chosen = np.random.Generator(np.random.PCG64(0))
    n, differences = len(sides["hsformat"][0]), np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        counts = np.bincount(chosen.integers(0, n, n), minlength=n)
        lengths = [
            [1 + (counts @ accepted) / (counts @ rounds) for accepted, rounds in side] for side in (ours, theirs)
        ]
        differences[i] = np.mean(lengths[0]) - np.mean(lengths[1])
    low, high = np.quantile(differences, [0.025, 0.975])
    print(f"mean of ours less theirs: {differences.mean():+.3f}, 95% of resampled records {low:+.3f} to {high:+.3f}")


def _number(folder: Path) -> int:
    return int("".join(filter(str.isdigit, folder.name)) or -1)


def _ours(args: argparse.Namespace, draft: Path) -> tuple[TrainConfig, Path]:
    """Return the config of trainer_quality.py for an exported draft, and its folder."""
    exported = json.loads((draft / "config.json").read_text())
    return config_of(args, fc_norm=True, draft_vocab_size=exported["draft_vocab_size"]), draft


def _sums(scores: list[RecordScore]) -> tuple[Any, Any]:
    return np.array([sum(s.accepted) for s in scores]), np.array([s.rounds for s in scores])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run in (("train", train), ("compare", compare)):
        sub = commands.add_parser(name)
        sub.set_defaults(run=run)
        sub.add_argument("--cache", type=Path, required=True)
        sub.add_argument("--target", type=Path, required=True)
        if name == "train":
            sub.add_argument("--peer-python", type=Path, required=True)
            sub.add_argument("--out", type=Path, required=True)
        else:
            sub.add_argument("--peer", type=Path, required=True)
            sub.add_argument("drafts", type=Path, nargs="+")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
