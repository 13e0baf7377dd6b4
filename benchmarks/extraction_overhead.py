"""Share of extraction's wall time outside the model's forward pass: at most 15% on SmolLM2-135M and two cores.

OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python benchmarks/extraction_overhead.py --model build/demo/target

``extract_to_store`` is run as ``hsformat extract`` runs it, on random ids of the lengths of short conversations, with
four captures. Time counts from the first sample to the closed store; loading is left out. Forward is what the model
alone takes: copying captures inside of it counts as outside. PASSIVE keeps OpenMP's idle threads from spinning on the
cores that the codec needs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hsformat.extraction import ExtractionRequest, eagle3_depths, extract_to_store, make_contract
from hsformat.extraction.protocol import Rejected
from hsformat.record import Generation, Record, TokenSample
from hsformat.target import describe
from hsformat_extractors._capture import Capturer
from hsformat_extractors.transformers import TransformersExtractor


class TimedCapturer(Capturer):
    """Measures the copying of captures inside the forward pass, and the pass."""

    keeping = running = 0.0

    def _keep(self, key: str, x_BTH: torch.Tensor) -> None:
        start = time.perf_counter()
        super()._keep(key, x_BTH)
        type(self).keeping += time.perf_counter() - start


class TimedExtractor(TransformersExtractor):
    """Notes when the first sample is taken."""

    started = 0.0

    def extract(
        self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool] = lambda: False
    ) -> Iterator[Record | Rejected]:
        """Time the passes of the model's body."""
        body = self._loaded.capturer.anatomy.body  # type: ignore[union-attr]  # loaded
        begun = 0.0

        def before(*_: Any) -> None:
            nonlocal begun
            begun = time.perf_counter()

        def after(*_: Any) -> None:
            TimedCapturer.running += time.perf_counter() - begun

        body.register_forward_pre_hook(before)
        body.register_forward_hook(after)
        TimedCapturer.keeping = TimedCapturer.running = 0.0
        self.started = time.perf_counter()
        yield from super().extract(samples, stopping=stopping)


def random_samples(count: int, vocab_size: int) -> list[TokenSample]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.6, count), 16, 1024).astype(int)
    return [
        TokenSample(
            id=f"s{i}", input_ids=rng.integers(0, vocab_size, n).astype(np.int32), loss_mask=np.ones(n, np.uint8)
        )
        for i, n in enumerate(lengths)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    import hsformat_extractors._capture

    hsformat_extractors._capture.Capturer = TimedCapturer  # type: ignore[misc]  # timed in its place
    described = describe(args.model, dtype=args.dtype)
    table = Table(title=f"{args.model}, {args.dtype}, {torch.get_num_threads()} threads, {args.samples} samples")
    for name in ("codec", "tokens", "tokens/s", "wall s", "forward s", "captures s", "rest s", "outside"):
        table.add_column(name, justify="right")
    for codec in ("compact", "fast"):
        contract = make_contract(
            described.model,
            tokenizer_digest=described.tokenizer_digest,
            aux=eagle3_depths(described.model.num_layers),
            last="pre",
            codec=codec,
        )
        request = ExtractionRequest(
            model=args.model,
            target=described.model,
            captures=contract.captures,
            generation=Generation(mode="none"),
            batch_tokens=args.batch_tokens,
            options={"device": "cpu"},
        )
        samples, extractor = random_samples(args.samples, described.model.vocab_size), TimedExtractor()
        with tempfile.TemporaryDirectory() as folder:
            report = extract_to_store(
                extractor, samples, request=request, contract=contract, out=Path(folder) / "bench.hs.zarr"
            )
        wall = time.perf_counter() - extractor.started
        forward, kept = TimedCapturer.running - TimedCapturer.keeping, TimedCapturer.keeping
        row = [wall, forward, kept, wall - forward - kept]
        table.add_row(
            codec,
            f"{report.tokens:,}",
            f"{report.tokens / wall:,.0f}",
            *(f"{s:.2f}" for s in row),
            f"{1 - forward / wall:.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
