"""Extraction from a running vLLM server: hsformat beside speculators 0.9, the same prompts from the same server.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 speculators==0.9.0
    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE VENV/bin/python benchmarks/extraction_peer.py \
        --model build/demo/target --dtype float32 --peer-python PEER/bin/python

In the environment of vLLM (scripts/engines). The server writes vLLM's own format (stock_connector.py). speculators runs
as its command ``generate-offline-data`` with ``--validate-outputs``, which moves each file and compares ids, rows and
finiteness; hsformat writes a store. Both have 32 requests with the server at a time, and prompts that are new to it in
each round, theirs and ours in turns. Seconds are from the first request to the last file, by speculators' own account
and until our store is closed; CPU seconds are of the client and the server, of speculators' client less what the same
command uses when nothing is left to do (imports). Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from extraction_engines import Kept, Meter, Prompts, descendants, draw, samples_of
from rich.console import Console
from rich.table import Table

from hsformat.extraction import ExtractionRequest, eagle3_depths, extract_to_store, find_extractor, make_contract
from hsformat.layout import capture_key
from hsformat.record import Generation
from hsformat.target import describe
from hsformat_extractors.hosted.preflight import installed_version
from hsformat_extractors.hosted.vllm_serve import serve_command

HERE = Path(__file__).parent
PORT, AT_A_TIME = 8123, 32
URL = f"http://127.0.0.1:{PORT}"


class Server:
    """A server of vLLM, ready; its pid for those who measure."""

    def __init__(self, args: argparse.Namespace, depths: tuple[int, ...], storage: Path, log: Path) -> None:
        version = installed_version("vllm") or sys.exit("run this in the environment of vLLM")
        keys = [capture_key(d) for d in depths]
        _, *words = serve_command(
            Path(args.model), keys, storage=str(storage), version=version, dtype=args.dtype, cpu=not args.accelerator
        )
        at = words.index("--kv-transfer-config") + 1
        told = {**json.loads(words[at]), "kv_connector": "StockFormat", "kv_connector_module_path": "stock_connector"}
        told["kv_connector_extra_config"]["use_synchronization_lock"] = True  # which speculators waits for
        words[at] = json.dumps(told)
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ, "PYTHONPATH": path, "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *words, "--port", str(PORT), "--max-num-batched-tokens", "4096"],
                stdout=out, stderr=out, env=environment, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + 600
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=5).close()
            except OSError:
                time.sleep(1)
            else:
                return
        self.close()
        sys.exit(log.read_text()[-4000:])

    def close(self) -> None:
        """End it and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()


