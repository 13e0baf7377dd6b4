"""Configs in the layout of Transformers 4 against what Transformers 5 makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from hsformat.digests import digest_json
from hsformat.problems import ForeignFileError
from hsformat.target.config import normalise, read_config

PUBLISHED = json.loads((Path(__file__).parents[1] / "data/published_configs.json").read_text())
"""In the layout of Transformers 4, written by hand after published models: keys are real, values need not be."""

KNOWN = [name for name, config in PUBLISHED.items() if config["model_type"] in CONFIG_MAPPING]
"""Those that the installed Transformers reads: a family of Transformers 5 has no other layout in 4."""

LLAMA3 = PUBLISHED["llama-3.1"]["rope_scaling"]


def digest_of(folder):
    problems = []
    normalised, ropes = normalise(read_config(folder), problems=problems)
    assert problems == []
    return digest_json(normalised), normalised, ropes


def write(folder, value):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_transformers_5_knows_every_family():
    assert int(transformers.__version__.split(".")[0]) < 5 or set(KNOWN) == set(PUBLISHED)


@pytest.mark.parametrize("name", KNOWN)
def test_layouts_of_transformers_4_and_5_give_one_digest(name, tmp_path):  # sfllm PR#32, Model-Optimizer PR#917
    old = write(tmp_path / "4", PUBLISHED[name])
    loaded = AutoConfig.from_pretrained(old)
    loaded.save_pretrained(tmp_path / "5")
    new = json.loads((tmp_path / "5/config.json").read_text())
    new.setdefault("architectures", PUBLISHED[name]["architectures"])
    write(tmp_path / "5", new)
    assert new != PUBLISHED[name]
    assert digest_of(tmp_path / "5")[1] == digest_of(old)[1]
    assert digest_of(tmp_path / "5")[0] == digest_of(old)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_that_a_library_writes_by_itself_do_not_matter(name, tmp_path):
    noise = {"transformers_version": "9.9.9", "use_cache": False, "_name_or_path": "x", "attention_dropout": 0.5,
             "bos_token_id": 9, "initializer_range": 0.5, "unheard_of": None}  # fmt: skip
    before = digest_of(write(tmp_path / "a", PUBLISHED[name]))[0]
    assert digest_of(write(tmp_path / "b", {**PUBLISHED[name], **noise}))[0] == before


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10000.0}, {"rms_norm_eps": 1e-6}, {"hidden_act": "gelu"}, {"head_dim": 64}, {"unheard_of": 1},
        {"num_key_value_heads": 32}, {"attention_bias": True}, {"intermediate_size": 1}, {"num_hidden_layers": 31},
        {"rope_scaling": {**LLAMA3, "factor": 4.0}}, {"tie_word_embeddings": True},
        {"quantization_config": {"quant_method": "fp8"}}, {"architectures": ["Other"]}, {"partial_rotary_factor": 0.5},
    ],
)  # fmt: skip
def test_a_change_of_meaning_changes_the_digest(change, tmp_path):
    base = PUBLISHED["llama-3.1"]
    assert digest_of(write(tmp_path / "a", base))[0] != digest_of(write(tmp_path / "b", {**base, **change}))[0]


def test_null_is_not_absent_where_the_family_has_a_default(tmp_path):
    base = {k: v for k, v in PUBLISHED["mistral"].items() if k != "sliding_window"}
    absent, null, default = ({}, {"sliding_window": None}, {"sliding_window": 4096})
    digests = [digest_of(write(tmp_path / str(i), {**base, **c}))[0] for i, c in enumerate((absent, null, default))]
    assert digests[0] == digests[2] != digests[1]


def test_old_name_of_longrope(tmp_path):
    old = {**PUBLISHED["phi3"], "rope_scaling": {**PUBLISHED["phi3"]["rope_scaling"], "type": "su"}}
    new = digest_of(write(tmp_path / "a", PUBLISHED["phi3"]))
    assert digest_of(write(tmp_path / "b", old)) == new
    assert new[2][0].parameters["original_max_position_embeddings"] == 4096


def test_gemma3_has_two_bases_and_scales_the_full_layers_alone(tmp_path):
    ropes = digest_of(write(tmp_path / "g", PUBLISHED["gemma3"]))[2]
    assert [(r.applies_to, r.kind, r.theta, r.parameters) for r in ropes] == [
        ("full_attention", "linear", 1e6, {"factor": 8}),
        ("sliding_attention", "default", 10000.0, {}),
    ]


def test_gemma4_has_heads_of_two_widths(tmp_path):
    """Published files say it by two keys, Transformers 5.24.0 by ``per_layer_config``."""
    base = PUBLISHED["gemma4"]
    digest, normalised, ropes = digest_of(write(tmp_path / "a", base))
    assert [(r.applies_to, r.kind, r.theta, r.rotary_dim, r.parameters) for r in ropes] == [
        ("full_attention", "proportional", 1e6, 128, {"head_dim": 512}),
        ("sliding_attention", "default", 10000.0, 256, {}),
    ]
    own = {"head_dim": 512, "num_key_value_heads": 4}
    assert normalised["per_layer_config"] == {str(i): own for i in range(5, 60, 6)}
    assert not {"global_head_dim", "num_global_key_value_heads"} & normalised.keys()
    both = {**base, "per_layer_config": {f"{i:02}": {**own, "skip": []} for i in range(5, 60, 6)}}
    assert digest_of(write(tmp_path / "b", both))[0] == digest
    for change in ({"global_head_dim": 256}, {"num_global_key_value_heads": 8}, {"per_layer_config": None},
                   {"per_layer_config": {"5": own}}, {"attention_k_eq_v": False}):  # fmt: skip
        problems = []
        other = normalise(read_config(write(tmp_path / "c", {**base, **change})), problems=problems)[0]
        assert digest_json(other) != digest
        assert [p.code for p in problems] == (["HS603"] if change.get("per_layer_config") else [])


def test_the_last_layer_of_gemma4_is_full(tmp_path):
    """Whatever the config lists: Gemma4TextConfig replaces it."""
    _, normalised, ropes = digest_of(write(tmp_path / "a", PUBLISHED["gemma4, small"]))
    assert normalised["layer_types"][-2:] == ["full_attention"] * 2
    assert sorted(normalised["per_layer_config"]) == ["2", "5", "6"]
    assert ropes[0].parameters == {"head_dim": 512}  # what a config that leaves it out means


@pytest.mark.parametrize(
    "change",
    [{"global_head_dim": None}, {"global_head_dim": "wide"}, {"num_global_key_value_heads": -1},
     {"per_layer_config": 5}, {"per_layer_config": {"60": {}}}, {"per_layer_config": {"5": {}, "05": {}}},
     {"per_layer_config": {"x": {}}}, {"per_layer_config": {"9" * 5000: {}}}, {"per_layer_config": {"5": None}},
     {"per_layer_config": {"5": {"head_dim": 0}}}, {"per_layer_config": {"5": {"num_key_value_heads": None}}},
     {"layer_types": ["full_attention"]}, {"layer_types": 3},
     {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                             "partial_rotary_factor": 0.001}}}],
)  # fmt: skip
def test_what_is_wrong_about_single_layers_is_said(change, tmp_path):
    problems = []
    try:
        normalise(read_config(write(tmp_path / "m", {**PUBLISHED["gemma4"], **change})), problems=problems)
    except ForeignFileError as e:
        problems += e.problems
    assert {p.code for p in problems} == {"HS603"}


def test_partial_rotary_factor_counts(tmp_path):  # speculators#613
    assert digest_of(write(tmp_path / "g", PUBLISHED["glm4"]))[2][0].rotary_dim == 64
    assert digest_of(write(tmp_path / "n", PUBLISHED["gpt_neox"]))[2][0].rotary_dim == 16


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, {"rope_parameters": {"rope_type": 3}},
     {"rope_parameters": "yarn"}, {"rope_theta": -1}, {"rope_theta": "1e6"}, {"partial_rotary_factor": 0},
     {"rope_theta": 10000, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
     {"rope_parameters": {"rope_type": "yarn", "factor": {"a": 1}}}],
)  # fmt: skip
def test_unknown_rope_is_refused_not_replaced(rope, tmp_path):  # NeMo Automodel PR#2399
    base = {k: v for k, v in PUBLISHED["llama-3.1"].items() if not k.startswith("rope")}
    problems = []
    normalise(read_config(write(tmp_path / "m", {**base, **rope})), problems=problems)
    assert {p.code for p in problems} == {"HS603"}


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6},
     {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6},
     {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}},
     {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True}}],
)  # fmt: skip
def test_a_target_of_several_position_dimensions_is_never_taken_for_one_of_one(rope, tmp_path):
    """SpecForge#310, SpecForge#352: a VLM's draft, trained at positions of text, is accepted about once."""
    base = {k: v for k, v in PUBLISHED["qwen2"].items() if not k.startswith("rope")}
    problems = []
    normalise(read_config(write(tmp_path / "m", {**base, **rope})), problems=problems)
    assert [p.code for p in problems] == ["HS603"]
    assert "one position a token" in problems[0].expected


