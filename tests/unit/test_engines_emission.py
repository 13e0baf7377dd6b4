"""What cannot be written, and why; the shape of what is written."""

from __future__ import annotations

import json

import pytest
from draft_folders import H, V, draft_config, draft_weights, target_config, write_draft, write_target

from hsformat.engines import DraftConfig, emission, emit, emit_for, resolve
from hsformat.layout import AuxInput

BOTH = {"vllm": "0.32.0", "sglang": "0.5.23"}
TOP = "eagle_aux_hidden_state_layer_ids"
AUX = ("d2", "d15", "d27")


def config(**changes) -> DraftConfig:
    plain = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    sizes = {"hidden_size": H, "target_hidden_size": H, "num_layers": 1, "vocab_size": V, "draft_vocab_size": 24}
    return DraftConfig.model_validate({**sizes, **plain, "embedding": "target", "head": "draft", **changes})


def write(aux=AUX, engines=BOTH, architecture="LlamaForCausalLM", num_layers=30, **changes):
    return emit_for(aux, config(**changes), engines, architecture=architecture, num_layers=num_layers)


def test_one_folder_for_both(tmp_path):
    keys, problems = write()
    assert problems == []
    assert keys[TOP] == [2, 15, 27]
    assert keys["eagle_config"] == {TOP: [1, 14, 26], "use_aux_hidden_state": True}
    assert keys["num_aux_hidden_states"] == 3
    assert keys["tie_word_embeddings"] is False
    draft = write_draft(tmp_path / "draft", {**draft_config(**{TOP: ..., "eagle_config": ...}), **keys})
    target = write_target(tmp_path / "target")
    for engine, version in BOTH.items():
        assert resolve(engine, draft=draft, target=target, version=version).keys == AUX


def test_for_one_engine_its_own_keys_alone():
    keys, _ = write(engines={"vllm": "0.32.0"})
    assert "eagle_config" not in keys
    keys, _ = write(engines={"sglang": "0.5.23"})
    assert TOP not in keys
    assert json.loads(json.dumps(keys)) == keys
    assert emit([AuxInput(depth=2, norm="none")], config(), engine="vllm", version="0.32.0",
                architecture="LlamaForCausalLM", num_layers=30)[0]["num_aux_hidden_states"] == 1  # fmt: skip


@pytest.mark.parametrize(
    ("question", "codes"),
    [
        ({"norm_before_residual": True}, ["HS405"]),  # SGLang has no such option
        ({"norm_before_residual": True, "engines": {"vllm": "0.32.0"}}, []),
        ({"norm_before_fc": True, "engines": {"sglang": "0.5.16"}}, ["HS405"]),
        ({"embedding": "draft"}, ["HS412"]),  # SGLang puts the target's in its place
        ({"embedding": "draft", "engines": {"vllm": "0.32.0"}}, []),
        ({"num_layers": 2, "layers": 2}, ["HS405"]),  # the later layers begin with another norm
        ({"layers": 2, "engines": {"sglang": "0.5.11"}}, ["HS410"]),
        ({"aux": ("d2", "d15", "d30")}, ["HS304"]),  # the last layer kills SGLang
        ({"aux": ("d2", "d15", "d30"), "engines": {"vllm": "0.32.0"}}, []),
        ({"aux": ("d2", "d15", "d30n"), "engines": {"vllm": "0.32.0"}}, ["HS405"]),
        ({"aux": ("d0", "d15")}, ["HS304"]),
        ({"aux": ("d27", "d15", "d2")}, ["HS401", "HS401"]),
        ({"aux": ("d2", "d2"), "engines": {"vllm": "0.32.0"}}, ["HS401"]),
        ({"aux": ("d2", "d31")}, ["HS304"]),
        ({"aux": ("15",)}, ["HS304"]),
        ({"aux": ()}, ["HS402"]),
        ({"aux": ("d15",)}, ["HS402"]),  # one capture as wide as the draft: SGLang leaves fc out
        ({"aux": ("d2", "d15", "d27", "d28"), "engines": {"sglang": "0.5.11"}}, ["HS402"]),
        ({"engines": {"vllm": "0.31.0"}}, ["HS410"]),
        ({"engines": {"llama.cpp": "1"}}, ["HS410"]),
        ({"architecture": "KimiK25ForConditionalGeneration", "aux": ("d1", "d15", "d27")}, ["HS401"]),
        ({"architecture": "KimiK25ForConditionalGeneration", "aux": ("d2", "d15", "d27")}, []),
    ],
)
def test_what_cannot_be_written(question, codes):
    layers = question.pop("layers", None)
    question.pop("num_layers", None)
    if layers:
        keys, problems = emit_for(
            AUX,
            config(num_layers=layers),
            question.pop("engines", BOTH),
            architecture="LlamaForCausalLM",
            num_layers=30,
        )
    else:
        keys, problems = write(**question)
    assert [p.code for p in problems] == codes
    assert (keys is None) == bool(codes)
    assert all(p.fix for p in problems)


