"""What SGLang is started with: captures to ids and hooks, options, the flags of a server; responses to answers."""

from __future__ import annotations

import json
import shlex
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hsformat.engines.table import capture_row
from hsformat.problems import HsError
from hsformat_extractors.hosted.sglang_args import (
    HOOK_FACTORY,
    captures_of,
    engine_arguments,
    plan_captures,
    server_flags,
    version_found,
)
from hsformat_extractors.hosted.sglang_driver import SglangAsker
from hsformat_extractors.hosted.sglang_serve import main
from hsformat_extractors.hosted.wire import Answer, Ask, Fault, Launch

pytestmark = pytest.mark.needs("torch")

TINY = Path(__file__).parents[1] / "data/tiny-llama"
LAUNCH = Launch(
    model="/m", architecture="LlamaForCausalLM", num_layers=30, hidden_size=4, vocab_size=50, dtype="bfloat16",
    captures=("d2", "d15", "d27", "d30"), staging="/s", batch_tokens=1000,
)  # fmt: skip


def plan(*captures: str, architecture: str = "LlamaForCausalLM", version: str = "0.5.23") -> Any:
    return plan_captures(version, replace(LAUNCH, captures=captures, architecture=architecture))


def test_depths_come_by_ids_and_the_last_by_the_norm():
    found = plan("d2", "d15", "d29", "d30", "d30n")
    assert (found.aux, found.ids) == (("d2", "d15", "d29"), (1, 14, 28))
    assert (found.before_norm, found.after_norm) == ("d30", "d30n")
    assert found.keys == ("d2", "d15", "d29", "d30", "d30n")
    assert plan("d30").ids == ()


def test_deepseek_s_ids_depend_on_the_first():
    assert plan("d2", "d15", architecture="DeepseekV3ForCausalLM").ids == (1, 14)
    assert plan("d3", "d15", architecture="DeepseekV3ForCausalLM").ids == (3, 15)
    with pytest.raises(HsError, match="HS410"):
        plan("d1", "d15", architecture="DeepseekV3ForCausalLM")


@pytest.mark.parametrize(
    ("captures", "code"), [(("d0", "d2"), "HS410"), (("d31",), "HS304"), (("d2", "d15n"), "HS304")]
)
def test_captures_that_cannot_be_had_are_refused(captures, code):
    with pytest.raises(HsError) as e:
        plan(*captures)
    assert [p.code for p in e.value.problems] == [code]


def test_depths_that_each_can_be_had():
    row = capture_row("sglang", "0.5.23", "LlamaForCausalLM")
    assert captures_of(row, 4) == ("d1", "d2", "d3", "d4", "d4n")
    deepseek = capture_row("sglang", "0.5.23", "DeepseekV3ForCausalLM")
    assert captures_of(deepseek, 4) == ("d0", "d2", "d3", "d4", "d4n")  # id 1 alone is depth 2


@pytest.mark.parametrize("version", ["0.5.22", "0.4", "none"])
def test_older_versions_are_refused(version):
    with pytest.raises(HsError, match="HS410"):
        plan("d2", version=version)
    assert version_found("0.5.23") == []
    assert plan("d2", version="0.5.23+cpu").ids == (1,)


def arguments(**options: str) -> dict[str, Any]:
    launch = replace(LAUNCH, options=options)
    return engine_arguments(launch, plan_captures("0.5.23", launch), staging="/s", cpu=False)


def test_arguments_say_what_captures_depend_on():
    found = arguments(tensor_parallel="4", data_parallel="2", engine_args='{"mem_fraction_static": 0.7}')
    assert found["return_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert found["disable_radix_cache"] is found["disable_prefill_cuda_graph"] is True
    assert (found["tp_size"], found["dp_size"], found["mem_fraction_static"]) == (4, 2, 0.7)
    assert (found["chunked_prefill_size"], found["max_prefill_tokens"]) == (960, 1000)
    (hook,) = found["forward_hooks"]
    assert hook["hook_factory"] == HOOK_FACTORY
    assert hook["config"]["before_norm"] == "d30"
    only_last = engine_arguments(LAUNCH, plan("d30n"), staging="/s", cpu=False)
    assert "speculative_algorithm" not in only_last
    sampled = replace(LAUNCH, max_new_tokens=4, sampling={"temperature": 0.7, "seed": 5})
    found = engine_arguments(sampled, plan("d30"), staging="/s", cpu=False)
    assert (found["enable_deterministic_inference"], found["random_seed"]) == (True, 5)
    assert "enable_deterministic_inference" not in arguments()


def test_flags_are_words_of_a_command():
    words = server_flags(
        {"a_b": True, "c": False, "d": None, "e": [1, 2], "forward_hooks": [{"name": "x y"}], "f": 0.5}
    )
    assert words == ["--a-b", "--e", "1", "2", "--forward-hooks", '[{"name": "x y"}]', "--f", "0.5"]


def test_the_command_of_a_server_is_printed(tmp_path, capsys):
    words = [str(TINY), "--layers", "1,2", "--last", "both", "--staging", str(tmp_path)]
    assert main([*words, "--engine-version", "0.5.23", "--engine-args", '{"port": 7}']) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    hooks = json.loads(command[command.index("--forward-hooks") + 1])
    assert hooks[0]["config"]["aux"] == ["d1", "d2"]
    assert command[command.index("--port") + 1] == "7"
    refused = ("[1]", '{"pp_size": 2}', '{"pp-size": 2}', '{"--load-format": "dummy"}', '{"model": "/other"}')
    for wrong in (["0.5.22"], *(["0.5.23", "--engine-args", given] for given in refused)):
        assert main([*words, "--engine-version", *wrong]) == 2
        assert "HS410" in capsys.readouterr().err


class Asker(SglangAsker):
    """An engine that answers at once, with what a test says, and leaves the files that it says."""

    def __init__(self, folder, respond, launch=LAUNCH, **options):
        super().__init__()
        self._prepare(replace(launch, staging=str(folder), options=options), folder)
        self.respond = respond

    def _submit(self, request):
        future: Future[Any] = Future()
        found = self.respond(request, self._sampling(request.ask))
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)
        return future