@pytest.mark.parametrize(
    ("text", "place"),
    [("", "line 1"), ('{"a": [[', "column 9"), ("[]", ""), ("null", ""), ('{"a": NaN}', ""), ("{'a': 1}", "column 2"),
     ('{"a":' * 100_000, ""), ("\ufeff{}", "")],
)  # fmt: skip
def test_config_that_is_not_a_json_object(text, place, tmp_path):
    with pytest.raises(ForeignFileError) as e:
        read_config(write(tmp_path / "m", text))
    assert [p.code for p in e.value.problems] == ["HS602"]
    assert place in e.value.problems[0].where


def test_config_that_is_not_utf8_names_the_byte(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ForeignFileError) as e:
        read_config(tmp_path)
    assert (e.value.problems[0].code, "byte 7" in e.value.problems[0].where) == ("HS602", True)


def test_all_missing_fields_are_named(tmp_path):
    with pytest.raises(ForeignFileError) as e:
        read_config(write(tmp_path / "m", {"model_type": "llama", "hidden_size": "64", "vocab_size": True}))
    assert {p.code for p in e.value.problems} == {"HS603"}
    named = {p.where.rsplit(": ")[-1] for p in e.value.problems}
    assert named == {"num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "architectures"}


@pytest.mark.parametrize(
    "change",
    [{"model_type": "deepseek_v4"}, {"model_type": "gemma3n_text"},
     {"model_type": "qwen4_exp_text"}, {"is_encoder_decoder": True}],
)  # fmt: skip
def test_several_streams_are_refused(change, tmp_path):
    with pytest.raises(ForeignFileError) as e:
        read_config(write(tmp_path / "m", {**PUBLISHED["llama-2"], **change}))
    assert [p.code for p in e.value.problems] == ["HS410"]


def test_rope_said_twice_and_differently(tmp_path):
    old, new = {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    config = {**PUBLISHED["llama-2"], "rope_scaling": old, "rope_parameters": new, "rope_theta": 1e4}
    problems: list = []
    normalise(read_config(write(tmp_path / "m", config)), problems=problems)
    assert [p.code for p in problems] == ["HS603", "HS603"]
    assert {p.where.rsplit(".")[-1] for p in problems} == {"factor", "rope_theta"}


def test_two_dtypes_and_broken_layer_types(tmp_path):
    for change in ({"dtype": "float16"}, {"layer_types": ["full_attention"]}, {"layer_types": 4}):
        with pytest.raises(ForeignFileError) as e:
            read_config(write(tmp_path / "m", {**PUBLISHED["qwen3"], **change}))
        assert [p.code for p in e.value.problems] == ["HS603"]
