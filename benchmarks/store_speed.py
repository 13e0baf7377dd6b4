"""Stores beside one file a record: python benchmarks/store_speed.py --target build/demo/target [--repeats 7] .

Every case writes, and reads in random order, the same records: real states of the target (576 channels for the demo's)
and random ones of 7,168 channels. In each repeat all cases run one after another, so that what else the machine does
falls on all; the table has medians, and ratios to safetensors in the same repeat. An epoch is all records in their
order, by threads that read one each. CPU time is that of the process and all its threads. Reading is from the page
cache. Everything that is written is flushed to the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hsformat as hs
from hsformat.store.backend import Data
from hsformat.store.local import LocalBackend

KEYS = ("d1", "d2", "d3", "d4")


def digest(fill: str) -> str:
    return f"sha256:{fill * 64}"


def contract(hidden: int) -> hs.Contract:
    captures = tuple(hs.Capture(depth=d, norm="none", dtype="bfloat16") for d in (1, 2, 3, 4))
    return hs.Contract(
        spec_version="1.0",
        target=hs.TargetModel(
            name="benchmark", revision=None, architecture="LlamaForCausalLM", num_layers=4, hidden_size=hidden,
            vocab_size=128_000, dtype="bfloat16", quantization=None, embedding=hs.Embedding(scale=1.0, tied=False),
            head=hs.Head(bias=False, softcap=None, scale=1.0, padded_vocab=128_000),
            final_norm=hs.FinalNorm(kind="rmsnorm", eps=1e-5, unit_offset=False),
            rope=(hs.Rope(applies_to="all", kind="default", theta=1e4, rotary_dim=64, parameters={}),),
            config_digest=digest("1"), basis_digest=digest("2"), weights_digest=None,
        ),
        tokenizer_digest=digest("3"), captures=captures, positions="1d", codec="fast", fields=(),
        layout=hs.Layout(aux=KEYS[:3], last=KEYS[3]),
    )  # fmt: skip


def real_records(target: Path, n: int, tokens: int) -> tuple[hs.Contract, list[hs.Record]]:
    """Run the target over the demo's prompts, joined to sequences; its depths 2, 15, 27 and 30 are d1 to d4."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = Path("examples/data/demo_prompts.jsonl").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(target)(text).input_ids
    ids = (ids * (1 + n * tokens // len(ids)))[: n * tokens]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    depths, records = (2, 15, 27, 30), []
    for i in range(n):
        piece = ids[i * tokens : (i + 1) * tokens]
        pre: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _module, args, pre=pre: pre.append(args[0]))
        with torch.no_grad():
            states = model(torch.tensor([piece]), output_hidden_states=True).hidden_states
        hook.remove()
        hidden = {k: (states[d] if d < 30 else pre[0])[0] for k, d in zip(KEYS, depths, strict=True)}
        records.append(record(f"r{i}", piece, hidden))
    return contract(records[0].hidden["d1"].shape[1]), records


def wide_records(n: int, tokens: int, hidden: int = 7168) -> tuple[hs.Contract, list[hs.Record]]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(n):
        states = {k: (rng.standard_normal((tokens, hidden), np.float32) * 8).astype(ml_dtypes.bfloat16) for k in KEYS}
        out.append(record(f"r{i}", rng.integers(0, 1000, tokens).tolist(), states))
    return contract(hidden), out


def record(rid: str, ids: list[int], hidden: dict[str, Any]) -> hs.Record:
    return hs.Record(id=rid, input_ids=np.array(ids), loss_mask=np.ones(len(ids), np.uint8), hidden=hidden)


@dataclass
class Sample:
    """What an action took, in seconds."""

    wall: float
    cpu: float


def timed(action: Callable[[], Any]) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


class Files:
    """One file a record, in three kinds."""

    def __init__(self, folder: Path, records: list[hs.Record]) -> None:
        self.folder, self.records = folder, records
        self.tensors = [
            {k: torch.from_numpy(v.view(np.uint16)).view(torch.bfloat16) for k, v in r.hidden.items()}
            | {"input_ids": torch.from_numpy(r.input_ids), "loss_mask": torch.from_numpy(r.loss_mask)}
            for r in records
        ]

    def write(self, kind: str) -> None:
        """Write all records as files of a kind."""
        for r, tensors in zip(self.records, self.tensors, strict=True):
            path = self.folder / f"{r.id}.{kind}"
            if kind == "safetensors":
                save_file(tensors, path)
            elif kind == "torch":
                torch.save(tensors, path)
            else:
                path.write_bytes(b"".join(v.tobytes() for v in r.hidden.values()))
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def read(self, kind: str, i: int, keys: tuple[str, ...]) -> Any:
        """Return captures of a record."""
        path = self.folder / f"{self.records[i].id}.{kind}"
        if kind == "safetensors":
            with safe_open(path, "pt") as f:
                return {k: f.get_tensor(k).clone() for k in (*keys, "input_ids", "loss_mask")}
        if kind == "torch":
            return torch.load(path, weights_only=True)
        sizes = [self.records[i].hidden[k].nbytes for k in keys]
        parts = [np.empty(n, np.uint8) for n in sizes]
        fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, parts, 0)
        os.close(fd)
        return parts


