"""Draft folders that are broken, or that an engine makes something else of: files, weights, width, shared parts."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from draft_folders import (
    BOTH,
    INNER,
    SGLANG,
    TOP,
    VD,
    VLLM,
    H,
    V,
    draft_weights,
    target_config,
    write_target,
)

from hsformat.engines import inspect, resolve
from hsformat.problems import ResolveError, Severity


@BOTH
def test_a_whole_draft(look, engine):
    assert look(engine) == []
    assert look.problems == []
    assert look.layout.embedding == "target"
    assert look.layout.head == "draft"
    assert look.layout == resolve(engine[0], draft=look.draft, target=look.target, version=engine[1])


# The folder.


def test_no_folder_no_config_no_json(look, tmp_path):
    assert look() == []
    (look.draft / "config.json").unlink()
    assert look() == ["HS602"]
    (look.draft / "config.json").write_text('{"a": [[')
    assert look() == ["HS602"]
    (look.draft / "config.json").write_text("[]")
    assert look() == ["HS602"]
    look.draft = tmp_path / "absent"
    look.draft.parent.mkdir(exist_ok=True)
    layout, problems = inspect("vllm", draft=look.draft, target=look.target, version="0.32.0")
    assert (layout, [p.code for p in problems]) == (None, ["HS602"])
    with pytest.raises(ResolveError):
        resolve("vllm", draft=look.draft, target=look.target, version="0.32.0")


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{", struct.pack("<Q", 2) + b"[]", b"x" * 64])
def test_a_broken_safetensors_header(look, content):
    assert look() == []
    (look.draft / "model.safetensors").write_bytes(content)
    assert look() == ["HS602"]
    assert look.layout.keys == ("d2", "d15", "d27")  # what is fed is known from the config
    assert (look.layout.embedding, look.layout.head, look.layout.vocab_map) == ("unknown",) * 3


def test_a_folder_in_the_place_of_the_weights(look):
    assert look() == []
    (look.draft / "model.safetensors").unlink()
    (look.draft / "model.safetensors").mkdir()
    assert look() == ["HS602"]
    assert look.problems[0].got == "a folder"


def test_half_a_character(look):
    """JSON can spell what no output can print."""
    assert look() == []
    text = (look.draft / "config.json").read_text()
    (look.draft / "config.json").write_text(text.replace("LlamaForCausalLMEagle3", "\\ud800"))
    assert look() == ["HS602"]
    (look.draft / "config.json").write_text(text)
    raw = (look.draft / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].replace(b"midlayer.hidden_norm.weight", b"midlayer.\\ud800")
    (look.draft / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    assert look() == ["HS602"]


def test_no_weights_and_pickled_weights(look):
    assert look() == []
    (look.draft / "model.safetensors").rename(look.draft / "weights")
    assert look() == ["HS411"]
    (look.draft / "weights").rename(look.draft / "pytorch_model.bin")
    assert look() == ["HS601"]


def test_sizes_that_are_no_numbers(look):
    assert look(config={"hidden_size": "16", "num_attention_heads": 0}) == ["HS603", "HS603"]
    assert look(config={"architectures": [], "hidden_size": 16}) == ["HS603"]
    assert look(config={"num_aux_hidden_states": -1}) == ["HS603"]
    assert look(config={"norm_output": "false"}) == ["HS603"]


@BOTH
@pytest.mark.parametrize("value", [[1, 14, 26], [], 0, "3"])
def test_a_count_that_is_no_number(look, engine, value):
    """Ids are counted; a list under a key of counts is multiplied by a width."""
    assert look(engine, config={"num_aux_hidden_states": value}) == ["HS603"]
    assert all("format that is listed" not in p.fix for p in look.problems)


# Weights.


@BOTH
@pytest.mark.parametrize("name", ["midlayer.hidden_norm.weight", "fc.weight", "norm.weight", "d2t", "lm_head.weight"])
def test_a_missing_weight(look, engine, name):
    code = "HS408" if name == "d2t" else "HS411"
    assert look(engine, weights=draft_weights(**{name: None})) == [code]


@BOTH
@pytest.mark.parametrize(
    ("name", "shape", "code"),
    [("fc.weight", (H, 4 * H), "HS402"), ("fc.weight", (H, 3 * H + 1), "HS409"), ("fc.weight", (H + 1, 3 * H), "HS409"),
     ("fc.weight", (H,), "HS411"), ("norm.weight", (H + 1,), "HS409"), ("midlayer.mlp.up_proj.weight", (9, H), "HS411"),
     ("midlayer.self_attn.q_proj.weight", (16, H), "HS409"), ("lm_head.weight", (VD + 1, H), "HS411"),
     ("lm_head.weight", (VD, H + 1), "HS409")],
)  # fmt: skip
def test_a_weight_of_another_shape(look, engine, name, shape, code):
    assert look(engine, weights=draft_weights(**{name: np.zeros(shape, np.float32)})) == [code]


def test_other_names(look):
    assert look(VLLM, weights=draft_weights(layer="layers.0")) == []
    assert look(SGLANG) == []
    older = draft_weights(layer="layers.0")
    assert set(look(("sglang", "0.5.10"), weights=older)) == {"HS411"}  # midlayer alone, others dropped
    prefixed = {(f"model.{k}" if k[0] not in "dt" and "lm_head" not in k else k): v for k, v in draft_weights().items()}
    assert look(SGLANG, weights=prefixed) == []
    assert set(look(VLLM)) == {"HS411"}
    head = draft_weights().pop("lm_head.weight")
    assert look(SGLANG, weights=draft_weights(**{"lm_head.weight": None, "model.lm_head.weight": head})) == ["HS411"]


def test_what_is_named_for_a_prefixed_weight(look):
    """Not another one whose name ends with the same letters."""
    prefixed = {(f"model.{k}" if k[0] not in "dt" and "lm_head" not in k else k): v for k, v in draft_weights().items()}
    look(VLLM, weights=prefixed)
    (norm,) = [p for p in look.problems if p.where == f"{look.draft}: norm.weight"]
    assert "the folder has model.norm.weight, which" in norm.got


@BOTH
def test_one_parameter_under_two_names(look, engine):
    """Both engines rename the first layer, so that one weight overwrites the other."""
    both = draft_weights() | {k: v for k, v in draft_weights(layer="layers.0").items() if k.startswith("layers.0.")}
    assert set(look(engine, weights=both)) == {"HS411"}
    assert all("the folder has midlayer." in p.got for p in look.problems)
    assert all("drops" not in p.got and "fails to load" not in p.got for p in look.problems)


def test_a_weight_that_nothing_takes(look):
    weights = draft_weights(**{"verifier_norm.weight": np.ones(H, np.float32)})
    assert look(SGLANG, weights=weights) == []
    assert look.warnings == ["HS411"]
    assert look(VLLM) == ["HS411"]
    weights = draft_weights(**{"midlayer.self_attn.q_proj.bias": np.ones(16, np.float32)})
    # A trained bias is lost, and that of o_proj is missing.
    assert look(SGLANG, config={"attention_bias": True}, weights=weights) == ["HS411", "HS411"]
    assert look(VLLM) == ["HS411"] * 3  # of k, v and o_proj


@BOTH
@pytest.mark.parametrize("key", ["attention_bias", "bias"])
def test_a_bias_of_o_proj_is_demanded(look, engine, key):
    """Either key makes one in both engines, and a folder without it leaves it as the memory was."""
    name = "midlayer.self_attn.o_proj.bias"
    biases = {f"midlayer.self_attn.{p}_proj.bias": np.ones(n, np.float32) for p, n in (("q", 16), ("k", 8), ("v", 8))}
    weights = draft_weights(**{"attention_bias": biases, "bias": {"fc.bias": np.ones(H, np.float32)}}[key])
    look(engine, config={key: True}, weights=weights)
    assert f"{look.draft}: {name}" in {p.where for p in look.problems if p.code == "HS411"}
    weights[name] = np.ones(H, np.float32)
    look(engine, config={key: True}, weights=weights)
    assert name not in str(look.problems)


def test_biases_of_the_mlp(look):
    names = {"gate": INNER, "up": INNER, "down": H}
    weights = draft_weights(**{f"midlayer.mlp.{p}_proj.bias": np.ones(n, np.float32) for p, n in names.items()})
    assert look(VLLM, config={"mlp_bias": True}, weights=weights) == []
    assert look(SGLANG) == ["HS411"] * 3  # it has none
    assert look(VLLM, config={"mlp_bias": True}) == ["HS411"] * 3


@BOTH
def test_of_a_quantised_draft_norms_and_fc_are_checked(look, engine):
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    packed = {"midlayer.self_attn.q_proj.weight": None, "midlayer.self_attn.q_proj.qweight": np.ones((2, 2), np.int32)}
    assert look(engine, config=fp8, weights=draft_weights(**packed)) == []
    assert look.warnings == ["HS411"]
    assert look(engine, config=fp8, weights=draft_weights(**packed, **{"fc.weight": None})) == ["HS411"]
    quantised_fc = {"fc.weight": None, "fc.qweight": np.ones((2, 2), np.int32)}
    assert look(engine, config=fp8, weights=draft_weights(**packed, **quantised_fc)) == []
    assert look(engine, config=fp8, weights=draft_weights(**{"fc.weight": np.ones((H, 4 * H), np.float32)})) == [
        "HS402"
    ]
    for name in ("norm.weight", "midlayer.hidden_norm.weight"):
        assert look(engine, config=fp8, weights=draft_weights(**{name: None})) == ["HS411"]
        assert look(engine, config=fp8, weights=draft_weights(**{name: np.ones(H + 1, np.float32)})) == ["HS409"]


@BOTH
@pytest.mark.parametrize("name", ["midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight", "fc.weight"])
def test_a_weight_that_is_no_float(look, engine, name):
    """Loaders copy its numbers; what scales them is not there."""
    weights = draft_weights()
    weights[name] = weights[name].astype(np.int8)
    assert look(engine, weights=weights) == ["HS411"]
    assert look.problems[0].got == "dtype I8"
    weights[name] = weights[name].astype(np.float16)
    assert look(engine, weights=weights) == []


def test_an_empty_quantization_config_is_none(look):
    assert look(config={"quantization_config": {}}, weights=draft_weights(**{"fc.weight": None})) == ["HS411"]
    assert look.warnings == []


def test_more_than_one_layer(look):
    two = {"num_hidden_layers": 2}
    assert look(VLLM, config=two, weights=draft_weights(layers=2)) == []
    assert look.layout.later_layers_norm == "input_layernorm"
    assert [p.severity for p in look.problems] == [Severity.NOTE]
    assert look(SGLANG) == []
    assert look.layout.later_layers_norm == "hidden_norm"
    assert look(("sglang", "0.5.11"))[0] == "HS410"
    assert look(VLLM, config=two, weights=draft_weights()) == ["HS411"] * 9  # all of the second layer


def test_latent_attention(look):
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    shapes = {
        "q_a_proj": (6, 2 * H), "q_a_layernorm": (6,), "q_b_proj": (4 * 6, 6), "kv_a_proj_with_mqa": (7, 2 * H),
        "kv_a_layernorm": (5,), "kv_b_proj": (4 * 7, 5), "o_proj": (H, 4 * 3),
    }  # fmt: skip
    weights = {k: v for k, v in draft_weights().items() if "self_attn" not in k}
    weights |= {f"midlayer.self_attn.{k}.weight": np.ones(s, np.float32) for k, s in shapes.items()}
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **sizes}
    assert look(VLLM, config=config, weights=weights) == []
    assert look.layout.rope[0].rotary_dim == 2
    assert look(SGLANG) == []
    del weights["midlayer.self_attn.kv_b_proj.weight"]
    assert look(SGLANG, config=config, weights=weights) == ["HS411"]


# Width, embedding and head.


@BOTH
def test_a_target_of_another_width(look, engine, tmp_path):
    other = write_target(tmp_path / "wide", target_config(hidden_size=32))
    errors = look(engine, target=other)
    assert set(errors) >= {"HS409"}
    wide = {"target_hidden_size": 32}
    weights = draft_weights(target_width=32, embedding=True)
    assert look(engine, config=wide, weights=weights, target=other) == []
    assert look.layout.embedding == "draft"
    assert look(engine, config=wide, weights=draft_weights(target_width=32), target=other) == ["HS411"]


def test_a_trained_embedding(look, tmp_path):
    weights = draft_weights(embedding=True)
    assert look(VLLM, weights=weights) == []
    assert look.layout.embedding == "draft"
    assert look(SGLANG) == []
    assert look.warnings == ["HS412"]  # the target's folder has no weights to compare it with
    own = weights["embed_tokens.weight"]
    same = write_target(tmp_path / "same", embedding=own)
    assert look(SGLANG, target=same) == []
    assert look.problems == []
    trained = write_target(tmp_path / "trained", embedding=own + np.float32(1e-3))
    assert look(SGLANG, target=trained) == ["HS412"]
    assert look(VLLM, target=trained) == []


def test_a_frozen_embedding_of_another_dtype(look, tmp_path):
    own = draft_weights(embedding=True)["embed_tokens.weight"]
    target = write_target(tmp_path / "t", embedding=own.astype(np.float64))
    assert look(SGLANG, weights=draft_weights(embedding=True), target=target) == []
    assert look.problems == []


def test_tied_embeddings(look):
    assert look(SGLANG, config={"tie_word_embeddings": True}) == ["HS412"]
    assert look.layout.head == "target"
    assert look(VLLM) == []
    assert look(VLLM, config={"tie_word_embeddings": True}, weights=draft_weights(**{"lm_head.weight": None})) == [
        "HS412"
    ]


def test_the_targets_head(look):
    whole = {"draft_vocab_size": None}
    shared = draft_weights(ids=None, **{"lm_head.weight": None})
    for engine in (VLLM, SGLANG):
        assert look(engine, config=whole, weights=shared) == []
        assert look.layout.head == "target"
        assert look.layout.draft_vocab_size == V
    own = draft_weights(ids=None, size=V)
    assert look(SGLANG, config=whole, weights=own) == []
    assert look.warnings == ["HS412"]  # it is not taken
    assert look(SGLANG, config={"draft_vocab_size": V}, weights=own) == []
    assert look.layout.head == "draft"
    assert look(SGLANG, config={"draft_vocab_size": V}, weights=shared) == ["HS411"]
    assert look(SGLANG, config={"draft_vocab_size": ...}, weights=own) == ["HS408"]


def test_one_capture_as_wide_as_the_draft(look):
    one = {TOP: [15], "num_aux_hidden_states": 1, "eagle_config": {TOP: [14]}}
    assert look(VLLM, config=one, weights=draft_weights(captures=1)) == []
    assert look(SGLANG) == ["HS402"]