def wrote(folder, request, tokens):
    rows = {k: torch.zeros(len(tokens), 4) for k in LAUNCH.captures}
    save_file({**rows, "token_ids": torch.tensor(tokens)}, folder / f"{request.rid}.aa.000000001.0.{len(tokens)}.part")


def run(folder, respond, *, new=0, prompts=((5, 6, 7),)):
    asker = Asker(folder, respond, replace(LAUNCH, max_new_tokens=new, stop_token_ids=(2,) if new else ()))
    asker.in_flight = 2
    return list(asker.run([Ask(request=f"r-{i}", prompt=p) for i, p in enumerate(prompts)]))


def finished(output=(), **reason):
    return {"output_ids": list(output), "meta_info": {"finish_reason": {"type": "length", **reason}}}


def test_states_of_what_was_sent(tmp_path):
    def respond(request, sampling):
        assert sampling == {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        wrote(tmp_path, request, request.ask.prompt)
        return finished([33])

    found = run(tmp_path, respond, prompts=((5, 6, 7), (8,), (9, 10), (5, 6, 7)))
    assert [f.request for f in sorted(found, key=lambda f: f.request)] == ["r-0", "r-1", "r-2", "r-3"]
    assert all(isinstance(f, Answer) and f.file == f"{f.request}.safetensors" for f in found)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f.file for f in found)


def test_an_answer_has_a_state_less_than_tokens(tmp_path):
    def respond(request, sampling):
        assert (sampling["max_new_tokens"], sampling["stop_token_ids"]) == (4, [2])
        assert (sampling["repetition_penalty"], sampling["top_k"], sampling["top_p"]) == (1.0, -1, 1.0)
        wrote(tmp_path, request, (5, 6, 7, 20, 21))
        return finished([20, 21, 2])

    assert run(tmp_path, respond, new=4) == [Answer(request="r-0", tokens=(5, 6, 7, 20, 21, 2), file="r-0.safetensors")]


@pytest.mark.parametrize(
    ("ran", "response", "again", "message"),
    [
        ((5, 6), finished(), True, "2 rows came, not 3"),
        ((5, 9, 7), finished(), True, "token 1 is 9, that of the request 6"),
        ((5, 6, 7), finished(type="abort", message="queue full"), True, "queue full"),
        ((5, 6, 7), finished(type="stop", matched="NaN happened"), True, "no numbers"),
        ((5, 6, 7), ValueError("too long"), False, "too long"),
        ((5, 6, 7), RuntimeError("gone"), True, "gone"),
    ],
)
def test_what_is_no_answer_is_a_fault_and_leaves_nothing(tmp_path, ran, response, again, message):
    def respond(request, _sampling):
        wrote(tmp_path, request, ran)
        return response

    (found,) = run(tmp_path, respond)
    assert isinstance(found, Fault)
    assert message in found.message
    assert found.again is again
    assert [p for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_an_engine_that_does_nothing_is_given_up_before_whoever_waits_for_it_does(tmp_path):
    """``timeout`` is for both."""
    asker = Asker(tmp_path, lambda *_: None, timeout="0.3")
    asker._submit = lambda _request: Future()
    with pytest.raises(RuntimeError, match=r"nothing came for 0\.24 s"):
        list(asker.run([Ask(request="r-0", prompt=(5,))]))


def test_an_engine_that_lost_a_process_ends_the_run_at_once(tmp_path):
    """After what had come: nothing of it is lost."""

    def respond(request, _sampling):
        asker._died = True
        wrote(tmp_path, request, request.ask.prompt)
        return finished()

    asker = Asker(tmp_path, respond)
    asker.in_flight = 1
    found = asker.run([Ask(request="r-0", prompt=(5,)), Ask(request="r-1", prompt=(6,))])
    assert isinstance(next(found), Answer)
    asker._submit = lambda _request: Future()
    with pytest.raises(RuntimeError, match="a process of it has died"):
        next(found)