def cases(folder: Path, made: tuple[hs.Contract, list[hs.Record]], threads: int) -> Iterator[tuple[str, str, Any]]:
    """Yield (what is done, by which case, the action) in the order in which they must first run."""
    shape, records = made
    files = Files(folder, records)
    order = np.random.default_rng(1).permutation(len(records)).tolist()

    def write(codec: str, threads: int, name: str = "written") -> None:
        path = folder / f"{name}.hs.zarr"
        shutil.rmtree(path, ignore_errors=True)
        with hs.create(path, shape, codec=codec, threads=threads) as out:  # type: ignore[arg-type]  # as timed
            for r in records:
                out.append(r)

    for codec in ("fast", "compact"):
        write(codec, threads, codec)
    for kind in ("preadv", "safetensors", "torch"):
        yield "write", kind, lambda kind=kind: files.write(kind)
    for codec in ("fast", "compact"):
        for n in (1, threads):
            yield "write", f"{codec}, {n} thread(s)", lambda codec=codec, n=n: write(codec, n)
    for keys, what in ((KEYS, "read"), (KEYS[1:2], "read one capture")):
        for kind in ("preadv", "safetensors", "torch"):

            def read(kind: str = kind, keys: tuple[str, ...] = keys) -> None:
                for i in order:
                    files.read(kind, i, keys)

            yield what, kind, read
        for name, codec, options in (
            ("fast", "fast", {}), ("fast, unverified", "fast", {"verify": False}),
            ("fast, zarr-python", "fast", {"decoder": "zarr"}), ("compact", "compact", {}),
        ):  # fmt: skip
            opened: list[hs.Store] = []

            def read_store(
                codec: str = codec, options: Any = options, opened: Any = opened, keys: tuple[str, ...] = keys
            ) -> None:
                if not opened:
                    opened.append(hs.open(folder / f"{codec}.hs.zarr", **options))
                for i in order:
                    opened[0].read(i, captures=keys)

            yield what, name, read_store
    for workers in (1, 2):
        for name in ("safetensors", "torch", "fast", "compact"):
            yield f"epoch, {workers} worker(s)", name, epoch(folder, files, name, workers)


def epoch(folder: Path, files: Files, name: str, workers: int) -> Callable[[], None]:
    """Return what reads all records in their order, each let go of when the next few are there."""
    opened: list[hs.Store] = []

    def one(i: int) -> None:
        if opened:
            opened[0].read(i)
        else:
            files.read(name, i, KEYS)

    def run() -> None:
        if not opened and name in ("fast", "compact"):
            opened.append(hs.open(folder / f"{name}.hs.zarr"))
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(one, range(len(files.records))):
                pass

    return run


