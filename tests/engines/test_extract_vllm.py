"""The vLLM extractor on vLLM itself: run by ``make test-engines`` in its environment, never by ``make test``.

Tiny random targets of several architectures, whose norms are not 1, and SmolLM2-135M (``make demo`` brings it). What
ran is compared with ``hsformat/engines/ran``; ``HSFORMAT_CAPTURES=FILE`` writes it anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors import SafetensorError

from hsformat.dtypes import to_float32
from hsformat.extraction.protocol import ExtractionRequest, Rejected
from hsformat.problems import HsError
from hsformat.record import Generation
from hsformat.target.checkpoint import read_header, read_tensor
from hsformat.testing import ExtractorConformance
from hsformat.testing._harness import errors
from hsformat_extractors.hosted.final_norm import after, final_norm_facts, load_weights
from hsformat_extractors.hosted.vllm_serve import main
from hsformat_extractors.hosted.vllm_setup import FAILED
from hsformat_extractors.hosted.wire import TOKENS
from hsformat_extractors.probes import tiny
from hsformat_extractors.vllm import VllmExtractor
from tests.engines import real

pytestmark = real.only("vllm")

GREEDY = Generation(mode="greedy", max_new_tokens=8)
SAMPLED = Generation(mode="sampled", max_new_tokens=6, temperature=0.8, top_k=20, top_p=0.95, seed=11)
ANSWERS = ExtractorConformance.test_exactly_the_generated_tokens_are_supervised

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The published sizes: vLLM's latent attention takes heads of 320, 512 or 576 alone (0.32.0, mla_attention.py)."""


class OneArchitecture(real.OneArchitecture):
    __test__ = False
    extractor = VllmExtractor

    def max_positions(self) -> int:
        return 255  # one less than the target has: vLLM runs a prompt with one more token


class TestLlama(real.WholeSuite, OneArchitecture):
    """The whole suite, with chunks that have to be joined (vllm PR#39949)."""

    __test__ = True
    test_exactly_the_generated_tokens_are_supervised = ANSWERS

    def test_an_answer_up_to_the_last_position(self) -> None:
        """The engine's longest sequence: near it vLLM 0.32.0 may not run what captures (``_input_fits_in_drafter``)."""
        request, n = self.request(generation=GREEDY), self.num_layers
        for record in self.records(request, self.samples(247, 248, 5, seed=7, prompt=True)).values():
            self.assert_states(record, "float32", n)
        (long,) = self.samples(249, seed=7, prompt=True)
        (found,) = self.extract(request, [long]).values()
        assert isinstance(found, Rejected)


class DrawingExtractor(VllmExtractor):
    """Whose driver draws rightly on a CPU as well."""

    driver = "vllm_that_draws:DrawingDriver"

    def environment(self, request: ExtractionRequest) -> dict[str, str]:
        path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**super().environment(request), "PYTHONPATH": os.pathsep.join(path)}


def test_what_this_engine_draws_wrongly_is_refused(llama):
    """0.32.0 on a CPU: temperatures from memory that nobody wrote, found by trying the function."""

    class Sampling(OneArchitecture):
        model = llama

    suite = Sampling()
    with pytest.raises(HsError) as e:
        suite.load(suite.request("d4", generation=SAMPLED))
    assert [p.code for p in e.value.problems] == ["HS410"]
    assert "memory that nobody wrote" in str(e.value)


def test_a_sampled_answer_depends_on_seed_and_sample_alone(llama):
    """Drawn by the record's id: in another order, beside others, the same tokens; with another seed, others."""

    class Sampling(OneArchitecture):
        model = llama
        extractor = DrawingExtractor
        batch_tokens = 512  # after a part of a prompt vLLM sets a generator back, which the CPU's cannot be (0.32.0)

    suite = Sampling()
    request = suite.request(generation=SAMPLED)
    prompts = suite.samples(4, 9, 6, 12, seed=4, prompt=True)
    try:
        records = suite.records(request, prompts)
        for record in records.values():
            suite.assert_states(record, "float32", 4)
        again = suite.records(request, [prompts[2], prompts[0]])
        for name, record in again.items():
            assert record.input_ids.tolist() == records[name].input_ids.tolist()
        other = dataclasses.replace(request, generation=SAMPLED.model_copy(update={"seed": 12}))
        drawn = suite.records(other, prompts)
        assert any(drawn[k].input_ids.tolist() != r.input_ids.tolist() for k, r in records.items())
    finally:
        suite.teardown_class()


