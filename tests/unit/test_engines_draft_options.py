"""What an engine makes of a draft's options: norms, vocabulary, rotary embedding, positions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from draft_folders import (
    BOTH,
    IDS,
    SGLANG,
    TOP,
    VD,
    VLLM,
    H,
    V,
    d2t_of,
    draft_config,
    draft_weights,
    target_config,
    write_draft,
    write_target,
)

from hsformat.engines import resolve
from hsformat.problems import ResolveError, Severity

# Norms.


def test_norm_before_residual(look):
    assert look(VLLM, config={"norm_before_residual": True}) == []
    assert look.layout.norm_before_residual
    assert look(SGLANG) == ["HS405"]
    assert not look.layout.norm_before_residual


@pytest.mark.parametrize(
    ("version", "codes"), [("0.5.23", []), ("0.5.16", ["HS405"]), ("0.5.11", ["HS405", "HS405", "HS405"])]
)
def test_options_that_came_with_a_version(look, version, codes):  # SpecForge PR#879: EAGLE-3 and 3.1
    norms = {"input_norm.weight": np.ones(3 * H, np.float32)}
    norms |= {f"fc_norm.{i}.weight": np.ones(H, np.float32) for i in range(3)}
    config = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    assert look(("sglang", version), config=config, weights=draft_weights(**norms)) == codes
    applied = [look.layout.norm_before_fc, look.layout.fc_norm, look.layout.norm_output]
    assert applied == [version == "0.5.23", version != "0.5.11", version != "0.5.11"]


@pytest.mark.parametrize(("config", "recurrent"), [({}, False), ({"fc_norm": True, "norm_output": True}, True)])
def test_what_is_passed_on(look, config, recurrent):  # SpecForge PR#879
    norms = {f"fc_norm.{i}.weight": np.ones(H, np.float32) for i in range(3)} if config else {}
    for engine in (VLLM, SGLANG):
        assert look(engine, config=config, weights=draft_weights(**norms)) == []
        assert look.layout.norm_output is recurrent


@BOTH
@pytest.mark.parametrize("value", [1, "true", 0])
@pytest.mark.parametrize("key", ["norm_before_residual", "fc_norm"])
def test_an_option_that_is_no_boolean(look, engine, key, value):
    """Also where the engine has no such option."""
    assert "HS603" in look(engine, config={key: value})
    assert all("its own default" not in p.got for p in look.problems)  # it is stated


def test_norm_before_fc_stands_in_two_places(look):  # sglang#32226: it was ignored
    config = {"eagle_config": {TOP: [1, 14, 26], "norm_before_fc": True}, "norm_before_fc": False}
    weights = draft_weights(**{"input_norm.weight": np.ones(3 * H, np.float32)})
    for engine in (VLLM, SGLANG):
        assert look(engine, config=config, weights=weights) == []
        assert look.layout.norm_before_fc
    mla = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "norm_before_fc": True}
    assert "HS405" in look(VLLM, config=mla)


def test_weights_of_a_norm_that_is_off(look):  # vllm PR#43482
    weights = draft_weights(**{f"fc_norm.{i}.weight": np.ones(H, np.float32) for i in range(3)})
    for engine in (VLLM, SGLANG):
        assert look(engine, weights=weights) == ["HS405"]


def test_the_speculators_layout(look, tmp_path):
    inner = {k: v for k, v in draft_config().items() if k not in (TOP, "eagle_config", "draft_vocab_size")}
    inner.pop("architectures")
    config = {
        "speculators_model_type": "eagle3", "draft_vocab_size": VD, "transformer_layer_config": inner, TOP: [2, 15, 27],
        "norm_before_residual": True, "target_hidden_size": None,
    }  # fmt: skip
    weights = draft_weights(layer="layers.0")

    def run(**changes):
        write_draft(look.draft, {k: v for k, v in {**config, **changes}.items() if v is not ...}, weights)
        return look(VLLM)

    assert run() == []
    assert look.layout.keys == ("d2", "d15", "d27")
    assert look.layout.norm_before_residual
    assert run(norm_before_residual=False) == []
    assert not look.layout.norm_before_residual
    assert run(norm_before_residual=...) == []
    assert look.layout.norm_before_residual  # vLLM's default in this layout, which the plain layout has not
    assert look.warnings == ["HS405"]
    assert run(norm_before_residual=None) == []
    assert not look.layout.norm_before_residual  # vLLM asks by get with a default, which null is not
    assert look.warnings == ["HS405"]
    assert "null" in look.problems[0].got
    assert run(**{TOP: ...}) == ["HS403"]
    assert run(**{TOP: [2, 15, 27, 28]}) == ["HS402"]  # vllm#54526: fc is made for three
    weights = draft_weights(layer="layers.0", captures=4)
    config["transformer_layer_config"] = {**inner, "num_aux_hidden_states": 4}
    assert run(**{TOP: [2, 15, 27, 28]}) == []
    assert look(SGLANG) == ["HS410"]
    weights = {k: v for k, v in draft_weights(layer="layers.0").items() if "d2t" not in k}
    config["transformer_layer_config"] = inner
    assert run() == ["HS408"]
    assert run(transformer_layer_config={**inner, "model_type": "gemma4"}) == ["HS410"]


# Vocabulary.


@BOTH
@pytest.mark.parametrize(
    ("d2t", "t2d_ids"),
    [
        (np.array(IDS, np.int64), IDS),  # ids in place of offsets
        (d2t_of(IDS)[:-1], IDS),
        (np.concatenate([d2t_of(IDS), [40]]), IDS),
        (d2t_of(IDS), IDS[:-1]),  # SafeAILab/EAGLE#248: t2d has fewer true than the head has rows
        (d2t_of(IDS), [*IDS[:-1], 63]),
        (d2t_of([*IDS[:-1], V]), IDS),
        (d2t_of([-1, *IDS[1:]]), IDS),
        (np.zeros(VD, np.int64) - np.arange(VD), IDS),
    ],
)
def test_a_map_that_is_wrong(look, engine, d2t, t2d_ids):
    t2d = np.zeros(V, bool)
    t2d[t2d_ids] = True
    assert set(look(engine, weights=draft_weights(d2t=d2t, t2d=t2d))) == {"HS408"}


def test_a_map_of_ids_is_named_as_such(look):
    assert look(weights=draft_weights(d2t=np.array(IDS, np.int64))) == ["HS408"]
    assert "not offsets" in look.problems[0].got


def test_a_map_of_ids_without_t2d(look):
    spread = list(range(1, 1 + 2 * VD, 2))
    assert look(weights=draft_weights(ids=spread, t2d=None)) == ["HS408"]  # neighbouring ids would tell
    assert look(weights=draft_weights(ids=spread)) == []
    low = np.array(range(VD), np.int64) + 5  # i + d2t[i] stays in range and rises, as if they were offsets
    assert look(weights=draft_weights(d2t=low, t2d=None)) == ["HS408"]
    with pytest.raises(ResolveError):
        resolve("vllm", draft=look.draft, target=look.target, version="0.32.0")
    assert look(weights=draft_weights(d2t=np.array(IDS, np.int64) + 30, t2d=None)) == ["HS408"]


@pytest.mark.parametrize("bad", [np.zeros((VD, 1), np.int64), np.zeros(VD, np.float32)])
def test_a_map_that_is_no_vector_of_integers(look, bad):
    assert look(weights=draft_weights(d2t=bad)) == ["HS408"]


def test_a_reduced_vocabulary_needs_a_map(look):  # NeMo Automodel PR#2447
    assert look(weights=draft_weights(ids=None)) == ["HS408"]
    assert "draft vocabulary of 24 of 64" in look.problems[0].got


def test_a_map_beside_the_whole_vocabulary(look):  # speculators PR#1081: a map picked up unasked
    weights = draft_weights(size=V, ids=list(range(V)))
    assert look(VLLM, config={"draft_vocab_size": V}, weights=weights) == ["HS408"]  # it fails to load
    assert look(("vllm", "0.24.0")) == []
    assert look(SGLANG) == []
    assert look(SGLANG, config={"draft_vocab_size": V}, weights=draft_weights(size=V)) == ["HS408"]


@pytest.mark.parametrize(
    ("config", "codes"),
    [({"draft_vocab_size": 16}, ["HS408", "HS408", "HS411"]), ({"draft_vocab_size": V + 1}, ["HS408", "HS411"])],
)
def test_another_size_than_the_map(look, config, codes):  # SpecForge PR#602: a map of another size was reused
    assert look(config=config) == codes


def test_the_vocabulary_is_that_of_the_target(look, tmp_path):
    other = write_target(tmp_path / "other", target_config(vocab_size=V + 1))
    assert set(look(target=other)) == {"HS408"}


# Rotary embedding and positions.


@BOTH
def test_both_layouts_of_a_config(look, engine):  # sfllm PR#32, Model-Optimizer PR#917
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    assert look(engine, config={"rope_scaling": scaling}) == []
    older = look.layout
    assert look(engine, config={"rope_theta": ..., "rope_parameters": {**scaling, "rope_theta": 500000.0}}) == []
    assert look.layout == older


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (VLLM, "131072: model runner V1 drafts nothing for longer sequences"),
        (("vllm", "0.24.0"), "nothing for longer sequences; model runner V2 reads past the end"),
        (SGLANG, "SGLang refuses to start with a longer context"),
    ],
)
def test_a_draft_for_fewer_positions_than_the_target_has(look, tmp_path, engine, said):  # sglang#6783, vllm#48894
    target = write_target(tmp_path / "long", target_config(max_position_embeddings=131072))
    assert look(engine, target=target) == []
    (warning,) = look.problems
    assert (warning.code, warning.severity) == ("HS407", Severity.WARNING)
    assert said in warning.got
    assert look(engine, config={"max_position_embeddings": 131072}, target=target) == []
    assert look.problems == []


def test_a_layout_that_the_engines_transformers_does_not_read(look):
    newer = {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert look(("sglang", "0.5.9"), config=newer) == ["HS407"]
    assert look(("sglang", "0.5.10")) == []


def test_no_base_is_a_base_of_ten_thousand(look):
    assert look(config={"rope_theta": ...}) == []
    assert look.warnings == ["HS407"]
    assert "10000" in look.problems[0].got


@BOTH
@pytest.mark.parametrize("beside", [{"rope_theta": ...}, {}])
def test_parameters_by_layer_type(look, engine, beside):
    """Both engines ask the outer object for its base, and take 10000."""
    inner = {"full_attention": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert look(engine, config={**beside, "rope_parameters": inner}) == ["HS407"]
    assert look.layout.rope[0].theta == 10_000


@BOTH
def test_a_share_above_the_whole_head(look, engine):
    assert look(engine, config={"partial_rotary_factor": 2.0}) == ["HS407"]
    assert look(engine, config={"partial_rotary_factor": 1.0}) == []


def test_an_unknown_kind(look):  # NeMo Automodel PR#2399: taken for another kind
    assert look(config={"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}) == ["HS407"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert look(config={"rope_scaling": yarn}) == []
    assert look.layout.rope[0].kind == "yarn"


def test_a_share_of_the_head(look):  # speculators#613, #738
    assert look(VLLM, config={"partial_rotary_factor": 0.5}) == []
    assert look.layout.rope[0].rotary_dim == 2
    inside = {
        "rope_theta": ...,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    }
    assert look(VLLM, config=inside) == []
    assert look(SGLANG) == ["HS407"]  # read at the top level alone
    assert look(SGLANG, config={**inside, "partial_rotary_factor": 0.5}) == []


@pytest.mark.parametrize("value", ["2048", 0, True])
def test_a_limit_that_is_no_number(look, value):
    assert look(config={"max_position_embeddings": value}) == ["HS603"]
    assert all("format that is listed" not in p.fix for p in look.problems)


def test_the_json_of_a_layout(look):
    look()
    assert json.loads(json.dumps(look.layout.to_json()))["aux"][1] == {"depth": 15, "norm": "none"}
