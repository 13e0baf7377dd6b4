"""Extraction and storing over an engine's plain prefill of the same prompts: at most 20% more wall time on two cores.

OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE VENV/bin/python benchmarks/extraction_engines.py --engine vllm \
    --model build/demo/target

In the environment of an engine (scripts/engines). Both engines are loaded, one that runs the prompts for one token each
and nothing else, one that extracts four captures into a store; they run the same prompts in turns, and medians over the
rounds are compared. Time counts from the first prompt to the closed store; loading is left out. ``--requests 1000``
extracts so many more and samples memory on the way. Needs Linux (/proc).
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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hsformat.extraction import ExtractionRequest, eagle3_depths, extract_to_store, find_extractor, make_contract
from hsformat.extraction.protocol import Extractor, Rejected
from hsformat.problems import Problem
from hsformat.record import Generation, Record, TokenSample
from hsformat.target import describe

Prompts = Sequence[Sequence[int]]
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


# The engine without extraction: this file again, in a process of its own.


def plain_vllm(args: argparse.Namespace) -> Callable[[Prompts], None]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    os.environ.update(VLLM_HOST_IP="127.0.0.1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams

    engine: Any = LLM(
        model=args.model, dtype=args.dtype, skip_tokenizer_init=True, enforce_eager=args.eager, seed=0,
        max_num_batched_tokens=args.batch_tokens, max_num_seqs=min(256, args.batch_tokens),
        enable_prefix_caching=False, disable_log_stats=True, **json.loads(args.engine_args),
    )  # fmt: skip
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    return lambda prompts: engine.generate([{"prompt_token_ids": list(p)} for p in prompts], one, use_tqdm=False)


def plain_sglang(args: argparse.Namespace) -> Callable[[Prompts], None]:
    if args.eager:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang

    from hsformat_extractors.hosted.sglang_args import engine_arguments, plan_captures
    from hsformat_extractors.hosted.wire import Launch

    target = describe(args.model, dtype=args.dtype).model
    launch = Launch(
        model=args.model, architecture=target.architecture, num_layers=target.num_layers,
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, dtype=target.dtype, captures=(), staging="",
        batch_tokens=args.batch_tokens, options={"engine_args": args.engine_args},
    )  # fmt: skip
    plan = plan_captures(sglang.__version__, launch)
    given = engine_arguments(launch, plan, staging="", cpu=args.eager)
    given.pop("forward_hooks")
    engine: Any = sglang.Engine(**given, log_level="error")
    one = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    return lambda prompts: engine.generate(input_ids=[list(p) for p in prompts], sampling_params=one)


PLAIN = {"vllm": plain_vllm, "sglang": plain_sglang}


def serve_plain(args: argparse.Namespace) -> None:
    """Read files of prompts on stdin, a name a line; answer each on descriptor ``args.serve_plain``."""
    with os.fdopen(args.serve_plain, "w") as answers:
        run = PLAIN[args.engine](args)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            run(json.loads(Path(line.strip()).read_text()))
            print("done", file=answers, flush=True)


class Plain:
    """The engine without extraction, in its process."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        read, write = os.pipe()
        command = [sys.executable, __file__, *words, "--serve-plain", str(write)]
        log = (folder / "plain.log").open("wb")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write], text=True
        )
        os.close(write)
        self._answers, self._prompts = os.fdopen(read), folder / "prompts.json"
        if self._answers.readline() != "ready\n":
            sys.exit((folder / "plain.log").read_text()[-4000:])

    def run(self, prompts: Prompts) -> None:
        """Run prompts."""
        self._prompts.write_text(json.dumps(prompts))
        assert self.process.stdin is not None
        print(self._prompts, file=self.process.stdin, flush=True)
        assert self._answers.readline() == "done\n"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


# The engine with extraction.