def test_gemma_3_is_refused_before_the_engine_starts(tmp_path):
    """It has no EAGLE-3 interface in vLLM 0.32.0; Gemma 4 has one."""
    tiny.save_target(tmp_path, "Gemma3ForCausalLM", 4, dtype="float32")

    class Gemma3(OneArchitecture):
        model = tmp_path

    suite = Gemma3()
    problems = errors(VllmExtractor().preflight(suite.request("d2")))
    assert [p.code for p in problems] == ["HS410"]
    assert "EAGLE-3 interface" in problems[0].got


class TestQwen3(OneArchitecture):
    __test__ = True
    architecture = "Qwen3ForCausalLM"


class TestGemma4(OneArchitecture):
    """Heads of two widths, and a rotary embedding a layer type."""

    __test__ = True
    architecture = "Gemma4ForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestMistral(OneArchitecture):
    __test__ = True
    architecture = "MistralForCausalLM"


class TestQwen3Moe(OneArchitecture):
    __test__ = True
    architecture = "Qwen3MoeForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class LatentAttention(OneArchitecture):
    """What vLLM captures begins after the first layer.

    In passes that hold every prompt whole: on a CPU, the second chunk of a prompt did not end within ten minutes.
    """

    __test__ = False
    sizes: ClassVar[dict[str, int]] = LATENT
    depths = (1, 2, 3, 4)
    batch_tokens = 512
    test_chunks_of_a_long_prompt_are_joined = None


class TestDeepseekV2(LatentAttention):
    __test__ = True
    architecture = "DeepseekV2ForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestDeepseekV3(LatentAttention):
    """With a router that has a bias."""

    __test__ = True
    architecture = "DeepseekV3ForCausalLM"
    sizes: ClassVar[dict[str, int]] = {**LATENT, "head_dim": LATENT["qk_rope_head_dim"]}


class OnSmolLM2(real.OnSmolLM2):
    __test__ = False
    extractor = VllmExtractor
    depths = (0, *real.OnSmolLM2.depths)
    options: ClassVar[dict[str, str]] = {"engine_args": '{"max_model_len": 512}'}

    def max_positions(self) -> int:
        return 511


class TestSmolLM2(OnSmolLM2):
    __test__ = True
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestSmolLM2InBfloat16(real.InBfloat16, OnSmolLM2):
    __test__ = True


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save_target(folder, "LlamaForCausalLM", 4, dtype="float32")
    return folder


def answers_of_transformers(folder: Path, prompt: list[int]) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=GREEDY.max_new_tokens)
    out: list[int] = target.generate(torch.tensor([prompt]), greedy)[0].tolist()
    return out


def ask_and_go_away(port: int, prompts: list[list[int]]) -> None:
    """As a client that is killed: vLLM aborts its requests, of whose prompts a part has been run."""
    sockets = []
    for prompt in prompts:
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        connection = socket.create_connection(("127.0.0.1", port))
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + body)
        sockets.append(connection)
    time.sleep(0.05)
    for connection in sockets:
        connection.close()


