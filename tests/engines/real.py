"""What the engine suites share: targets, the tests of one target, what bfloat16 may do, the table of what ran.

A suite names the extractor in ``OneTarget.extractor`` by subclassing; nothing here knows an engine.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import hsformat as hs
from hsformat.contract import TargetModel
from hsformat.dtypes import to_float32
from hsformat.engines.extraction_table import RAN, Extracted, ExtractedRow, load_extracted
from hsformat.extraction import extract_to_store, make_contract
from hsformat.layout import parse_capture_key
from hsformat.problems import HsError
from hsformat.record import Record
from hsformat.target import describe
from hsformat.testing import ExtractorConformance
from hsformat.testing._harness import row_errors
from hsformat.testing._reference import Reference
from hsformat_extractors.probes import tiny

ENGINE = os.environ.get("HSFORMAT_ENGINE", "none")
ROOT = Path(__file__).parents[2]
DEMO = Path(os.environ.get("HSFORMAT_DEMO_TARGET", ROOT / "build" / "demo" / "target"))


def only(engine: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a file whose tests need this engine."""
    other = pytest.mark.skipif(engine != ENGINE, reason="the environment of another engine")
    return [pytest.mark.engine, pytest.mark.timeout(1800), other]


class Ran:
    """What ran, by architecture, dtype and layers; compared and written when the last test of a file is done."""

    rows: ClassVar[dict[tuple[str, str, int], ExtractedRow]] = {}

    @classmethod
    def note(cls, target: TargetModel, keys: list[str], worst: float, *, answers: bool) -> None:
        parsed = [parse_capture_key(k) for k in keys]
        cls.rows[target.architecture, target.dtype, target.num_layers] = ExtractedRow(
            architecture=target.architecture,
            dtype=target.dtype,
            num_layers=target.num_layers,
            depths=tuple(sorted({d for d, _ in parsed})),
            normed=any(normed for _, normed in parsed),
            answers=answers,
            worst_relative_error=float(f"{worst:.1e}"),
        )

    @classmethod
    def is_what_is_kept(cls, engine: str, version: str) -> None:
        """Every architecture and depth that is kept ran, and no more than was kept; ``HSFORMAT_CAPTURES`` writes it."""
        rows = tuple(cls.rows[key] for key in sorted(cls.rows))
        told = Extracted(engine=engine, version=version, device="cpu", captures=rows)
        if name := os.environ.get("HSFORMAT_CAPTURES"):
            Path(name).write_text(json.dumps(told.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
        kept = load_extracted(RAN / f"{engine}-{version}.json").captures
        assert [_without_error(row) for row in rows] == [_without_error(row) for row in kept]
        for now, then in zip(rows, kept, strict=True):
            # In float32 a pass of one prompt may be the very computation of Transformers: an error of 0.
            assert now.worst_relative_error <= max(4 * then.worst_relative_error, 1e-5), now


def _without_error(row: ExtractedRow) -> ExtractedRow:
    return row.model_copy(update={"worst_relative_error": 0.0})


class OneTarget(ExtractorConformance):
    """The tests whose requests are the same for all of one target: the engine is loaded once for them."""

    __test__ = False

    # Each loads the engine anew for the sake of the extractor alone, which is the same for all targets.
    test_only_requested_captures_come_back = None
    test_records_own_their_arrays = None
    test_it_stops_when_asked = None
    test_closing_twice_and_loading_again = None
    test_another_target_than_described_is_refused = None
    # Stands in the classes of targets, behind what runs given tokens: a load of its own.
    test_exactly_the_generated_tokens_are_supervised = None

    def test_what_ran(self) -> None:
        """The worst row of any capture, with lengths around a block, a pass and a multiple of 128."""
        request = self.request()
        errors: list[npt.NDArray[np.float64]] = []
        for record in self.records(request, self.samples(1, 40, 127, 128, 129, seed=5)).values():
            own = self.reference().states(record.input_ids)
            errors += [row_errors(h, own[key]) for key, h in record.hidden.items()]
        every = np.concatenate(errors)
        assert np.isfinite(every).all()
        answers = type(self).test_exactly_the_generated_tokens_are_supervised is not None
        Ran.note(request.target, self.keys(request.target), float(every.max()), answers=answers)


class OneArchitecture(OneTarget):
    """A tiny random target in float32, in passes of 64 tokens: prompts of several chunks beside others."""

    __test__ = False
    architecture: ClassVar[str]
    num_layers: ClassVar[int] = 4
    sizes: ClassVar[dict[str, int]] = {}
    batch_tokens = 64

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _target(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp(cls.architecture)
        tiny.save_target(folder, cls.architecture, cls.num_layers, dtype="float32", sizes=cls.sizes)
        cls.model = folder

    def test_chunks_of_a_long_prompt_are_joined(self) -> None:
        """Prompts of up to four passes, the longest that the target takes among them."""
        request = self.request()
        lengths = (200, 1, 63, 64, 65, 129, self.max_positions())
        for record in self.records(request, self.samples(*lengths, seed=6)).values():
            assert record.num_states == record.num_tokens
            self.assert_states(record, "float32", self.num_layers)


class WholeSuite(OneArchitecture):
    """What depends on the extractor and not on the target, besides."""

    __test__ = False
    architecture = "LlamaForCausalLM"
    test_only_requested_captures_come_back = ExtractorConformance.test_only_requested_captures_come_back
    test_records_own_their_arrays = ExtractorConformance.test_records_own_their_arrays
    test_it_stops_when_asked = ExtractorConformance.test_it_stops_when_asked
    test_closing_twice_and_loading_again = ExtractorConformance.test_closing_twice_and_loading_again
    test_another_target_than_described_is_refused = ExtractorConformance.test_another_target_than_described_is_refused

    def test_resume(self, tmp_path) -> None:
        """A run that is continued asks for the missing records alone, and they are the others' equals."""
        target = self.target("float32")
        digest = describe(self.model).tokenizer_digest
        contract = make_contract(target, tokenizer_digest=digest, aux=(1, 2, 3), last="post", codec="fast")
        request = self.request(*contract.keys)
        samples, out = self.samples(5, 40, 129, 9, 64), tmp_path / "s.hs.zarr"
        make = type(self).extractor
        first = extract_to_store(make(), samples[:2], request=request, contract=contract, out=out)
        second = extract_to_store(make(), samples, request=request, contract=contract, out=out)
        assert (first.written, second.skipped, second.written) == (2, 2, 3)
        store = hs.open(out)
        assert sorted(r.id for r in store) == sorted(s.id for s in samples)
        for record in store:
            self.assert_states(record, "float32", self.num_layers)


class OnSmolLM2(OneTarget):
    """A real target in float32, where a tolerance hides nothing."""

    __test__ = False
    depths = (1, 2, 3, 14, 15, 16, 27, 28, 29, 30)
    batch_tokens = 2048

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _target(cls):
        assert DEMO.is_dir(), f"no {DEMO}: make demo, or name one by HSFORMAT_DEMO_TARGET"
        cls.model = DEMO


class InBfloat16(OneTarget):
    """What an engine in bfloat16 differs from float32 is held against what Transformers in bfloat16 does.

    A bound for single rows says nothing: where a massive activation arises, rounding the embeddings alone to bfloat16
    changes a row by as much as itself. So half of the rows, and nine of ten, are held to twice Transformers' own error
    over the same rows of the same capture; every capture is nearest to its own depth as in float32.
    """

    __test__ = False
    dtypes = ("bfloat16",)
    _rounded: ClassVar[Reference | None] = None

    @classmethod
    def teardown_class(cls) -> None:
        cls._rounded = None
        super().teardown_class()

    def rounding(self, record: Record) -> dict[str, npt.NDArray[np.float64]]:
        """Return the errors of Transformers' rows, [T] for each capture of a record."""
        cls = type(self)
        if cls._rounded is None:
            cls._rounded = Reference(self.model, dtype="bfloat16")
        own, rounded = (r.states(record.input_ids) for r in (self.reference(), cls._rounded))
        return {key: row_errors(rounded[key][: len(h)], own[key][: len(h)]) for key, h in record.hidden.items()}

    def limits(self, record: Record) -> dict[str, float]:
        """Return what the median row of each capture of a record may differ from float32."""
        n, usual = self.target("bfloat16").num_layers, self.rounding(record)
        return {
            key: max(self.tolerance("bfloat16", parse_capture_key(key)[0], n), 2 * float(np.median(error)))
            for key, error in usual.items()
        }

    def assert_states(self, record: Record, dtype: str, num_layers: int) -> None:
        """Compare the median row: another layer, a norm, a neighbour or a shift would show in all of them."""
        own, limits = self.reference().states(record.input_ids), self.limits(record)
        for key, h in record.hidden.items():
            want = own[key][: len(h)]
            assert h.shape == want.shape
            assert np.median(row_errors(h, want)) <= limits[key], (record.id, key)

    def test_a_record_in_a_batch_is_the_record_alone(self) -> None:
        """Other shapes round otherwise, as far as rounding goes: by the median row."""
        request, samples = self.request(), self.samples(3, 20, 11, 7)
        together = self.records(request, samples)
        for sample in samples:
            alone, limits = self.records(request, [sample])[sample.id], self.limits(together[sample.id])
            for key, h in together[sample.id].hidden.items():
                assert np.median(row_errors(h, to_float32(alone.hidden[key]))) <= 2 * limits[key], (sample.id, key)

    def test_rounding_is_that_of_transformers(self) -> None:
        """Half of the rows, and nine of ten, are as near to float32 as twice what Transformers in bfloat16 is."""
        found: dict[str, list[npt.NDArray[np.float64]]] = {}
        usual: dict[str, list[npt.NDArray[np.float64]]] = {}
        for record in self.records(self.request(), self.samples(90, 127, 129, 64, 33, seed=21)).values():
            own, rounding = self.reference().states(record.input_ids), self.rounding(record)
            for key, h in record.hidden.items():
                found.setdefault(key, []).append(row_errors(h, own[key]))
                usual.setdefault(key, []).append(rounding[key])
        for key in found:
            for share in (0.5, 0.9):
                now, then = (float(np.quantile(np.concatenate(e[key]), share)) for e in (found, usual))
                assert now <= 2 * then, f"{key}, {share:.0%} of rows: {now:.2g}; Transformers in bfloat16: {then:.2g}"


class Server:
    """A server in a process group of its own, ended with the block."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str], url: str, *, said: str) -> None:
        self._words, self._log, self._url, self._said = words, log, url, said
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Server:
        with self._log.open("wb") as log:
            self._process = Popen(self._words, stdout=log, stderr=log, env=self._environment, start_new_session=True)
        try:
            self._wait()
        except BaseException:  # whatever ends the wait, an interrupt too, ends the server
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End all of it, as a machine that fails does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            assert self._process.poll() is None, f"{self._said}\n{self._log.read_text()[-4000:]}"
            try:
                with urllib.request.urlopen(self._url, timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"no {self._url} after 300 s\n{self._log.read_text()[-4000:]}")


def killed(kind: type[OneArchitecture], folder: Path, process: str, options: Mapping[str, str] | None = None) -> None:
    """Kill one process of an engine at work: the run ends because of it, and not because nothing came for long."""
    psutil = importlib.import_module("psutil")  # every engine brings it

    suite = type(
        "Killed", (kind,), {"model": folder, "options": {"window": "4", "timeout": "240", **(options or {})}}
    )()
    try:
        found = suite.load(suite.request()).extract(iter(suite.samples(*[100] * 200)), stopping=lambda: False)
        assert isinstance(next(found), Record)
        below = psutil.Process().children(recursive=True)
        last = [p for p in below if p.is_running() and process in " ".join(p.cmdline())][-1]
        last.kill()
        with pytest.raises(HsError) as raised:
            list(found)
    finally:
        suite.teardown_class()
    (p,) = raised.value.problems
    assert p.code == "HS410"
    assert not [word for word in ("nothing came", "no progress") if word in str(p.got)], p.got
    assert psutil.wait_procs(below, timeout=10)[1] == []
