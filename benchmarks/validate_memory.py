"""Peak memory and time of validation: python benchmarks/validate_memory.py [--gib 2.5] [--records N] [--codec fast] .

Two stores are written to a temporary folder: one of ``--gib`` GiB of states (records of 2,000 tokens, 4,096 channels, 4
captures, bfloat16, random), and one of ``--records`` tiny records in segments of 2,000. Each is validated by
``python -m hsformat.validate`` in a process of its own; memory is that process's peak resident set, imports included.
(Linux counts the memory of a process before it starts another program, so that this one must stay small: the stores
are written in processes of their own, too.)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import hsformat as hs

CAPTURES, TOKENS, HIDDEN = 4, 2_000, 4_096
TINY_HIDDEN, SEGMENT = 8, 2_000


def make_contract(hidden: int, codec: str) -> hs.Contract:
    """Return a contract of 4 captures."""
    import hsformat as hs

    def digest(fill: str) -> str:
        return f"sha256:{fill * 64}"

    depths = (2, 16, 29, 32)
    return hs.Contract(
        spec_version="1.0",
        target=hs.TargetModel(
            name="synthetic", revision=None, architecture="LlamaForCausalLM", num_layers=32, hidden_size=hidden,
            vocab_size=128_000, dtype="bfloat16", quantization=None, embedding=hs.Embedding(scale=1.0, tied=False),
            head=hs.Head(bias=False, softcap=None, scale=1.0, padded_vocab=128_000),
            final_norm=hs.FinalNorm(kind="rmsnorm", eps=1e-5, unit_offset=False), rope=(),
            config_digest=digest("1"), basis_digest=digest("2"), weights_digest=None,
        ),
        tokenizer_digest=digest("3"),
        captures=tuple(hs.Capture(depth=d, norm="none", dtype="bfloat16") for d in depths),
        positions="1d",
        codec=codec,
        fields=(),
        layout=hs.Layout(aux=tuple(f"d{d}" for d in depths[:-1]), last=f"d{depths[-1]}"),
    )  # fmt: skip


def records(contract: hs.Contract, count: int, tokens: int) -> Iterator[hs.Record]:
    """Yield records of one random array of states."""
    import ml_dtypes
    import numpy as np

    import hsformat as hs

    rng = np.random.default_rng(0)
    states = rng.standard_normal((tokens, contract.target.hidden_size), dtype=np.float32).astype(ml_dtypes.bfloat16)
    ids, mask = rng.integers(0, 128_000, tokens), np.ones(tokens, np.uint8)
    for i in range(count):
        hidden: dict[str, Any] = dict.fromkeys(contract.keys, states)
        yield hs.Record(id=f"record-{i:07}", input_ids=ids, loss_mask=mask, hidden=hidden)


def validate(store: Path, level: str) -> tuple[float, float, float, str]:
    """Return peak resident set in MiB, CPU and wall seconds, and the last line of what was printed."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "hsformat.validate", str(store), "--level", level], stdout=subprocess.PIPE, text=True
    )
    told = process.stdout.read().splitlines()[-1] if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {told}")
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime, time.perf_counter() - start, told


def write(store: str, codec: str, hidden: int, tokens: int, count: int) -> None:
    """Write a store of random records."""
    import hsformat as hs

    contract = make_contract(hidden, codec)
    with hs.create(store, contract) as writer:
        for i, record in enumerate(records(contract, count, tokens), start=1):
            writer.append(record)
            if i % SEGMENT == 0:
                writer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.5)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--codec", choices=("compact", "fast"), default="compact")
    parser.add_argument("--write", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        store, codec, *numbers = args.write
        write(store, codec, *map(int, numbers))
        return
    print(f"{'store':18} {'level':9} {'peak MiB':>9} {'CPU s':>7} {'wall s':>7}  what it said")
    for name, hidden, tokens, count in (
        (f"{args.gib:g} GiB", HIDDEN, TOKENS, round(args.gib * 2**30 / (2 * HIDDEN * TOKENS * CAPTURES))),
        (f"{args.records:,} records", TINY_HIDDEN, 2, args.records),
    ):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            store = f"{folder}/x.hs.zarr"
            numbers = map(str, (hidden, tokens, count))
            subprocess.run([sys.executable, __file__, "--write", store, args.codec, *numbers], check=True)
            for level in ("metadata", "sample", "full"):
                peak, cpu, wall, told = validate(Path(store), level)
                print(f"{name:18} {level:9} {peak:9.0f} {cpu:7.2f} {wall:7.2f}  {told.split(': ', 2)[-1]}", flush=True)


if __name__ == "__main__":
    main()