def test_a_server_gives_the_same(llama, tmp_path, capsys):
    """Started as its command is printed; killed, it ends the run, and what was written stays."""
    storage, port = tmp_path / "storage", 8123
    storage.mkdir()
    own = shutil.copytree(llama, tmp_path / "own")
    usual = {"repetition_penalty": 1.9, "top_k": 20, "top_p": 0.8, "temperature": 0.6, "do_sample": True}
    (own / "generation_config.json").write_text(json.dumps(usual))
    further = ["--port", str(port), "--host", "127.0.0.1", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
    assert main([str(own), "--captures", "d1,d4,d4n", "--storage", str(storage), "--", *further]) == 0
    *environment, python, module, name = shlex.split(printed := capsys.readouterr().out)[:6]
    assert (python, module, name) == ("python", "-m", "vllm.entrypoints.openai.api_server")
    words = [sys.executable, *shlex.split(printed)[4:]]
    # Without that, so that what the requests say is seen to be enough for a server that was started otherwise.
    words[words.index("--generation-config") + 1] = "auto"
    url = f"http://127.0.0.1:{port}"

    class OnServer(OneArchitecture):
        model = llama
        options: ClassVar[dict[str, str]] = {"server": url, "timeout": "60"}

    told = dict(word.split("=", 1) for word in environment)
    with real.Server(words, tmp_path / "server.log", told, f"{url}/health", said=printed) as server:
        suite = OnServer()
        ask_and_go_away(port, [s.input_ids.tolist() for s in suite.samples(*[200] * 12, seed=3)])
        request = suite.request("d1", "d4", "d4n")
        for record in suite.records(request, suite.samples(200, 1, 127, 128, 129, 17)).values():
            suite.assert_states(record, "float32", 4)
        assert [p for p in storage.iterdir() if not p.name.endswith(FAILED)] == []  # those of who went away
        suite.teardown_class()
        answers = suite.request("d1", "d4", "d4n", generation=GREEDY)
        for sample in suite.samples(5, 9, 30, prompt=True):
            (record,) = suite.records(answers, [sample]).values()
            assert record.num_states == record.num_tokens - 1
            suite.assert_states(record, "float32", 4)
            assert record.input_ids.tolist() == answers_of_transformers(llama, sample.input_ids.tolist())
        server.kill()
        with pytest.raises(HsError, match="does not answer any more"):
            suite.records(answers, suite.samples(5, 9, prompt=True))
        suite.teardown_class()


class _Copied:
    """In place of a CUDA event."""

    waited = False

    def synchronize(self) -> None:
        self.waited = True


def test_rows_that_come_from_a_device_are_written_as_those_of_the_host(llama, tmp_path):
    """What vLLM's own code calls when [T, slots, H] is in host memory; there is no device here to copy from."""
    import torch

    from hsformat_extractors.hosted.vllm_connector import HiddenStatesConnector

    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)
    connector._keys, connector._about = {"d1": (0, False), "d4": (1, False), "d4n": (1, True)}, {"hsformat": "{}"}
    norm = connector._norm = load_weights(str(llama), final_norm_facts(str(llama)))
    rows = torch.randn(7, 2, tiny.HIDDEN).to(torch.bfloat16)
    event, path = _Copied(), tmp_path / "r.safetensors"
    connector._write_tensors({"hidden_states": rows, "token_ids": torch.arange(7)}, event, str(path), None)
    assert event.waited
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    found = {info.name: info for info in read_header(path)}
    assert set(found) == {"d1", "d4", "d4n", TOKENS}
    for slot, key in enumerate(("d1", "d4")):
        np.testing.assert_array_equal(to_float32(read_tensor(found[key])), rows[:, slot].float().numpy())
    np.testing.assert_array_equal(read_tensor(found["d4n"]), after(norm, read_tensor(found["d4"])))
    (tmp_path / "s.safetensors.part").mkdir()  # so that it cannot be written
    with pytest.raises((OSError, SafetensorError)):
        connector._write_tensors(
            {"hidden_states": rows, "token_ids": torch.arange(7)}, event, str(tmp_path / "s.safetensors"), None
        )
    assert (tmp_path / f"s.safetensors{FAILED}").read_text()
    assert not (tmp_path / "s.safetensors").exists()


def test_a_request_that_was_aborted_between_two_passes_ends_no_engine(tmp_path):
    """It has fewer blocks than its prompt needs; that was an error of the worker, which ended vLLM."""
    import torch

    from hsformat_extractors.hosted.vllm_connector import HiddenStatesConnector

    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)
    connector._kv_cache, connector._block_size, connector._is_tp_rank_zero = torch.zeros(4, 2, 16, 8), 16, True
    connector._req_copy_events, connector._lock_fds, path = {}, {}, tmp_path / "a.safetensors"
    pending = SimpleNamespace(req_id="a", filename=str(path), token_ids=torch.arange(40), block_ids=[1])
    connector._submit_async_write(pending)
    assert connector._req_copy_events["a"].query()  # so that its blocks are given back
    assert "1 blocks of 16 for 40 tokens" in path.with_name(path.name + FAILED).read_text()


def test_two_ranks_of_tensor_parallelism_give_each_file_once(llama):
    class Parallel(OneArchitecture):
        model = llama
        options: ClassVar[dict[str, str]] = {"tensor_parallel": "2"}

    suite = Parallel()
    try:
        for record in suite.records(suite.request(), suite.samples(5, 129, 17)).values():
            suite.assert_states(record, "float32", 4)
    finally:
        suite.teardown_class()


def test_a_worker_that_is_killed_ends_the_run_at_once(llama):
    real.killed(OneArchitecture, llama, "VLLM::Worker", {"tensor_parallel": "2"})


def test_what_ran_is_what_is_kept():
    """The last test of this file."""
    real.Ran.is_what_is_kept("vllm", VllmExtractor().version())