def measure(folder: Path, title: str, made: tuple[hs.Contract, list[hs.Record]], repeats: int, threads: int) -> None:
    nbytes = sum(r.nbytes for r in made[1])
    actions = list(cases(folder, made, threads))
    samples: dict[tuple[str, str], list[Sample]] = {(what, name): [] for what, name, _ in actions}
    for _ in range(repeats + 1):
        for what, name, action in actions:
            samples[what, name].append(timed(action))
    print(f"\n### {title}: {len(made[1])} records, {nbytes / 1e6:.0f} MB\n")
    print("| | case | MB per CPU s | MB/s | of safetensors, CPU | wall |\n|---|---|---|---|---|---|")
    for (what, name), found in samples.items():
        used, base = found[1:], samples[what, "safetensors"][1:]  # the first one is for the caches
        cpu, wall = (statistics.median(getattr(s, field) for s in used) for field in ("cpu", "wall"))
        pairs = list(zip(base, used, strict=True))
        of_cpu, of_wall = (
            f"{statistics.median(getattr(b, f) / getattr(s, f) for b, s in pairs):.2f}" for f in ("cpu", "wall")
        )
        speeds = f"{nbytes / cpu / 1e6:,.0f} | {nbytes / wall / 1e6:,.0f}"
        print(f"| {what} | {name} | {speeds} | {of_cpu} | {of_wall} |")
    for name in ("safetensors", "torch", "fast", "compact"):
        one, two = (samples[f"epoch, {n} worker(s)", name][1:] for n in (1, 2))
        times = statistics.median(a.wall / b.wall for a, b in zip(one, two, strict=True))
        print(f"\nepoch of {name}: two workers are {times:.2f} times as fast as one", end="")
    print()
    for codec in ("fast", "compact"):
        entries = LocalBackend(str(folder / f"{codec}.hs.zarr")).listing("")
        size = sum(e.size for e in entries)
        print(f"\n{codec}: {len(entries)} files, {size:,} bytes, {size / nbytes:.3f} of the states' bytes")


def opening(folder: Path, segments: int, each: int) -> None:
    """Time opening and metadata validation of a store of many records: one segment's commit record, many times."""
    shape = contract(8)
    path = folder / "many.hs.zarr"
    states = {k: np.ones((2, 8), ml_dtypes.bfloat16) for k in KEYS}
    with hs.create(path, shape, threads=1) as out:
        for n in range(segments):
            for i in range(each):
                out.append(record(f"s{n}-{i:04}", [1, 2], states))
            out.flush()
    calls = 0
    real = LocalBackend.read

    def counted(self: LocalBackend, key: str, start: int = 0, length: int | None = None) -> Data:
        nonlocal calls
        calls += 1
        return real(self, key, start, length)

    LocalBackend.read = counted  # type: ignore[method-assign, assignment]  # as timed
    found = [timed(lambda: hs.open(path)) for _ in range(5)]
    LocalBackend.read = real  # type: ignore[method-assign]  # as timed
    checked = [timed(lambda: hs.validate_store(path, level="metadata")) for _ in range(3)]
    for what, some in (("open", found), ("validate --level metadata", checked)):
        wall, cpu = (statistics.median(getattr(s, f) for s in some) for f in ("wall", "cpu"))
        print(f"\n{what}, {segments * each:,} records in {segments:,} segments: {wall:.2f} s, {cpu:.2f} CPU s", end="")
    print(f"; {calls / 5:.0f} files read to open")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("build/demo/target"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1_700, help="of a record")
    parser.add_argument("--records", type=int, default=20, help="of real states; there are 8 wide ones")
    parser.add_argument("--segments", type=int, default=1_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.segments:
            opening(folder, args.segments, 100)
        for name, title, make in (
            ("real", "Real states", lambda: real_records(args.target, args.records, args.tokens)),
            ("wide", "7,168 channels", lambda: wide_records(8, args.tokens)),
        ):
            (folder / name).mkdir()
            measure(folder / name, title, make(), args.repeats, args.threads)
            shutil.rmtree(folder / name)


if __name__ == "__main__":
    sys.exit(main())
