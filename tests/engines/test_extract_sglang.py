"""The SGLang extractor on SGLang itself: run by ``make test-engines`` in its environment, never by ``make test``.

Tiny random targets of several architectures, whose norms are not 1, and SmolLM2-135M in bfloat16 (``make demo`` brings
it). What ran is compared with ``tests/data/captures``; ``HSFORMAT_CAPTURES=FILE`` writes it anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import hsformat as hs
from hsformat.contract import TargetModel
from hsformat.engines.table import parse_version
from hsformat.extraction import extract_to_store, make_contract
from hsformat.extraction.protocol import Rejected
from hsformat.layout import parse_capture_key
from hsformat.problems import HsError
from hsformat.record import Generation, Record
from hsformat.target import describe
from hsformat.testing import ExtractorConformance
from hsformat.testing._harness import row_errors
from hsformat_extractors.hosted.sglang_serve import command
from hsformat_extractors.probes import tiny
from hsformat_extractors.sglang import SglangExtractor

ENGINE = os.environ.get("HSFORMAT_ENGINE", "none")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(ENGINE != "sglang", reason="the environment of another engine"),
]

ROOT = Path(__file__).parents[2]
DEMO = Path(os.environ.get("HSFORMAT_DEMO_TARGET", ROOT / "build" / "demo" / "target"))
KEPT = ROOT / "tests" / "data" / "captures"
GREEDY = Generation(mode="greedy", max_new_tokens=8)
ANSWERS = ExtractorConformance.test_exactly_the_generated_tokens_are_supervised


class Ran:
    """What ran, by architecture, dtype and layers; compared and written when the last test of this file is done."""

    rows: ClassVar[dict[tuple[str, str, int], dict[str, Any]]] = {}

    @classmethod
    def note(cls, target: TargetModel, keys: list[str], worst: float) -> None:
        parsed = [parse_capture_key(k) for k in keys]
        cls.rows[target.architecture, target.dtype, target.num_layers] = {
            "architecture": target.architecture,
            "dtype": target.dtype,
            "num_layers": target.num_layers,
            "depths": sorted({d for d, _ in parsed}),
            "normed": any(normed for _, normed in parsed),
            "worst_relative_error": float(f"{worst:.1e}"),
        }


class OneTarget(ExtractorConformance):
    """The tests whose requests are the same for all of one target, and one with answers: two loads."""

    __test__ = False
    extractor = SglangExtractor

    # Each loads the engine anew for the sake of the extractor alone, which is the same for all targets. The last one
    # stands in the classes of targets, behind what runs given tokens.
    test_only_requested_captures_come_back = None
    test_records_own_their_arrays = None
    test_it_stops_when_asked = None
    test_closing_twice_and_loading_again = None
    test_another_target_than_described_is_refused = None
    test_exactly_the_generated_tokens_are_supervised = None

    def test_what_ran(self) -> None:
        """The worst row of any capture, with lengths around a pass and a multiple of 128."""
        request = self.request()
        errors: list[Any] = []
        for record in self.records(request, self.samples(1, 40, 127, 128, 129, seed=5)).values():
            own = self.reference().states(record.input_ids)
            errors += [row_errors(h, own[key]) for key, h in record.hidden.items()]
        Ran.note(request.target, self.keys(request.target), float(np.concatenate(errors).max()))


class OneArchitecture(OneTarget):
    """A tiny random target in float32, in passes of 64 tokens: prompts of several chunks beside others."""

    __test__ = False
    architecture: ClassVar[str]
    num_layers: ClassVar[int] = 4
    depths = (1, 2, 3, 4)
    batch_tokens = 64

    @pytest.fixture(scope="class", autouse=True)
    def _target(self, request, tmp_path_factory):
        folder = tmp_path_factory.mktemp(self.architecture)
        tiny.save_target(folder, self.architecture, self.num_layers, dtype="float32")
        request.cls.model = folder

    def test_chunks_of_a_long_prompt_are_joined(self) -> None:
        """Prompts of up to four passes, the longest that the target takes among them."""
        request = self.request()
        for record in self.records(request, self.samples(200, 1, 63, 64, 65, 129, 256, seed=6)).values():
            assert record.num_states == record.num_tokens
            self.assert_states(record, "float32", self.num_layers)


class TestLlama(OneArchitecture):
    """The whole suite."""

    __test__ = True
    architecture = "LlamaForCausalLM"
    test_it_stops_when_asked = ExtractorConformance.test_it_stops_when_asked
    test_closing_twice_and_loading_again = ExtractorConformance.test_closing_twice_and_loading_again
    test_exactly_the_generated_tokens_are_supervised = ANSWERS

    def test_an_answer_up_to_the_last_position(self) -> None:
        """Prompt and answer fill the target's positions; one more is rejected, and nothing is cut."""
        request = self.request(generation=GREEDY)
        for record in self.records(request, self.samples(248, 247, 5, seed=7, prompt=True)).values():
            self.assert_states(record, "float32", self.num_layers)
        (long,) = self.samples(249, seed=7, prompt=True)
        (found,) = self.extract(request, [long]).values()
        assert isinstance(found, Rejected)

    test_only_requested_captures_come_back = ExtractorConformance.test_only_requested_captures_come_back
    test_records_own_their_arrays = ExtractorConformance.test_records_own_their_arrays
    test_another_target_than_described_is_refused = ExtractorConformance.test_another_target_than_described_is_refused

    def test_resume(self, tmp_path) -> None:
        """A run that is continued asks for the missing records alone, and they are the others' equals."""
        target = self.target("float32")
        digest = describe(self.model).tokenizer_digest
        contract = make_contract(target, tokenizer_digest=digest, aux=(1, 2, 3), last="post", codec="fast")
        request = self.request(*contract.keys)
        samples, out = self.samples(5, 40, 129, 9, 64), tmp_path / "s.hs.zarr"
        first = extract_to_store(SglangExtractor(), samples[:2], request=request, contract=contract, out=out)
        second = extract_to_store(SglangExtractor(), samples, request=request, contract=contract, out=out)
        assert (first.written, second.skipped, second.written) == (2, 2, 3)
        store = hs.open(out)
        assert sorted(r.id for r in store) == sorted(s.id for s in samples)
        for record in store:
            self.assert_states(record, "float32", self.num_layers)


