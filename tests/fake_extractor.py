"""An extractor that answers right, for tests of the driver, which override a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from factories import tiny_contract, tiny_record

from hsformat.extraction import ExtractionRequest, Rejected, extract_to_store
from hsformat.problems import Problem
from hsformat.record import Generation, Record, TokenSample

CONTRACT = tiny_contract()
REQUEST = ExtractionRequest(
    model=Path("nowhere"),
    target=CONTRACT.target,
    captures=CONTRACT.captures,
    generation=Generation(mode="none"),
    batch_tokens=64,
)


def sample(i: int, tokens: int = 6) -> TokenSample:
    rng = np.random.default_rng(i)
    mask = np.array([0] * (tokens // 2) + [1] * (tokens - tokens // 2), np.uint8)
    return TokenSample(id=f"s{i}", input_ids=rng.integers(0, 100, tokens, dtype=np.int32), loss_mask=mask)


def answer(s: TokenSample, **changes: Any) -> Record:
    return tiny_record(
        CONTRACT,
        id=changes.pop("id", s.id),
        tokens=len(s),
        input_ids=changes.pop("input_ids", s.input_ids),
        loss_mask=changes.pop("loss_mask", s.loss_mask),
        source_digest=changes.pop("source_digest", s.source_digest),
        **changes,
    )


class Fake:
    """An extractor that answers right; tests override :meth:`one` or :meth:`extract`."""

    name = "fake"

    def __init__(self) -> None:
        self.loaded = self.closed = 0

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        return []

    def load(self, request: ExtractionRequest) -> None:
        self.loaded += 1

    def one(self, s: TokenSample) -> Record | Rejected | None:
        return answer(s)

    def extract(self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
        for s in samples:
            result = self.one(s)
            if result is not None:
                yield result

    def producer(self) -> dict[str, Any]:
        return {"name": "fake"}

    def close(self) -> None:
        self.closed += 1


def run(extractor: Fake, samples: Iterable[TokenSample], out: Path, **options: Any):
    options.setdefault("contract", CONTRACT)
    options.setdefault("request", REQUEST)
    return extract_to_store(extractor, samples, out=out, **options)
