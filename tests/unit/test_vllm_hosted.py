"""What vLLM is started with, and what its driver asks it for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsformat.dtypes import numpy_dtype
from hsformat.problems import HsError
from hsformat.target import describe
from hsformat_extractors.hosted.final_norm import after, final_norm_facts, load_weights
from hsformat_extractors.hosted.vllm_driver import VllmDriver, sampling_arguments
from hsformat_extractors.hosted.vllm_serve import main
from hsformat_extractors.hosted.vllm_setup import EXTRA, speculation, transfer, wanted_slots
from hsformat_extractors.hosted.wire import Ask, Launch

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
HIDDEN = describe(TINY).model.hidden_size
LAYERS = describe(TINY).model.num_layers
LAST = f"d{LAYERS}"
NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
}  # fmt: skip


def launch(tmp_path: Path, *captures: str, **facts: Any) -> Launch:
    target = describe(TINY, dtype="float32").model
    staging = tmp_path / "staging"
    staging.mkdir(exist_ok=True)
    return Launch(
        model=str(TINY), architecture=target.architecture, num_layers=LAYERS, hidden_size=HIDDEN,
        vocab_size=target.vocab_size, dtype="float32", captures=captures or ("d1", LAST), staging=str(staging),
        batch_tokens=64, **facts,
    )  # fmt: skip


# What it is started with.


def test_a_depth_before_and_after_the_norm_is_captured_once():
    slots = wanted_slots(("d2", "d30", "d30n"), version="0.32.0+cpu", architecture="LlamaForCausalLM", num_layers=30)
    assert (slots.ids, slots.depths, slots.normed) == ((2, 30), (2, 30), True)
    assert slots.keys == {"d2": (0, False), "d30": (1, False), "d30n": (1, True)}
    ids = speculation(slots)["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [2, 30]
    told = transfer(slots, storage="/s", final_norm={"eps": 1e-5})["kv_connector_extra_config"]
    assert json.loads(json.dumps(told))[EXTRA]["keys"]["d30n"] == [1, True]
    assert told["shared_storage_path"] == "/s"


@pytest.mark.parametrize(
    ("captures", "version", "architecture"),
    [
        (("d0", "d2"), "0.32.0", "DeepseekV2ForCausalLM"),  # no embedding output
        (("d61",), "0.24.0", "DeepseekV3ForCausalLM"),  # nothing after the last layer (vllm#48124)
        (("d2",), "0.32.0", "Gemma3ForCausalLM"),
        (("d2",), "0.19.0", "LlamaForCausalLM"),
    ],
)
def test_what_vllm_does_not_capture_is_refused(captures, version, architecture):
    with pytest.raises(HsError) as e:
        wanted_slots(captures, version=version, architecture=architecture, num_layers=61)
    assert [p.code for p in e.value.problems] == ["HS410"]


def test_the_command_of_a_server_is_printed(capsys):
    words = [str(TINY), "--captures", f"d1,{LAST}n", "--storage", "/mnt/hs", "--vllm-version", "0.32.0"]
    assert main([*words, "--", "--port", "8001"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("vllm serve ")
    assert printed.endswith(" --port 8001\n")
    assert "--no-enable-prefix-caching" in printed
    assert '"unit_offset"' in printed
    assert main([*words[:2], f"d{LAYERS + 1}", *words[3:]]) == 2
    assert "HS410" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"data_parallel": "2"}, {"engine_args": '{"enable_prefix_caching": true}'}])
def test_arguments_under_which_states_are_lost_are_refused(tmp_path, options, monkeypatch):
    monkeypatch.setattr("hsformat_extractors.hosted.vllm_driver.installed_version", lambda _: "0.32.0")
    with pytest.raises(HsError) as e:
        VllmDriver().start(launch(tmp_path, options=options))
    assert [p.code for p in e.value.problems] == ["HS410"]


def test_an_answer_is_drawn_by_its_own_seed_and_ends_at_the_stop_tokens_of_the_launch_alone(tmp_path):
    given = launch(
        tmp_path, max_new_tokens=9, stop_token_ids=(2, 7), sampling={"temperature": 0.7, "top_k": None, "seed": 1}
    )
    told = sampling_arguments(given, Ask(request="a", prompt=(3,), seed=5, max_new_tokens=4))
    assert told == {
        "max_tokens": 4, "stop_token_ids": [2, 7], "ignore_eos": True, "temperature": 0.7, "seed": 5, **NEUTRAL,
    }  # fmt: skip
    drawn = launch(tmp_path, max_new_tokens=9, sampling={"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1})
    told = sampling_arguments(drawn, Ask(request="a", prompt=(3,)))
    assert (told["top_k"], told["top_p"], told["repetition_penalty"]) == (5, 0.9, 1.0)
    greedy = launch(tmp_path, max_new_tokens=9, stop_token_ids=(2,))
    told = sampling_arguments(greedy, Ask(request="a", prompt=(3,)))
    assert "seed" not in told
    assert {k: told[k] for k in NEUTRAL} == NEUTRAL  # a server fills in the folder's own otherwise
    assert sampling_arguments(launch(tmp_path), Ask(request="a", prompt=(3,)))["max_tokens"] == 1


def test_the_final_norm_is_applied_in_float32_and_rounded_once():
    norm = load_weights(str(TINY), final_norm_facts(str(TINY)))
    h = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(numpy_dtype("bfloat16"))
    x = h.astype(np.float64)
    want = x / np.sqrt((x**2).mean(1, keepdims=True) + norm.norm.eps) * norm.weight_H
    assert not np.allclose(norm.weight_H, 1)
    got = after(norm, h)
    assert got.dtype == h.dtype
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_weights("org/name", final_norm_facts(str(TINY)))
