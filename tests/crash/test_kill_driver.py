"""``extract_to_store`` killed in its middle and called again: the content digest is that of an uninterrupted run.

The extractor is a toy whose states follow from the sample alone, whatever is in its batches, which a resumed run cuts
elsewhere. So nothing but the driver and the store can make a difference; what a model's rounding makes is for
``test_kill_extraction``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_record
from fake_extractor import CONTRACT, REQUEST

import hsformat as hs
from hsformat.extraction import ExtractionRequest, extract_to_store
from hsformat.problems import Problem, Severity
from hsformat.record import Record, TokenSample
from hsformat.store import content_digest, exists, local
from hsformat.validate import validate_store

SAMPLES = 40
KILLS = {"begun": [("sample", 0)], "sample": [("sample", 9)], "write": [("write", 150)]}
KILLS["thrice"] = [("sample", 9), ("write", 150), ("publish", 2)]


def samples() -> Iterator[TokenSample]:
    for i in range(SAMPLES):
        rng = np.random.default_rng(i)
        ids = rng.integers(0, CONTRACT.target.vocab_size, 5 + i % 7, dtype=np.int32)
        yield TokenSample(id=f"s{i}", input_ids=ids, loss_mask=np.arange(len(ids)) > 1)


class Toy:
    """Answers a few samples at a time, the last of them first."""

    name = "toy"

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        return []

    def load(self, request: ExtractionRequest) -> None:
        pass

    def extract(self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool]) -> Iterator[Record]:
        samples = iter(samples)
        while some := list(islice(samples, 4)):
            for s in reversed(some):
                self.before(s)
                made = tiny_record(CONTRACT, s.id, tokens=len(s), seed=int(s.id[1:]), source_digest=s.source_digest)
                made.input_ids, made.loss_mask = s.input_ids, s.loss_mask
                yield made

    def before(self, sample: TokenSample) -> None:
        pass

    def producer(self) -> dict[str, Any]:
        return {"name": self.name}

    def close(self) -> None:
        pass


def extract(out: Path) -> None:
    report = extract_to_store(
        Toy(), samples(), request=REQUEST, contract=CONTRACT, out=out, segment_bytes=3000, ignore_disk_space=True
    )
    assert report.exit_code == 0


def main(out: str, where: str, number: str) -> None:
    """Extract, and be killed at the ``number``-th sample, write to a file or commit."""
    calls = count()
    place, name = {
        "sample": (Toy, "before"),
        "write": (local.LocalSink, "write"),
        "publish": (local.LocalBackend, "publish"),
    }[where]
    real = getattr(place, name)

    def dying(*args: Any) -> Any:
        if next(calls) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(place, name, dying)
    extract(Path(out))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the content digest of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "s"
    extract(out)
    return content_digest(hs.open(out))


@pytest.mark.parametrize("name", KILLS)
def test_a_resumed_extraction_holds_what_an_uninterrupted_one_does(tmp_path: Path, whole: str, name: str) -> None:
    out, held, partial = tmp_path / "s", 0, 0
    paths = os.pathsep.join(str(Path(__file__).parents[n]) for n in (1, 2))
    for where, number in KILLS[name]:
        words = [sys.executable, __file__, str(out), where, str(number)]
        died = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False)
        assert died.returncode == -signal.SIGKILL, died.stderr
        if exists(out):
            now = len(hs.open(out))
            assert held <= now < SAMPLES
            held, partial = now, partial + (now > 0)
    assert partial or name == "begun"
    extract(out)
    store = hs.open(out)
    assert sorted(store.ids) == sorted(s.id for s in samples())
    assert content_digest(store) == whole
    assert [p for p in validate_store(out, level="full") if p.severity is Severity.ERROR] == []


if __name__ == "__main__":
    main(*sys.argv[1:])