class Speculators:
    """``speculators generate-offline-data`` on a folder of prompts."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder

    def __call__(self, prompts: Prompts) -> tuple[float, float, int]:
        """Return seconds, CPU seconds of the client, bytes."""
        data = self.folder / "prompts"
        data.mkdir()
        columns = {
            "input_ids": prompts, "loss_mask": [[1] * len(p) for p in prompts], "seq_len": [len(p) for p in prompts]
        }  # fmt: skip
        (data / "rows.json").write_text(json.dumps(columns))
        subprocess.run([self.python, HERE / "speculators_on_cpu.py", "write", data], check=True, capture_output=True)
        said, used = self._run(data)
        idle = self._run(data)[1]
        files = list((data / "hidden_states").glob("hs_*.safetensors"))
        seconds = re.search(r"Timing: ([\d.]+)s elapsed", said)
        if len(files) != len(prompts) or seconds is None:
            sys.exit(said)
        nbytes = sum(f.stat().st_size for f in files)
        shutil.rmtree(data)
        return float(seconds[1]), used - idle, nbytes

    def _run(self, data: Path) -> tuple[str, float]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        options = ["--endpoint", f"{URL}/v1", "--preprocessed-data", data, "--concurrency", AT_A_TIME]
        done = subprocess.run(
            [self.python, "-m", "speculators", "generate-offline-data", *map(str, options), "--validate-outputs"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return " ".join((done.stdout + done.stderr).split()), used


class Ours:
    """A store, by the extractor of vLLM with a server; loaded once, as a run of many prompts is."""

    def __init__(self, args: argparse.Namespace, depths: tuple[int, ...], storage: Path, server: Server) -> None:
        described = describe(args.model, dtype=args.dtype)
        self.contract = make_contract(
            described.model, tokenizer_digest=described.tokenizer_digest, aux=depths[:-1], last="pre", codec=args.codec
        )
        self.request = ExtractionRequest(
            model=Path(args.model), target=described.model, captures=self.contract.captures,
            generation=Generation(mode="none"), batch_tokens=4096,
            options={"server": URL, "storage": str(storage), "concurrency": str(AT_A_TIME)},
        )  # fmt: skip
        self.extractor = Kept(find_extractor("vllm"))
        if problems := self.extractor.preflight(self.request):
            sys.exit("\n".join(map(str, problems)))
        self.extractor.load(self.request)
        own = os.getpid()
        self.meter = Meter(pids=lambda: sorted({*descendants(own)} - {*descendants(server.process.pid)}))
        self.extractor.begin = self.meter.start

    def __call__(self, prompts: Prompts, out: Path) -> tuple[float, float, int]:
        """Return seconds, CPU seconds of the client, bytes."""
        samples = samples_of(prompts)
        report = extract_to_store(self.extractor, samples, request=self.request, contract=self.contract, out=out)
        seconds, used = self.meter.read()
        assert report.written == len(prompts), report
        nbytes = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
        shutil.rmtree(out)
        return seconds, used, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-python", required=True, help="Python of an environment with speculators 0.9.0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--codec", default="compact")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--accelerator", action="store_true", help="this machine has one")
    args = parser.parse_args()
    model = describe(args.model, dtype=args.dtype).model
    depths = (*eagle3_depths(model.num_layers), model.num_layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (storage := folder / "states").mkdir()
        server = Server(args, depths, storage, folder / "server.log")
        try:
            measure(args, folder, server, Ours(args, depths, storage, server), model.vocab_size)
        finally:
            server.close()


def measure(args: argparse.Namespace, folder: Path, server: Server, ours: Ours, vocab_size: int) -> None:
    theirs = Speculators(args.peer_python, folder)
    served = Meter(pids=lambda: descendants(server.process.pid))
    table = Table(title=f"{args.model}, {args.dtype}, {args.codec}, {args.samples} prompts a round")
    for column in ("tokens", "speculators s", "CPU s", "MB", "hsformat s", "CPU s", "MB", "seconds", "CPU"):
        table.add_column(column, justify="right")
    rng, ratios = np.random.default_rng(0), []
    for number in range(args.rounds + 1):  # the first warms the server up
        prompts = draw(rng, args.samples, vocab_size, args.longest)
        found = {}
        for side in ("speculators", "hsformat") if number % 2 else ("hsformat", "speculators"):
            served.start()
            seconds, used, nbytes = (
                theirs(prompts) if side == "speculators" else ours(prompts, folder / f"{number}.hs.zarr")
            )
            found[side] = (seconds, used + served.read()[1], nbytes)
        if number:
            a, b = found["speculators"], found["hsformat"]
            ratios.append((b[0] / a[0], b[1] / a[1]))
            cells = [f"{x:.1f}" for x in (a[0], a[1], a[2] / 1e6, b[0], b[1], b[2] / 1e6)]
            table.add_row(f"{sum(map(len, prompts)):,}", *cells, *(f"{r:.2f}" for r in ratios[-1]))
    ours.extractor.inner.close()
    console = Console()
    console.print(table)
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    console.print(f"median of hsformat over speculators: {wall:.2f} of the seconds, {cpu:.2f} of the CPU seconds")


if __name__ == "__main__":
    main()
