"""Speed of a training step beside its matrix products alone: python benchmarks/trainer_speed.py [--target FOLDER] .

A draft of SmolLM2-135M's sizes (hidden 576, vocabulary 49,152), K = 3 steps, AdamW, batches of 512 tokens in records of
134 (41 of a prompt, 93 of an answer: the mean of the data in docs/benchmarks.md) and random states; with ``--target``
(the folder that examples/make_demo_target.py makes) the real embedding, norm and head. Cases are interleaved in one
process, and the median is printed; the peak of memory is that of a process of its own a case.

Cases: ``step``: forward, backward and AdamW with the records' own masks. ``all supervised``: the same with one record
whose every token is supervised, so that no row is left out. ``floor``: the matrix products of ``all supervised`` alone,
from buffers, in bfloat16 or in float32, whichever is faster here; one product with the target's whole vocabulary, and
one with the draft's a step. All count all 512 tokens. ``--fp32`` leaves autocast out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow a shared machine

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hsformat.contract import TargetModel
from hsformat.target import describe
from hsformat.torch import TensorRecord, pack
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.draft import Draft
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.objective import CHUNK_ELEMENTS, ttt_loss
from hsformat_trainer.precision import head_product
from hsformat_trainer.target_head import TargetHead
from hsformat_trainer.vocabulary import DraftVocabulary

HIDDEN, VOCAB, AUX, STEPS = 576, 49_152, ("d2", "d15", "d27"), 3
PROMPT, ANSWER = 41, 93
Case = Callable[[], None]


def target_of(folder: Path | None) -> TargetHead:
    if folder is not None:
        return TargetHead.load(folder, describe(folder), dtype=None, device="cpu")
    facts = {
        "name": "random", "revision": None, "architecture": "LlamaForCausalLM", "num_layers": 30,
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "dtype": "bfloat16", "quantization": None,
        "embedding": {"scale": 1.0, "tied": True},
        "head": {"bias": False, "softcap": None, "scale": 1.0, "padded_vocab": VOCAB},
        "final_norm": {"kind": "rmsnorm", "eps": 1e-5, "unit_offset": False}, "rope": (),
        "config_digest": f"sha256:{'1' * 64}", "basis_digest": f"sha256:{'2' * 64}", "weights_digest": None,
    }  # fmt: skip
    weight = torch.randn(VOCAB, HIDDEN) * 0.1
    return TargetHead(TargetModel.model_validate(facts), embed_weight=weight, head_weight=weight,
                      norm_weight=torch.ones(HIDDEN))  # fmt: skip


def draft_of(target: TargetHead, vocab: int, *, train_head: bool) -> Draft:
    spec = DraftSpec(
        target_hidden_size=HIDDEN, num_aux=len(AUX), hidden_size=HIDDEN, intermediate_size=1536, num_layers=1,
        num_heads=9, num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=8192, vocab_size=VOCAB,
        rope={"rope_type": "default", "rope_theta": 100_000.0}, draft_vocab_size=vocab, norm_before_residual=False,
        norm_before_fc=False, fc_norm=False, norm_output=False, later_layers_norm=None, train_embedding=False,
        train_head=train_head,
    )  # fmt: skip
    ids = np.sort(np.random.default_rng(0).permutation(VOCAB)[:vocab])
    t2d = np.zeros(VOCAB, np.bool_)
    t2d[ids] = True
    vocabulary = DraftVocabulary(d2t=ids - np.arange(vocab), t2d=t2d, coverage=1.0)
    return Draft(spec, vocabulary=None if vocab == VOCAB else vocabulary, target=target)


def batch_of(tokens: int, *, all_supervised: bool) -> TrainBatch:
    lengths = [tokens] if all_supervised else [PROMPT + ANSWER] * (tokens // (PROMPT + ANSWER))
    lengths += [tokens - sum(lengths)] if sum(lengths) < tokens else []
    records = []
    for i, length in enumerate(lengths):
        mask = torch.ones(length, dtype=torch.bool)
        mask[: 0 if all_supervised else length * PROMPT // (PROMPT + ANSWER)] = False
        records.append(
            TensorRecord(
                id=f"r{i}", input_ids=torch.randint(0, VOCAB, (length,)), loss_mask=mask,
                position_ids=torch.arange(length), token_fields={}, record_fields={},
                hidden={k: torch.randn(length, HIDDEN).bfloat16() for k in (*AUX, "d30")},
            )
        )  # fmt: skip
    return TrainBatch.from_packed(pack(records), aux=AUX, last="d30", steps=STEPS)


def step_of(draft: Draft, target: TargetHead, batch: TrainBatch, *, autocast: bool) -> Case:
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with context:
            result = ttt_loss(draft, target, batch, steps=STEPS, decay=1.0, loss="kl")
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def floor_of(tokens: int, vocab: int, *, train_head: bool, dtype: torch.dtype) -> Case:
    """Return the products of a step in which every row is computed, each from a buffer: forward and both gradients."""

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    shapes = [(2 * HIDDEN, 9 * 64), (2 * HIDDEN, 3 * 64), (2 * HIDDEN, 3 * 64), (9 * 64, HIDDEN)]
    shapes = [*shapes, (HIDDEN, 1536), (HIDDEN, 1536), (1536, HIDDEN)] * STEPS + [(len(AUX) * HIDDEN, HIDDEN)]
    chunk = max(64, CHUNK_ELEMENTS // vocab)
    products = [
        (some(tokens, i), some(o, i), some(tokens, o), o == HIDDEN and i == len(AUX) * HIDDEN) for i, o in shapes
    ]
    hidden, head, logits = some(chunk, HIDDEN), some(vocab, HIDDEN), some(chunk, vocab)
    full = some(VOCAB, HIDDEN)

    def floor() -> None:
        for x, w, g, first in products:
            x @ w.T
            g.T @ x
            if not first:
                g @ w
        for _ in range(0, tokens, chunk):
            head_product(hidden, full)
            for _ in range(STEPS):
                head_product(hidden, head)
                logits @ head
                if train_head:
                    logits.T @ hidden

    return floor


def cases_of(args: argparse.Namespace) -> dict[str, Case]:
    target = target_of(args.target)
    draft = draft_of(target, args.vocab, train_head=args.train_head)
    cases = {
        "step": step_of(draft, target, batch_of(args.tokens, all_supervised=False), autocast=not args.fp32),
        "all supervised": step_of(draft, target, batch_of(args.tokens, all_supervised=True), autocast=not args.fp32),
    }
    dtype = min((torch.float32, torch.bfloat16), key=_product_time)
    name = f"floor, {str(dtype).removeprefix('torch.')}"
    return {**cases, name: floor_of(args.tokens, args.vocab, train_head=args.train_head, dtype=dtype)}


def _product_time(dtype: torch.dtype) -> float:
    """Return the CPU seconds of a small product: bfloat16 without instructions for it is the slower one."""
    a, b = torch.randn(32, HIDDEN).to(dtype), torch.randn(1024, HIDDEN).to(dtype)
    return min(_timed(lambda: a @ b.T)[1] for _ in range(5))


def _timed(case: Case) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    case()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak(args: argparse.Namespace, name: str) -> float:
    """Return the peak resident MB of a process that does three steps of a case."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["peak_mb"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--train-head", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", help="do a case three times, print its peak of memory as JSON")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.only:
        target = target_of(args.target)
        draft = draft_of(target, args.vocab, train_head=args.train_head)
        batch = batch_of(args.tokens, all_supervised=args.only == "all supervised")
        for _ in range(3):
            step_of(draft, target, batch, autocast=not args.fp32)()
        # Not ru_maxrss, which a process takes over from the one that started it.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sys.stdout.write(json.dumps({"peak_mb": int(status["VmHWM"].split()[0]) / 1024}))
        return
    cases = cases_of(args)
    for case in cases.values():
        case()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(args.runs):
        for name, case in cases.items():
            found[name].append(_timed(case))
    table = Table("case", "tokens/s", "tokens/CPU s", "of the floor (CPU)", "peak MB")
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    least = next(m for name, m in medians.items() if name.startswith("floor"))
    for name, (wall, cpu) in medians.items():
        memory = "" if name.startswith("floor") else f"{peak(args, name):.0f}"
        table.add_row(name, f"{args.tokens / wall:.0f}", f"{args.tokens / cpu:.0f}", f"{least[1] / cpu:.2f}", memory)
    head = "trained" if args.train_head else "frozen"
    Console().print(
        f"{args.tokens} tokens, draft vocabulary {args.vocab}, head {head}, {torch.get_num_threads()} threads"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