def test_lists_are_judged_by_the_versions_that_are_asked_about():
    """SGLang 0.5.12 always adds one: to newer versions the list that it needs means other layers."""
    deepseek = {"architecture": "DeepseekV3ForCausalLM", "num_layers": 61}
    keys, problems = write(("d3", "d30", "d58"), {"vllm": "0.32.0", "sglang": "0.5.12"}, **deepseek)
    assert problems == []
    assert (keys[TOP], keys["eagle_config"][TOP]) == ([3, 30, 58], [2, 29, 57])
    keys, problems = write(("d3", "d30", "d58"), {"vllm": "0.32.0", "sglang": "0.5.23"}, **deepseek)
    assert problems == []
    assert keys["eagle_config"][TOP] == [3, 30, 58]


def test_lists_that_contradict_each_other(monkeypatch):
    """The fix does not name what was just called."""
    monkeypatch.setattr(emission, "ids_of", lambda row, _depths, _n: [1, 2, 3] if row.shift else [2, 3, 5])
    keys, problems = write()
    assert keys is None
    assert "HS404" in {p.code for p in problems}
    assert all("emit" not in p.fix for p in problems)


@pytest.mark.parametrize(
    "question",
    [
        {"aux": [f"d{i}" for i in range(1, 1003)], "num_layers": 2000, "engines": {"vllm": "0.32.0"}},
        {"layers": 2000, "engines": {"vllm": "0.32.0"}},
        {"hidden_size": 2**40, "target_hidden_size": 2**40},
        {"vocab_size": 2**40},
        {"num_layers": "30"},
        {"num_layers": -1},
        {"num_layers": 0},
        {"num_layers": True},
        {"num_layers": 2**31},
    ],
)
def test_numbers_that_no_inspection_takes(question):
    question = dict(question)
    if layers := question.pop("layers", None):
        aux, about = AUX, config(num_layers=layers)
        keys, problems = emit_for(aux, about, question["engines"], architecture="LlamaForCausalLM", num_layers=30)
    else:
        keys, problems = write(**question)
    assert keys is None
    assert {p.code for p in problems} <= {"HS603", "HS402"}
    assert any(p.code == "HS603" for p in problems)
    assert all("format that is listed" not in p.fix and "config.json" not in p.fix for p in problems)


@pytest.mark.parametrize("aux", [(2, 15), (None,), (2.0,), (b"d2",)])
def test_captures_that_are_no_keys(aux):
    keys, problems = write(aux)
    assert keys is None
    assert [p.code for p in problems] == ["HS304"] * len(aux)


def test_for_no_engine_there_is_nothing_to_write():
    keys, problems = write(engines={})
    assert (keys, [p.code for p in problems]) == (None, ["HS410"])


@pytest.mark.parametrize(
    ("function", "instead", "code"),
    [
        ("ids_of", lambda _row, depths, _n: [d + 1 for d in depths], "HS404"),  # other layers than asked for
        ("_norms", lambda *_: {}, "HS405"),  # an option that is not written
        ("_sizes", lambda *_: {}, "HS603"),  # nothing that is a draft
    ],
)
def test_what_is_written_wrongly_is_found_by_reading_it_back(monkeypatch, function, instead, code):
    monkeypatch.setattr(emission, function, instead)
    keys, problems = write(engines={"vllm": "0.32.0"}, norm_output=True)
    assert (keys, [p.code for p in problems]) == (None, [code])


@pytest.mark.parametrize(
    ("architecture", "n", "ids"),
    [("KimiK25ForConditionalGeneration", 61, [0, 15, 27]), ("GptOssForCausalLM", 36, [0, 18, 36])],
)
def test_the_embedding_can_be_written_where_nothing_is_added(architecture, n, ids):
    keys, problems = write([f"d{i}" for i in ids], {"sglang": "0.5.23"}, architecture, n)
    assert problems == []
    assert keys["eagle_config"][TOP] == ids


def test_a_config_that_contradicts_itself():
    for changes in ({"draft_vocab_size": V + 1}, {"head": "target"}, {"hidden_size": 32}):
        with pytest.raises(ValueError, match=r"vocab|width"):
            config(**changes)


def test_the_targets_head_is_asked_for_with_null(tmp_path):
    keys, problems = write(head="target", draft_vocab_size=V)
    assert problems == []
    assert keys["draft_vocab_size"] is None
    shared = draft_weights(ids=None, **{"lm_head.weight": None})
    draft = write_draft(tmp_path / "d", {**draft_config(), **keys}, shared)
    for engine, version in BOTH.items():
        layout = resolve(engine, draft=draft, target=write_target(tmp_path / "t", target_config()), version=version)
        assert layout.head == "target"
