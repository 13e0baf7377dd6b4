"""What ``compact`` makes of real states, by capture, dtype and kind of data.

OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python benchmarks/codec_ratio.py --model build/demo/target

The target reads this repository's documents, cut into records: long ones, short ones, and short ones of which the
first half is one and the same text, as under a system prompt. Each figure is the bytes of a capture on the disk over
those in memory. The last line is the entropy of the states of all captures but d0: of sign and exponent given the
channel, and of the mantissa's first seven bits; bits after those count whole.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import hsformat as hs
from hsformat.dtypes import dtype_name
from hsformat.extraction import ExtractionRequest, extract_to_store, make_contract
from hsformat.prepare import load_tokenizer
from hsformat.record import Generation, TokenSample
from hsformat.target import describe
from hsformat_extractors.transformers import TransformersExtractor

ROOT = Path(__file__).parents[1]
DTYPES = ("bfloat16", "float16", "float32")
CASES = {"long": (1_024, 0), "short": (128, 0), "shared": (128, 64)}
"""Tokens of a record, and how many of them are the same in every record."""


def samples(ids: list[int], case: str, tokens: int) -> Iterator[TokenSample]:
    """Yield records of the case, about so many tokens in all; no text is in two records but what is shared."""
    length, shared = CASES[case]
    own = length - shared
    for i in range(tokens // length):
        piece = [*ids[:shared], *ids[shared + i * own : shared + (i + 1) * own]]
        if len(piece) == length:
            yield TokenSample(
                id=f"{case}-{i}", input_ids=np.array(piece, np.int32), loss_mask=np.ones(length, np.uint8)
            )


def entropy(states: npt.NDArray[np.void]) -> float:
    """Return the entropy of [S, H] states over their bits; see the top."""
    bits = states.dtype.itemsize * 8
    mantissa = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype_name(states.dtype)]
    raw = states.view(f"u{bits // 8}")
    channels = [_bits_of(column) for column in (raw >> mantissa).T]
    return (np.mean(channels) + _bits_of((raw >> (mantissa - 7)) & 127) + mantissa - 7) / bits


def _bits_of(values: npt.NDArray[np.unsignedinteger]) -> float:
    p = np.unique(values, return_counts=True)[1] / values.size
    return float(-(p * np.log2(p)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=12_288)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: all")
    args = parser.parse_args()
    files = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
    ids = load_tokenizer(args.model).encode("\n".join(p.read_text("utf-8") for p in files), add_special_tokens=False)
    rows: dict[str, list[str]] = {}
    heads = []
    for dtype in args.dtype or DTYPES:
        target = describe(args.model, dtype=dtype)
        n = target.model.num_layers
        for case in CASES:
            contract = make_contract(
                target.model, tokenizer_digest=target.tokenizer_digest, aux=(0, 2, n // 2, n - 3), last="pre",
                codec="compact",
            )  # fmt: skip
            request = ExtractionRequest(
                model=args.model, target=target.model, captures=contract.captures,
                generation=Generation(mode="none"), batch_tokens=4_096, options={"device": "cpu"},
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "x.hs.zarr"
                report = extract_to_store(
                    TransformersExtractor(), samples(ids, case, args.tokens), request=request, contract=contract,
                    out=out, commit_seconds=3_600,
                )  # fmt: skip
                if report.exit_code:
                    raise SystemExit("\n".join(map(str, report.problems)))
                store = hs.open(out)
                (segment,) = store.segments
                raw = {k: s.nbytes for k, s in segment.array_specs(contract).items() if k.startswith("hidden/")}
                stored = {k: segment.files[f"{k}/c/0/0"].size for k in raw}
                deep = [k for k in raw if k != "hidden/d0"]
                bits = [entropy(np.concatenate([r.hidden[k.removeprefix("hidden/")] for r in store])) for k in deep]
            heads.append(f"{dtype} {case}")
            for key in raw:
                rows.setdefault(key, []).append(f"{stored[key] / raw[key]:.3f}")
            rows.setdefault("all but d0", []).append(f"{sum(stored[k] for k in deep) / sum(raw[k] for k in deep):.3f}")
            rows.setdefault("entropy", []).append(f"{np.mean(bits):.3f}")
    for i in range(0, len(heads), len(CASES)):
        table = Table("array", *heads[i : i + len(CASES)])
        for key, cells in rows.items():
            table.add_row(key, *cells[i : i + len(CASES)])
        Console().print(table)


if __name__ == "__main__":
    main()
