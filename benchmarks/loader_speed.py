"""Speed of the loader beside a plain loop over ``store.read``: python benchmarks/loader_speed.py [--work] .

A synthetic store of random bfloat16 states (three aux captures and a last one), records of 512 to 3,000 tokens in
segments of 32 MiB; the file cache is warm. Each case reads every record once, in batches of 8,192 tokens; cases are
interleaved, and the median of their runs is printed. MB are those of the states; CPU seconds are those of this process
and of its worker processes. With ``--work`` the consumer multiplies matrices for a tenth of a second a batch, as
training does, on one core; its CPU time is left out, as far as it is spent meanwhile by its own thread.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import hsformat as hs
from hsformat.testing import tiny_contract, tiny_record
from hsformat.torch import RecordDataset, RecordLoader

CAPTURES = 4
CASES: list[tuple[str, Any, int, Any]] = [
    ("store.read", None, 0, None),
    *(("in order", None, n, "thread") for n in (0, 1, 2)),
    *(("by segment", "segment", n, "thread") for n in (0, 1, 2)),
    *(("by segment", "segment", n, "fork") for n in (1, 2)),
    *(("by record", "record", n, "thread") for n in (0, 2)),
]
"""Name, ``shuffle``, workers, their type."""


def write(path: Path, *, codec: str, width: int, mib: int) -> None:
    contract = tiny_contract(codec=codec, target={"hidden_size": width})
    rng = np.random.default_rng(0)
    states = rng.standard_normal((3000, width), dtype=np.float32).astype(ml_dtypes.bfloat16)
    left = mib * 2**20
    with hs.create(path, contract, segment_bytes=32 * 2**20) as writer:
        while left > 0:
            tokens = int(rng.integers(512, 3001))
            hidden = dict.fromkeys(contract.keys, states[:tokens])
            writer.append(tiny_record(contract, f"r{left}", tokens, hidden=hidden))
            left -= tokens * width * 2 * CAPTURES


def cpu() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(p.ru_utime + p.ru_stime for p in parts)


def measure(path: Path, case: tuple[str, Any, int, Any], *, work: bool) -> dict[str, float]:
    """Read the store once; return MB, seconds, CPU seconds, and seconds in which the consumer waited."""
    name, shuffle, workers, kind = case
    store = hs.open(path)
    batches: Any = (store.read(i) for i in range(len(store)))
    if name != "store.read":
        batches = RecordLoader(
            RecordDataset(store), max_tokens=8192, shuffle=shuffle, workers=workers, worker_type=kind
        )
    matrix = torch.ones(512, 512)
    nbytes, waited, worked = 0, 0.0, 0.0
    used, start = cpu(), time.perf_counter()
    asked = start
    for batch in batches:
        waited += time.perf_counter() - asked
        nbytes += sum(h.nbytes for h in batch.hidden.values())
        del batch
        if work:
            own, until = time.thread_time(), time.perf_counter() + 0.1
            while time.perf_counter() < until:
                matrix @ matrix
            worked += time.thread_time() - own
        asked = time.perf_counter()
    return {
        "mb": nbytes / 1e6,
        "wall": time.perf_counter() - start,
        "cpu": cpu() - used - worked,
        "waited": waited,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for codec in ("fast", "compact"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.hs.zarr"
            write(path, codec=codec, width=args.width, mib=args.mib)
            runs: list[list[dict[str, float]]] = [[] for _ in CASES]
            for _ in range(args.repeats):
                for case, of_case in zip(CASES, runs, strict=True):
                    of_case.append(measure(path, case, work=args.work))
        table = Table(title=f"{codec}, {args.mib} MiB, width {args.width}, median of {args.repeats}")
        for name in ("order", "workers", "MB/s", "MB per CPU s", "waited, s"):
            table.add_column(name, justify="right")
        for (name, _, workers, kind), of_case in zip(CASES, runs, strict=True):
            m = {k: statistics.median(run[k] for run in of_case) for k in of_case[0]}
            who = "" if kind is None else f"{workers} {kind}" if workers else "0"
            table.add_row(name, who, f"{m['mb'] / m['wall']:,.0f}", f"{m['mb'] / m['cpu']:,.0f}", f"{m['waited']:.2f}")
        Console().print(table)


if __name__ == "__main__":
    main()
