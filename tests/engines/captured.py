"""What an engine really captures of random targets, compared with Transformers in float32: the rows of a kept table.

In an engine's environment, from the repository's root::

    PYTHONPATH=tests/engines python -m captured sglang --out tests/data/captures/sglang-0.5.23.json \
        LlamaForCausalLM Qwen3ForCausalLM ...
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hsformat.contract import Capture
from hsformat.dtypes import to_float32
from hsformat.extraction import ExtractionRequest, find_extractor
from hsformat.extraction.protocol import Rejected
from hsformat.layout import parse_capture_key
from hsformat.record import Generation, TokenSample
from hsformat.target import describe
from hsformat.testing._reference import Reference
from hsformat_extractors.probes.tiny import save_target

__all__ = ["LAYERS", "captured", "measure"]

LAYERS = 6
LENGTHS = (1, 5, 63, 64, 65, 127, 128, 129, 2, 17, 9, 40)
"""Around the bound of tokens in a pass, around 128, and in no order."""
BATCH_TOKENS = 64
NEW_TOKENS = 8


def captured(
    engine: str, architecture: str, keys: tuple[str, ...], *, options: Mapping[str, str], dtype: str = "float32"
) -> dict[str, Any]:
    """Return the row of an architecture: its captures and the worst relative error of a row in each.

    Given tokens in passes of 64, then answers of 8 tokens with their states. Whatever is wrong raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_target(Path(folder), architecture, LAYERS, dtype=dtype)
        worst = measure(engine, Path(folder), keys, options=options, generation=Generation(mode="none"))
        greedy = Generation(mode="greedy", max_new_tokens=NEW_TOKENS)
        answered = measure(engine, Path(folder), keys, options=options, generation=greedy)
    parsed = [parse_capture_key(k) for k in keys]
    return {
        "architecture": architecture,
        "num_layers": LAYERS,
        "depths": [d for d, normed in parsed if not normed],
        "normed": any(normed for _, normed in parsed),
        "dtype": dtype,
        "evidence": "ran",
        "worst_relative_error": max(worst.values()),
        "worst_relative_error_answers": max(answered.values()),
    }


def measure(
    engine: str, model: Path, keys: tuple[str, ...], *, options: Mapping[str, str], generation: Generation
) -> dict[str, float]:
    """Extract and return the worst relative error of a row of each capture, against float32 of Transformers."""
    target = describe(model).model
    request = ExtractionRequest(
        model=model,
        target=target,
        captures=tuple(
            Capture(depth=d, norm="final" if normed else "none", dtype=target.dtype)
            for d, normed in map(parse_capture_key, keys)
        ),
        generation=generation,
        batch_tokens=BATCH_TOKENS,
        options=dict(options),
    )
    extractor = find_extractor(engine)
    problems = extractor.preflight(request)
    assert not problems, problems
    worst, seen = dict.fromkeys(keys, 0.0), 0
    try:
        extractor.load(request)
        reference = Reference(model)
        for record in extractor.extract(_samples(target.vocab_size), stopping=lambda: False):
            assert not isinstance(record, Rejected), record.problems
            seen += 1
            own = reference.states(record.input_ids)
            for key, h in record.hidden.items():
                want = own[key][: len(h)]
                assert len(h) >= record.num_tokens - 1
                error = np.linalg.norm(to_float32(h) - want, axis=1) / np.linalg.norm(want, axis=1)
                worst[key] = max(worst[key], float(error.max()))
    finally:
        extractor.close()
    assert seen == len(LENGTHS)
    return worst


def _samples(vocab_size: int) -> Iterator[TokenSample]:
    rng = np.random.default_rng(7)
    for i, n in enumerate(LENGTHS):
        ids = rng.integers(3, vocab_size, n).astype(np.int32)
        yield TokenSample(id=f"c{i}", input_ids=ids, loss_mask=np.ones(n, np.uint8))


def main() -> None:
    """Measure architectures and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("architectures", nargs="+")
    parser.add_argument("--keys", help="captures, by default all below the last layer and both of it")
    parser.add_argument("--option", action="append", default=[], help="of the extractor: NAME=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    keys = args.keys or ",".join([*(f"d{d}" for d in range(1, LAYERS + 1)), f"d{LAYERS}n"])
    options = dict(text.split("=", 1) for text in args.option)
    version = importlib.metadata.version(args.engine)
    table = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"rows": []}
    for architecture in args.architectures:
        row = captured(args.engine, architecture, tuple(keys.split(",")), options=options)
        rows = [r for r in table["rows"] if (r["architecture"], r["dtype"]) != (architecture, row["dtype"])]
        table = {"engine": args.engine, "version": version, "rows": [*rows, row]}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"{json.dumps(table, indent=1)}\n", encoding="utf-8")
        print(row, flush=True)


if __name__ == "__main__":
    main()
