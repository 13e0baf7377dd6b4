"""Extractors of the toy engine (``toy_engine``), and what tests ask of them."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hsformat.contract import Capture
from hsformat.engines.rows import CaptureRow
from hsformat.extraction.protocol import ExtractionRequest
from hsformat.record import Generation, TokenSample
from hsformat.target import describe
from hsformat_extractors.hosted.extractor import HostedExtractor
from hsformat_extractors.hosted.wire import Answer, Launch

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny-llama"
HERE = Path(__file__).parent
GIVEN = Generation(mode="none")
GREEDY = Generation(mode="greedy", max_new_tokens=6)


class ToyExtractor(HostedExtractor):
    """Runs a driver of ``toy_engine`` in the real child process."""

    name = "toy"
    package = "numpy"
    minimum = "1.0"
    install = "pip install numpy"
    driver = "toy_engine:Honest"
    applies_norm = True

    def __init__(self):
        super().__init__()
        self.driver = os.environ.get("TOY_DRIVER", self.driver)

    def environment(self, request):
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def capture_row(self, version, request, settings):
        return CaptureRow(
            architectures=(request.target.architecture,), rule="shift", shift=0, lowest=0, deepest="N", default=(),
            order="ascending", duplicates="once", norm="none", source="made here", versions=(version,), evidence="ran",
        )  # fmt: skip


class Direct:
    """Takes the place of ``hosted.child.HostedEngine``: the driver in this process, for tests of what it says."""

    def __init__(self, driver: Any) -> None:
        self._driver, self._windows, self._said = driver, deque(), deque()

    def start(self, launch: Launch) -> dict[str, Any]:
        return dict(self._driver.start(launch))

    def run(self, window: int, asks: Any) -> None:
        self._windows.append((window, tuple(asks)))

    def skip(self) -> None:
        self._said.append({"kind": "skipped", "windows": [w for w, _ in self._windows]})
        self._windows.clear()

    def receive(self, tick: Any = None) -> dict[str, Any]:
        if not self._said:
            window, asks = self._windows.popleft()
            for found in self._driver.run(asks):
                kind = "answer" if isinstance(found, Answer) else "fault"
                self._said.append(json.loads(json.dumps({"kind": kind, **asdict(found)})))
            self._said.append({"kind": "done", "window": window})
        return self._said.popleft()

    def close(self, *, orderly: bool = True) -> None:
        self._driver.stop()


class DirectExtractor(ToyExtractor):
    """Without a process of its own."""

    def _engine(self, request, settings, staging):
        import toy_engine

        return Direct(getattr(toy_engine, self.driver.partition(":")[2])())


def toy(driver: str, *, direct: bool = False) -> type[ToyExtractor]:
    """Return the extractor of another driver of ``toy_engine``."""
    base = DirectExtractor if direct else ToyExtractor
    return type(driver, (base,), {"driver": f"toy_engine:{driver}"})


def request_for(
    *keys: str, generation: Generation = GIVEN, batch_tokens: int = 512, model: Path = TINY_LLAMA, **options: Any
) -> ExtractionRequest:
    target = describe(model, dtype="float32").model
    captures = tuple(
        Capture.model_validate(
            {"depth": int(k.strip("dn")), "norm": "final" if k.endswith("n") else "none", "dtype": "float32"}
        )
        for k in keys or ("d2", "d4", "d8")
    )
    return ExtractionRequest(
        model=model, target=target, captures=captures, generation=generation, batch_tokens=batch_tokens,
        options={k: str(v) for k, v in options.items()},
    )  # fmt: skip


def samples(*lengths: int, prompt: bool = False, seed: int = 0) -> list[TokenSample]:
    rng = np.random.default_rng(seed)
    return [
        TokenSample(id=f"s{i}", input_ids=rng.integers(5, 500, n).astype(np.int32),
                    loss_mask=np.full(n, 0 if prompt else 1, np.uint8))
        for i, n in enumerate(lengths)
    ]  # fmt: skip
