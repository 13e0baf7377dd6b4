"""Memory that writing takes beyond its caller, and its speed: python benchmarks/segment_memory.py [--gib 1] .

For each case a fresh process appends records of 2,000 tokens and 4,096 channels (bfloat16, random) to a store with the
default ``segment_bytes``, 4 GiB. Memory is what the peak of the process's resident set is above what it had before the
first record (Linux: the peak is set back then); speed is states per CPU second and per second of wall time, the store
closed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = [(captures, codec) for captures in (1, 4) for codec in ("compact", "fast")]
TOKENS, HIDDEN = 2_000, 4_096


def measure(captures: int, codec: str, gib: float) -> dict[str, float]:
    """Write ``gib`` GiB of states; return peak growth in MiB, and MB of states per CPU and wall second."""
    import ml_dtypes
    import numpy as np

    import hsformat as hs

    def digest(fill: str) -> str:
        return f"sha256:{fill * 64}"

    depths = range(1, captures + 1)
    contract = hs.Contract(
        spec_version="1.0",
        target=hs.TargetModel(
            name="synthetic", revision=None, architecture="LlamaForCausalLM", num_layers=32, hidden_size=HIDDEN,
            vocab_size=128_000, dtype="bfloat16", quantization=None, embedding=hs.Embedding(scale=1.0, tied=False),
            head=hs.Head(bias=False, softcap=None, scale=1.0, padded_vocab=128_000),
            final_norm=hs.FinalNorm(kind="rmsnorm", eps=1e-5, unit_offset=False), rope=(),
            config_digest=digest("1"), basis_digest=digest("2"), weights_digest=None,
        ),
        tokenizer_digest=digest("3"),
        captures=tuple(hs.Capture(depth=d, norm="none", dtype="bfloat16") for d in depths),
        positions="1d",
        codec=codec,  # type: ignore[arg-type]  # text from the command line; the model checks it
        fields=(),
        layout=hs.Layout(aux=tuple(f"d{d}" for d in depths), last=None),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    states = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32).astype(ml_dtypes.bfloat16)
    ids, mask = rng.integers(0, 128_000, TOKENS), np.ones(TOKENS, np.uint8)
    count = int(gib * 2**30 / (states.nbytes * captures))
    with tempfile.TemporaryDirectory() as folder:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again: what made the states was larger
        before, cpu, wall = _kib("VmRSS"), time.process_time(), time.perf_counter()
        with hs.create(Path(folder) / "x.hs.zarr", contract) as writer:
            for i in range(count):
                hidden: dict[str, Any] = dict.fromkeys(contract.keys, states)
                writer.append(hs.Record(id=f"r{i}", input_ids=ids, loss_mask=mask, hidden=hidden))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        megabytes = count * captures * states.nbytes / 1e6
        return {"peak": (_kib("VmHWM") - before) / 1024, "cpu": megabytes / cpu, "wall": megabytes / wall}


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        captures, codec = args.case.split(":")
        print(json.dumps(measure(int(captures), codec, args.gib)))
        return
    print(f"{'captures':>9} {'codec':8} {'peak MiB':>9} {'MB / CPU s':>11} {'MB / s':>8}")
    for captures, codec in CASES:
        command = [sys.executable, __file__, "--gib", str(args.gib), "--case", f"{captures}:{codec}"]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row = f"{captures:9} {codec:8} {figures['peak']:9.0f} {figures['cpu']:11.0f} {figures['wall']:8.0f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
