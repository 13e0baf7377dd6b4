"""The SGLang extractor on SGLang itself: run by ``make test-engines`` in its environment, never by ``make test``.

Tiny random targets of several architectures, whose norms are not 1, and SmolLM2-135M (``make demo`` brings it). What
ran is compared with ``hsformat/engines/ran``; ``HSFORMAT_CAPTURES=FILE`` writes it anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from hsformat.engines.table import parse_version
from hsformat.extraction.protocol import Rejected
from hsformat.problems import HsError
from hsformat.record import Generation
from hsformat.testing import ExtractorConformance
from hsformat_extractors.hosted.sglang_serve import command
from hsformat_extractors.probes import tiny
from hsformat_extractors.sglang import SglangExtractor
from tests.engines import real

pytestmark = real.only("sglang")

GREEDY = Generation(mode="greedy", max_new_tokens=8)
ANSWERS = ExtractorConformance.test_exactly_the_generated_tokens_are_supervised


class OneArchitecture(real.OneArchitecture):
    __test__ = False
    extractor = SglangExtractor
    depths = (1, 2, 3, 4)


class TestLlama(real.WholeSuite, OneArchitecture):
    """The whole suite."""

    __test__ = True
    test_exactly_the_generated_tokens_are_supervised = ANSWERS

    def test_an_answer_up_to_the_last_position(self) -> None:
        """Prompt and answer fill the target's positions; one more is rejected, and nothing is cut."""
        request = self.request(generation=GREEDY)
        for record in self.records(request, self.samples(248, 247, 5, seed=7, prompt=True)).values():
            self.assert_states(record, "float32", self.num_layers)
        (long,) = self.samples(249, seed=7, prompt=True)
        (found,) = self.extract(request, [long]).values()
        assert isinstance(found, Rejected)


class TestQwen3(OneArchitecture):
    __test__ = True
    architecture = "Qwen3ForCausalLM"


class TestMistral(OneArchitecture):
    __test__ = True
    architecture = "MistralForCausalLM"


class TestQwen3Moe(OneArchitecture):
    __test__ = True
    architecture = "Qwen3MoeForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestSmolLM2(real.OnSmolLM2):
    __test__ = True
    extractor = SglangExtractor
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestSmolLM2InBfloat16(real.InBfloat16, real.OnSmolLM2):
    __test__ = True
    extractor = SglangExtractor


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
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"

    class OnServer(OneArchitecture):
        model = llama
        options: ClassVar[dict[str, str]] = {"server": url, "timeout": "60"}

    with real.Server([sys.executable, *words[1:]], tmp_path / "server.log", environment, f"{url}/health",
                     said=shlex.join(words)) as server:  # fmt: skip
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
        server.kill()
        with pytest.raises(HsError, match="does not answer any more"):
            suite.records(answers, suite.samples(5, 9, prompt=True))
        suite.teardown_class()


def test_a_scheduler_that_is_killed_ends_the_run_at_once(llama):
    """As the kernel kills one when memory is used up: SGLang tells its parent by a signal, or nobody."""
    real.killed(OneArchitecture, llama, "sglang::scheduler")


def test_what_ran_is_what_is_kept():
    """The last test of this file."""
    real.Ran.is_what_is_kept("sglang", parse_version("sglang", importlib.metadata.version("sglang")))