class TestQwen3(OneArchitecture):
    __test__ = True
    architecture = "Qwen3ForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestMistral(OneArchitecture):
    __test__ = True
    architecture = "MistralForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestQwen3Moe(OneArchitecture):
    __test__ = True
    architecture = "Qwen3MoeForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestSmolLM2(OneTarget):
    """A real target, in float32, where a tolerance hides nothing."""

    __test__ = True
    model = DEMO
    depths = (1, 2, 3, 14, 15, 16, 27, 28, 29, 30)
    batch_tokens = 2048
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestSmolLM2InBfloat16(OneTarget):
    """As it is published. Most rows differ from float32 by rounding alone, some by what the target makes of it.

    Where a massive activation arises, a relative change of the embeddings by 2^-8, the rounding of bfloat16, changes a
    state at depth 29 by 0.08 to 1.34 in float32 (row 2 of the fourth of the twelve samples; its norm is 1,352 between
    rows of 600 and one of 8,820). Transformers in bfloat16 is off by 0.75 there, SGLang by 3.6.
    """

    __test__ = True
    model = DEMO
    dtypes = ("bfloat16",)
    depths = TestSmolLM2.depths
    batch_tokens = 2048
    test_a_record_in_a_batch_is_the_record_alone = None  # other shapes round otherwise; float32 shows the rest

    def assert_states(self, record: Record, dtype: str, num_layers: int) -> None:
        """Compare the median row: another layer, a norm, a neighbour or a shift would show in all of them."""
        own = self.reference().states(record.input_ids)
        for key, h in record.hidden.items():
            assert h.shape == own[key][: len(h)].shape
            limit = self.tolerance(dtype, parse_capture_key(key)[0], num_layers)
            assert np.median(row_errors(h, own[key][: len(h)])) <= limit, (record.id, key)

    def test_most_rows(self) -> None:
        """Nineteen rows of twenty are within what is allowed by default."""
        request = self.request()
        for record in self.records(request, self.samples(40, 127, 129, 64, seed=5)).values():
            own = self.reference().states(record.input_ids)
            for key, h in record.hidden.items():
                error, limit = row_errors(h, own[key]), self.tolerance("bfloat16", parse_capture_key(key)[0], 30)
                assert (error <= limit).mean() >= 0.95, (record.id, key)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save_target(folder, "LlamaForCausalLM", 4, dtype="float32")
    return folder


def test_a_server_gives_the_same(llama, tmp_path):
    """Started as its command is printed; killed, it ends the run, and what was written stays."""
    storage, port = tmp_path / "storage", 31123
    storage.mkdir()
    version = importlib.metadata.version("sglang")
    words = command(
        llama, layers=(1, 3), last=("pre", "post"), staging=storage, version=version, batch_tokens=64, cpu=True,
        options={"engine_args": json.dumps({"port": port, "host": "127.0.0.1", "log_level": "warning"})},
    )  # fmt: skip
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, *words[1:]], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "server.log", shlex.join(words))

        class OnServer(OneArchitecture):
            model = llama
            options: ClassVar[dict[str, str]] = {"server": f"http://127.0.0.1:{port}", "timeout": "60"}

        suite = OnServer()
        request = suite.request("d1", "d4", "d4n")
        for record in suite.records(request, suite.samples(200, 1, 127, 128, 129, 17)).values():
            suite.assert_states(record, "float32", 4)
        suite.teardown_class()
        assert list(storage.iterdir()) == []
        answers = suite.request("d1", "d4", "d4n", generation=GREEDY)
        for record in suite.records(answers, suite.samples(5, 9, prompt=True)).values():
            assert record.num_states == record.num_tokens - 1
            suite.assert_states(record, "float32", 4)
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(HsError, match="does not answer any more"):
            suite.records(answers, suite.samples(5, 9, prompt=True))
        suite.teardown_class()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path, said: str) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert server.poll() is None, f"{said}\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no {url} after 300 s\n{log.read_text()[-4000:]}")


def test_what_ran_is_what_is_kept():
    """The last test of this file: every architecture and depth that is kept ran, and no more than was kept."""
    version = parse_version("sglang", importlib.metadata.version("sglang"))
    rows = [Ran.rows[key] for key in sorted(Ran.rows)]
    told = {"engine": "sglang", "version": version, "device": "cpu", "captures": rows}
    if name := os.environ.get("HSFORMAT_CAPTURES"):
        Path(name).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    kept = json.loads((KEPT / f"sglang-{version}.json").read_text(encoding="utf-8"))
    without = [{k: v for k, v in row.items() if k != "worst_relative_error"} for row in rows]
    assert without == [{k: v for k, v in row.items() if k != "worst_relative_error"} for row in kept["captures"]]
    for now, then in zip(rows, kept["captures"], strict=True):
        # In float32 a pass of one prompt may be the very computation of Transformers: an error of 0.
        assert now["worst_relative_error"] <= max(4 * then["worst_relative_error"], 1e-5), now