class Kept:
    """An extractor that stays loaded from one store to the next, and notes when it takes the first sample."""

    def __init__(self, inner: Extractor) -> None:
        self.inner, self.name = inner, inner.name
        self.loaded = False
        self.begin: Callable[[], None] = lambda: None

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        """As the inner one."""
        return self.inner.preflight(request)

    def load(self, request: ExtractionRequest) -> None:
        """Load once."""
        if not self.loaded:
            self.inner.load(request)
            self.loaded = True

    def extract(self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
        """As the inner one, after ``begin``."""
        self.begin()
        return self.inner.extract(samples, stopping=stopping)

    def producer(self) -> dict[str, Any]:
        """As the inner one."""
        return self.inner.producer()

    def close(self) -> None:
        """Stay loaded."""


# What the system says of processes.


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        out.append(todo.pop())
        todo += children.get(out[-1], [])
    return out


def cpu_seconds(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def rss_mib(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * PAGE / 2**20


@dataclass(kw_only=True)
class Meter:
    """Wall and CPU seconds of some processes since ``start``."""

    pids: Callable[[], list[int]]
    begun: float = 0.0
    used: float = 0.0

    def start(self) -> None:
        """Begin."""
        self.begun, self.used = time.perf_counter(), cpu_seconds(self.pids())

    def read(self) -> tuple[float, float]:
        """Return wall and CPU seconds."""
        return time.perf_counter() - self.begun, cpu_seconds(self.pids()) - self.used


def draw(rng: np.random.Generator, count: int, vocab_size: int, longest: int) -> list[list[int]]:
    """Return random ids of the lengths of short conversations."""
    lengths = np.clip(rng.lognormal(5.0, 0.6, count), 16, longest).astype(int)
    return [rng.integers(3, vocab_size, n).tolist() for n in lengths]


def samples_of(prompts: Prompts) -> list[TokenSample]:
    return [
        TokenSample(id=f"s{i}", input_ids=np.array(p, np.int32), loss_mask=np.ones(len(p), np.uint8))
        for i, p in enumerate(prompts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(PLAIN), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=0, help="extract so many more and sample memory")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--codec", default="compact")
    parser.add_argument("--engine-args", default="{}", help="of both engines, as JSON")
    parser.add_argument("--accelerator", dest="eager", action="store_false", help="this machine has one")
    parser.add_argument("--serve-plain", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_plain is not None:
        serve_plain(args)
        return
    with tempfile.TemporaryDirectory() as name:
        measure(args, Path(name))


def measure(args: argparse.Namespace, folder: Path) -> None:
    described = describe(args.model, dtype=args.dtype)
    contract = make_contract(
        described.model, tokenizer_digest=described.tokenizer_digest,
        aux=eagle3_depths(described.model.num_layers), last="pre", codec=args.codec,
    )  # fmt: skip
    request = ExtractionRequest(
        model=Path(args.model), target=described.model, captures=contract.captures, generation=Generation(mode="none"),
        batch_tokens=args.batch_tokens, options={"engine_args": args.engine_args},
    )  # fmt: skip
    extractor = Kept(find_extractor(args.engine))
    if problems := extractor.preflight(request):
        sys.exit("\n".join(map(str, problems)))
    plain = Plain(sys.argv[1:], folder)
    extractor.load(request)
    plains = Meter(pids=lambda: descendants(plain.process.pid))
    ours = Meter(pids=lambda: sorted(set(descendants(os.getpid())) - set(descendants(plain.process.pid))))
    extractor.begin = ours.start
    rng, console = np.random.default_rng(0), Console()

    def extract(prompts: Prompts) -> tuple[float, float]:
        out = folder / "bench.hs.zarr"
        report = extract_to_store(extractor, samples_of(prompts), request=request, contract=contract, out=out)
        measured = ours.read()
        assert report.written == len(prompts), report
        shutil.rmtree(out)
        return measured

    def prefill(prompts: Prompts) -> tuple[float, float]:
        plains.start()
        plain.run(prompts)
        return plains.read()

    rows = []
    for number in range(args.rounds + 1):  # the first warms both up
        prompts = draw(rng, args.samples, described.model.vocab_size, args.longest)
        first = number % 2
        a = extract(prompts) if first else prefill(prompts)
        b = prefill(prompts) if first else extract(prompts)
        (without, with_) = (b, a) if first else (a, b)
        if number:
            rows.append((sum(map(len, prompts)), *without, *with_))
    show(args, rows, console)
    if args.requests:
        memory(extractor, request, draw(rng, args.requests, described.model.vocab_size, args.longest), ours, console)
    plain.close()
    extractor.inner.close()


def show(args: argparse.Namespace, rows: list[tuple[float, ...]], console: Console) -> None:
    table = Table(title=f"{args.engine}, {args.model}, {args.dtype}, {args.codec}, {args.samples} prompts a round")
    for name in ("tokens", "prefill s", "CPU s", "extraction s", "CPU s", "wall", "CPU"):
        table.add_column(name, justify="right")
    for tokens, wall, cpu, more, more_cpu in rows:
        table.add_row(f"{tokens:,.0f}", f"{wall:.2f}", f"{cpu:.2f}", f"{more:.2f}", f"{more_cpu:.2f}",
                      f"{more / wall - 1:+.1%}", f"{more_cpu / cpu - 1:+.1%}")  # fmt: skip
    console.print(table)
    wall = statistics.median(r[3] / r[1] for r in rows) - 1
    cpu = statistics.median(r[4] / r[2] for r in rows) - 1
    console.print(f"median overhead: {wall:+.1%} of wall time, {cpu:+.1%} of CPU seconds")


def memory(extractor: Kept, request: ExtractionRequest, prompts: Prompts, ours: Meter, console: Console) -> None:
    """Extract without storing; print the resident memory of this process and of the engine's processes on the way."""
    own = os.getpid()
    table = Table(title=f"memory over {len(prompts):,} requests, MiB")
    for name in ("requests", "this process", "engine"):
        table.add_column(name, justify="right")
    step = max(1, len(prompts) // 20)
    engines = []
    for done, found in enumerate(extractor.extract(iter(samples_of(prompts)), stopping=lambda: False), 1):
        assert isinstance(found, Record), found
        if done % step == 0:
            engine = rss_mib(set(ours.pids()) - {own})
            engines.append(engine)
            table.add_row(f"{done:,}", f"{rss_mib([own]):.0f}", f"{engine:.0f}")
    console.print(table)
    quarter = len(engines) // 4
    early, late = statistics.median(engines[quarter : 2 * quarter]), statistics.median(engines[-quarter:])
    console.print(f"engine, last quarter over second quarter: {late - early:+.0f} MiB")


if __name__ == "__main__":
    main()
