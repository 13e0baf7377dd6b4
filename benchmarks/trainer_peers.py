"""Our trainer beside that of speculators 0.9 on a CPU: tokens a second, tokens a CPU second, peak memory of training.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 speculators==0.9.0
    PEER/bin/pip uninstall -y torchvision torchaudio
    OMP_WAIT_POLICY=PASSIVE python benchmarks/trainer_peers.py --peer-python PEER/bin/python

(torchvision is removed where it does not fit the CPU build of torch.) Each run is a process of its own, A B A B ...;
the median over runs is printed. What is measured is a run as a user starts it: ``hsformat_trainer.loop.train`` and
``speculators train``, from the end of the last warm-up step to the end of the last step, loader, packing, forward,
backward, clipping, AdamW, schedule, log and progress bar included; neither evaluates nor saves in that time.

The data is a store of ours (``--store`` with ``--target``), or one of made-up states in the sizes of SmolLM2-135M,
whose target distributions have their argmax at the next token; speculators reads the same records in its own format,
bfloat16.

Equal: records, tokens a step, draft (one Llama layer, trained parameters are printed), frozen head, draft vocabulary
and its map, K, decay 1, KL to the target's distribution, supervised rows (mask rule ``input``, which is
speculators'; both counts are printed), AdamW with weight decay 0.01, linear schedule, clipping at 1, float32
weights, threads, passive OpenMP waiting. Not equal: speculators computes logits of unsupervised rows, too, and
multiplies the loss by 0; reads its records in the training process (``--num-workers 0``, as processes would compete
for the cores; ours reads in threads, whose CPU time counts); attends by ``--peer-attention`` (without it: eager in
bf16, sdpa in fp32); takes no account of rows whose target lies outside of the draft vocabulary, for which we compute
no loss.

Ours also finds out which targets lie in the draft vocabulary: of records that the target wrote greedily, as the made-up
ones say of themselves (``--mode greedy``: their argmax is the next token), by the tokens; of others (``--mode none``)
in the first epoch by a product with the other rows of the head, and keeps it; ``--epoch 2`` measures the second.
speculators computes the same in each, and validates and saves in between, so that its first is measured.

Measured are fp32 and, where the processor has instructions for bfloat16, bf16 (``--precision``). Without them bf16
says nothing: products in bfloat16 are so slow there (speculators had not made three steps after four minutes, on a
busy machine) that our trainer takes float32 ones (``hsformat_trainer.precision``), and the ratio is that of the two
kinds of product.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from step_marks import Marks

import hsformat as hs
from hsformat.extraction import make_contract
from hsformat.layout import parse_capture_key
from hsformat.record import Generation, Provenance, Record
from hsformat.target import describe
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.gate import admit
from hsformat_trainer.vocabulary import vocabulary_for

HIDDEN, VOCAB, LAYERS = 576, 49_152, 30
AUX = (2, 15, 27)
HERE = Path(__file__).parent
Found = dict[str, Any]


def make_target(folder: Path) -> Path:
    """Write a folder with what trainers read of a target: config, embedding (tied to the head), final norm; random."""
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}, "tie_word_embeddings": True,
        "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "initializer_range": 0.02,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    embedding = (np.random.default_rng(0).standard_normal((VOCAB, HIDDEN), np.float32) / 24).astype(ml_dtypes.bfloat16)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(HIDDEN, ml_dtypes.bfloat16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_records(
    target: Path, *, count: int, tokens: int, prompt: float, vocab: int, mode: Literal["none", "greedy"]
) -> Iterator[Record]:
    """Yield records of random states; every id of a draft vocabulary of ``vocab`` ids is supervised somewhere.

    The last token of a record is not supervised: its target distribution would be for a token past the record, which
    speculators trains on and we do not.
    """
    from safetensors.numpy import load_file

    generation = Generation(mode=mode, max_new_tokens=tokens if mode == "greedy" else None)
    rng = np.random.default_rng(1)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    chosen = rng.permutation(VOCAB - 8)[:vocab] + 8
    mask = np.zeros(tokens, np.uint8)
    mask[int(prompt * tokens) : -1] = 1
    supervised = int(mask.sum())
    answers = np.concatenate([rng.permutation(chosen) for _ in range(-(-count * supervised // vocab))])
    for i in range(count):
        own = rng.choice(chosen, tokens).astype(np.int32)
        own[mask == 1] = answers[i * supervised : (i + 1) * supervised]
        states = [rng.standard_normal((tokens, HIDDEN), np.float32) for _ in range(4)]
        states[3] = 20 * embedding[np.roll(own, -1)] + 0.1 * states[3]  # the argmax is the next token
        keys = [*(f"d{d}" for d in AUX), f"d{LAYERS}"]
        hidden = {k: s.astype(ml_dtypes.bfloat16) for k, s in zip(keys, states, strict=True)}
        yield Record(
            id=f"r{i}", input_ids=own, loss_mask=mask, hidden=hidden, provenance=Provenance(generation=generation)
        )


def make_store(path: Path, target: Path, args: argparse.Namespace) -> None:
    described = describe(target)
    contract = make_contract(
        described.model, tokenizer_digest=described.tokenizer_digest, aux=AUX, last="pre", codec="compact"
    )
    with hs.create(path, contract) as writer:
        for record in make_records(
            target,
            count=args.records,
            tokens=args.tokens,
            prompt=args.prompt_share,
            vocab=args.draft_vocab,
            mode=args.mode,
        ):
            writer.append(record)


def config_of(args: argparse.Namespace, store: Path, target: Path, precision: str, out: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "stores": [str(store)], "held_out": "none", "target": str(target), "serve": ["vllm@0.32.0"],
            "out": str(out), "draft_vocab_size": args.draft_vocab, "train_head": False, "steps": args.k, "decay": 1.0,
            "loss": "kl", "mask_rule": "input", "max_steps": 10_000, "batch_tokens": args.tokens, "lr": 1e-3,
            "weight_decay": 0.01, "schedule": "linear", "warmup": 0.0, "clip": 1.0, "precision": precision,
            "device": "cpu", "save_every": 0, "eval_every": 0, "log_every": 10,
        }
    )  # fmt: skip


def export(
    store: Path, config: TrainConfig, data: Path, peer: str, *, without: frozenset[str] = frozenset()
) -> list[str]:
    """Write the records and the draft vocabulary as speculators reads them; return its ids of the aux layers.

    ``hs_<i>.safetensors`` with hidden_states [T, aux + 1, H] (the last one before the final norm) and token_ids [T];
    records ``without`` are left out.
    """
    from safetensors.numpy import save_file

    admitted = admit(config)
    layout, source = admitted.layout, hs.open(store)
    (data / "hidden_states").mkdir(parents=True)
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for i, record_id in enumerate(r for r in source.ids if r not in without):
        record = source[record_id]
        states = np.stack([record.hidden[k] for k in layout.keys], axis=1)
        ids = record.input_ids[: len(states)].astype(np.int64)
        tensors = {"hidden_states": np.ascontiguousarray(states), "token_ids": ids}
        save_file(tensors, data / "hidden_states" / f"hs_{i}.safetensors")
        columns["input_ids"].append(ids.tolist())
        columns["loss_mask"].append(record.loss_mask[: len(ids)].astype(int).tolist())
        columns["seq_len"].append(len(ids))
    (data / "rows.json").write_text(json.dumps(columns))
    if (vocabulary := vocabulary_for(config, admitted)) is not None:
        np.save(data / f"d2t-{len(vocabulary.d2t)}.npy", vocabulary.d2t)
        np.save(data / f"t2d-{len(vocabulary.d2t)}.npy", vocabulary.t2d)
    subprocess.run([peer, HERE / "speculators_on_cpu.py", "write", data], check=True, capture_output=True)
    return [str(parse_capture_key(k)[0]) for k in layout.aux]


def ours(args: argparse.Namespace) -> None:
    """Train in this process, with a mark after each optimizer step."""
    import torch

    from hsformat.torch import Packed
    from hsformat_trainer import loop, parts, step
    from hsformat_trainer.batch import TrainBatch

    before = (args.epoch - 1) * args.records  # batches of one record each
    marks = Marks(args.child, warmup=args.warmup + before, steps=args.steps)

    class Marked(step.Stepper):
        def __init__(self, model: torch.nn.Module, *rest: Any, **options: Any) -> None:
            super().__init__(model, *rest, **options)
            trained = [p for p in model.parameters() if p.requires_grad]
            marks.facts = {
                "trained_parameters": sum(p.numel() for p in trained),
                "threads": torch.get_num_threads(),
                "dtypes": sorted({str(p.dtype) for p in trained}),
            }

        def _batch(self, packed: Packed) -> TrainBatch:
            batch = super()._batch(packed)
            self.supervised = batch.counts.tolist()
            return batch

        def __call__(self, packed: Any) -> step.Numbers:
            numbers = super().__call__(packed)
            marks.step(tokens=numbers.tokens, supervised=self.supervised)
            return numbers

    parts.Stepper = Marked  # type: ignore[misc]  # as timed
    with tempfile.TemporaryDirectory() as out:
        config = config_of(args, args.store, args.target, args.precision, Path(out))
        loop.train(config, admit(config))


def command_of(name: str, args: argparse.Namespace, precision: str, data: Path, layers: list[str]) -> list[str]:
    """Return the command of a run; its result goes to the file ``data / "found.json"``."""
    found = str(data / "found.json")
    if name == "hsformat":
        common = {"k": args.k, "draft-vocab": args.draft_vocab, "tokens": args.tokens, "warmup": args.warmup}
        common |= {
            "steps": args.steps,
            "records": args.records,
            "epoch": args.epoch,
            "store": args.store,
            "target": args.target,
            "precision": precision,
        }
        flags = [str(x) for k, v in common.items() for x in (f"--{k}", v)]
        return [sys.executable, __file__, "--child", found, *flags]
    attention = args.peer_attention or {"bf16": "eager", "fp32": "sdpa"}[precision]
    options = {
        "epochs": 1000, "total-seq-len": args.tokens, "draft-vocab-size": args.draft_vocab, "train-data-ratio": 0.98,
        "hidden-states-dtype": {"bf16": "bfloat16", "fp32": "float32"}[precision], "draft-attn-impl": attention,
        "ttt-steps": args.k, "ttt-step-loss-decay": 1.0, "weight-decay": 0.01, "scheduler-warmup-steps": 0,
        "scheduler-total-steps": 10_000, "log-freq": 10,
    }  # fmt: skip
    flags = peer_flags(args.target, data, layers, options)
    driver = [args.peer_python, str(HERE / "speculators_on_cpu.py"), "train"]
    return [*driver, found, str(args.warmup), str(args.steps), "--", *flags]


def peer_flags(target: Path | str, data: Path, layers: list[str], options: dict[str, object]) -> list[str]:
    """Return the arguments of ``speculators train`` on a CPU, on data that :func:`export` wrote."""
    common = {
        "speculator-type": "eagle3", "verifier-name-or-path": target, "data-path": data,
        "hidden-states-path": data / "hidden_states", "loss-fn": "kl_div", "loss-implementation": "eager",
        "num-workers": 0, "optimizer": "adamw", "lr": 1e-3, "scheduler-type": "linear", "on-missing": "raise",
        "full-attention-indices": 0, "mask-token-id": 0, "save-path": data / "checkpoints",
    }  # fmt: skip
    flags = [str(x) for k, v in {**common, **options}.items() for x in (f"--{k}", v)]
    flags += ["--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output", "--no-resume-from-checkpoint"]
    return [*flags, "--target-layer-ids", *layers]


def measure(name: str, args: argparse.Namespace, precision: str, data: Path, layers: list[str]) -> Found:
    cores = str(len(os.sched_getaffinity(0)))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), cores)
    env = {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    (data / "found.json").unlink(missing_ok=True)
    command = command_of(name, args, precision, data, layers)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=args.limit)
    except subprocess.TimeoutExpired:
        sys.exit(
            f"{name} in {precision} did not make its steps in {args.limit:.0f} s: see --limit, --steps, --precision"
        )
    if not (data / "found.json").exists():
        sys.exit(
            f"{name} ended with {done.returncode} before its last step:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return dict(json.loads((data / "found.json").read_text()))


def report(precision: str, runs: dict[str, list[Found]]) -> None:
    def median(name: str, *keys: str) -> float:
        return statistics.median(r[keys[0]] / (r[keys[1]] if keys[1:] else 1) for r in runs[name])

    table = Table("trainer", "tokens/s", "tokens/CPU s", "peak MB", "trained", "tokens", "supervised rows by step")
    rows = {}
    for name, found in runs.items():
        rows[name] = (median(name, "tokens", "seconds"), median(name, "tokens", "cpu_seconds"), median(name, "peak_mb"))
        numbers = [f"{x:.0f}" for x in rows[name]]
        one = found[0]
        table.add_row(name, *numbers, f"{one['trained_parameters']:,}", str(one["tokens"]), str(one["supervised"]))
    ratios = [a / b for a, b in zip(rows["hsformat"], rows["speculators"], strict=True)]
    table.add_row("ratio", *(f"{r:.2f}" for r in ratios), "", "", "")
    console = Console(width=150)
    first = runs["hsformat"][0]
    console.print(
        f"{precision}: {len(runs['hsformat'])} runs each, {first['threads']} threads, weights {first['dtypes']}"
    )
    console.print(table)
    for name, found in runs.items():
        speeds = ", ".join(f"{r['tokens'] / r['seconds']:.0f} ({r['tokens'] / r['cpu_seconds']:.0f})" for r in found)
        console.print(f"{name}: tokens/s (a CPU second) of each run: {speeds}")


def has_bfloat16() -> bool:
    """Return whether this processor has instructions for products in bfloat16, as Linux names them."""
    return any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16", "bf16 "))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="Python of an environment with speculators 0.9.0")
    parser.add_argument("--store", type=Path, help="a store of ours; without: one of made-up states")
    parser.add_argument("--target", type=Path, help="folder of the store's target")
    parser.add_argument("--precision", default="fp32,bf16" if has_bfloat16() else "fp32")
    parser.add_argument("--peer-attention", choices=["eager", "sdpa"])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=512, help="of a batch, and of a made-up record")
    parser.add_argument("--prompt-share", type=float, default=0.3, help="tokens of a made-up record without loss")
    parser.add_argument("--mode", choices=["greedy", "none"], default="greedy", help="of made-up records")
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=3, help="steps left out")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epoch", type=int, default=1, help="of ours, from 1, with made-up records: what is measured")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run may take")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is None and args.peer_python is None:
        parser.error("--peer-python is needed")
    if (args.store is None) != (args.target is None):
        parser.error("--store and --target are given together")
    return args


def main() -> None:
    args = arguments()
    if args.child is not None:
        ours(args)
        return
    work = Path(tempfile.mkdtemp(prefix="trainer_peers-"))
    try:
        if args.store is None:
            args.target = make_target(work / "target")
            args.store = work / "data.hs.zarr"
            make_store(args.store, args.target, args)
        source = hs.open(args.store)
        tokens = sum(source.read(i, captures=()).num_tokens for i in range(len(source)))
        if 0.98 * tokens < args.tokens * (args.warmup + args.steps):
            sys.exit("too few records: speculators would validate and save within the measured steps")
        data = work / "speculators"
        layers = export(
            args.store, config_of(args, args.store, args.target, "fp32", work / "none"), data, args.peer_python
        )
        for precision in args.precision.split(","):
            runs: dict[str, list[Found]] = {"hsformat": [], "speculators": []}
            for _ in range(args.runs):
                for name, found in runs.items():
                    found.append(measure(name, args, precision, data, layers))
            report(precision, runs)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
