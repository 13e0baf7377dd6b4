"""What engines make of a draft in the cases that no probe tries: each case was read in the engine's source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draft_folders import INNER, VD, H, V, draft_config, draft_weights, target_config, write_draft, write_target
from safetensors.numpy import save_file

from hsformat.engines import inspect, load_profile, numbering_row
from hsformat.engines.ids import depths_of, ids_of
from hsformat.engines.table import ENGINES, capture_row, draft_row
from hsformat.problems import Severity

VLLM, SGLANG = ("vllm", "0.32.0"), ("sglang", "0.5.23")
BOTH = pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=" ".join)
TOP = "eagle_aux_hidden_state_layer_ids"
MLA = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}


@pytest.fixture
def look(tmp_path):
    """Inspect a draft; return the codes of all errors, and keep layout, problems and codes of warnings."""
    run_folder = tmp_path / "draft"

    def run(engine, config=None, weights=None, target=None, *, written=False):
        if not written:
            write_draft(run_folder, draft_config(**(config or {})), weights)
        model = write_target(tmp_path / "target", target_config(**(target or {})))
        run.layout, run.problems = inspect(engine[0], draft=run_folder, target=model, version=engine[1])
        run.warnings = [p.code for p in run.problems if p.severity is Severity.WARNING]
        return [p.code for p in run.problems if p.severity is Severity.ERROR]

    run.folder = run_folder
    return run


def mlp(width: int, **more: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return weights whose MLP has a width of its own."""
    shapes = {"gate": (width, H), "up": (width, H), "down": (H, width)}
    named = {f"midlayer.mlp.{n}_proj.weight": np.ones(s, np.float32) for n, s in shapes.items()}
    return draft_weights(**{**named, **more})


def latent(rank: int | None) -> dict[str, np.ndarray]:
    """Return weights of latent attention with a rank of queries, or with one projection of them."""
    shapes = {
        "kv_a_proj_with_mqa": (7, 2 * H), "kv_a_layernorm": (5,), "kv_b_proj": (4 * 7, 5), "o_proj": (H, 4 * 3),
    }  # fmt: skip
    if rank is None:
        shapes["q_proj"] = (4 * 6, 2 * H)
    else:
        shapes |= {"q_a_proj": (rank, 2 * H), "q_a_layernorm": (rank,), "q_b_proj": (4 * 6, rank)}
    weights = {k: v for k, v in draft_weights().items() if "self_attn" not in k}
    return weights | {f"midlayer.self_attn.{k}.weight": np.ones(s, np.float32) for k, s in shapes.items()}


# Sizes.


@pytest.mark.parametrize(("model_type", "widths"), [("llama4_text", (INNER, 64)), ("llama", (INNER, INNER))])
def test_the_width_of_the_mlp(look, model_type, widths):
    """vLLM takes intermediate_size; SGLang intermediate_size_mlp, of llama4_text alone."""
    config = {"model_type": model_type, "intermediate_size": INNER, "intermediate_size_mlp": 64}
    for engine, width in zip((VLLM, SGLANG), widths, strict=True):
        assert look(engine, config, mlp(width)) == []
        assert look(engine, config, mlp(96 - width)) == ["HS411"] * 3
    uneven = mlp(INNER, **{"midlayer.mlp.up_proj.weight": np.ones((64, H), np.float32)})
    assert look(VLLM, config, uneven) == ["HS411"]


def test_no_width_of_the_mlp_of_llama4(look):
    assert look(SGLANG, {"model_type": "llama4_text"}, mlp(INNER)) == ["HS411"] * 3
    assert "Llama4TextConfig's 16384" in next(p.got for p in look.problems if p.code == "HS603")


@BOTH
def test_a_width_of_captures_that_is_null(look, engine):
    assert look(engine, {"target_hidden_size": None}) == ["HS603"]
    assert look.layout is None
    assert look(engine, {"target_hidden_size": ...}) == []


def test_a_width_of_captures_that_is_null_where_it_is_read_so(look):
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **MLA, "q_lora_rank": 6, "target_hidden_size": None}
    assert look(SGLANG, config, latent(6)) == []
    assert look(VLLM, config, latent(6)) == ["HS603"]


def test_latent_attention_without_a_rank_of_queries(look):
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **MLA, "q_lora_rank": None}
    assert look(VLLM, config, latent(None)) == []
    assert look(VLLM, config, latent(6)) != []
    assert look(SGLANG, config, latent(None)) == ["HS410"]  # "requires q_lora_rank"
    assert look(SGLANG, {**config, "q_lora_rank": ...}, latent(None)) == ["HS410"]
    assert look(VLLM, {**config, "kv_lora_rank": None}, latent(None)) == ["HS603"]
    kimi = {**config, "model_type": "kimi_k2", "q_lora_rank": ...}
    assert look(VLLM, kimi, latent(None)) == ["HS411"] * 4  # those of the class's rank, and one that nothing takes
    assert any("DeepseekV3Config's 1536" in p.got for p in look.problems)
    assert set(look(SGLANG, kimi, latent(None))) == {"HS411"}


def test_no_draft_vocabulary(look):
    """SGLang's Llama class reads the attribute, its MLA class asks for it."""
    whole = {**draft_weights(ids=None, **{"lm_head.weight": None})}
    assert look(SGLANG, {"draft_vocab_size": ...}, whole) == ["HS408"]
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **MLA, "q_lora_rank": 6, "draft_vocab_size": ...}
    mla = {k: v for k, v in latent(6).items() if k not in ("d2t", "t2d", "lm_head.weight")}
    assert look(SGLANG, config, mla) == []
    assert look.layout.head == "target"


# What a config class fills in.


@BOTH
@pytest.mark.parametrize(
    ("absent", "config", "said", "code"),
    [
        ("max_position_embeddings", {}, "LlamaConfig's 2048", "HS407"),
        ("rms_norm_eps", {}, "LlamaConfig's 1e-06", "HS405"),
        ("head_dim", {"model_type": "qwen3"}, "Qwen3Config's 128", "HS603"),
        ("head_dim", {"model_type": "kimi_k2"}, "DeepseekV3Config's 64", "HS603"),
        ("num_key_value_heads", {"model_type": "qwen3"}, "Qwen3Config's 32", "HS603"),
    ],
)
def test_what_is_filled_in_is_named_and_applied(look, engine, absent, config, said, code):
    assert look(engine, {**config, absent: ...}) == (["HS411"] * {"head_dim": 4}.get(absent, 2) if config else [])
    (warning,) = [p for p in look.problems if said in p.got]
    assert (warning.code, warning.severity) == (code, Severity.WARNING)


@BOTH
def test_positions_that_are_filled_in_bound_a_draft(look, engine):
    assert look(engine, {"max_position_embeddings": ...}, target={"max_position_embeddings": 131072}) == []
    assert look.layout.max_positions == 2048
    assert look.warnings == ["HS407", "HS407"]


def test_a_head_that_is_tied_by_its_class(look):
    config = {"model_type": "gemma3_text", "tie_word_embeddings": ...}
    assert look(SGLANG, config) == ["HS412"]
    assert "Gemma3TextConfig's true" in next(p.got for p in look.problems if p.code == "HS412")
    assert look(VLLM, config) == []  # the draft has a head of its own


def test_biases_of_a_class(look):
    config = {"model_type": "gpt_oss"}
    assert look(VLLM, config) == ["HS411"] * 4
    assert "GptOssConfig's true" in next(p.got for p in look.problems if p.code == "HS603")
    assert look(VLLM, {**config, "attention_bias": False}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", "x"), ("rms_norm_eps", 0.0), ("rms_norm_eps", None), ("tie_word_embeddings", 1),
     ("tie_word_embeddings", None), ("attention_bias", None), ("max_position_embeddings", None), ("model_type", None),
     ("eagle_config", "x"), ("eagle_config", [1])],
)  # fmt: skip
@BOTH
def test_values_that_no_engine_loads(look, engine, key, value):
    """Config classes of Transformers 5 refuse them; ``eagle_config`` is asked for its keys."""
    if engine == SGLANG and key == "attention_bias":
        value = 1
    assert "HS603" in look(engine, {key: value})


def test_a_class_that_is_not_known(look):
    assert look(VLLM, {"model_type": "brand_new"}) == []
    assert look(VLLM, {"model_type": "brand_new", "head_dim": ...}) == []
    assert look.warnings == ["HS603"]
    assert "brand_new" in look.problems[0].got


def test_the_epsilon_is_part_of_the_layout(look):
    assert look(VLLM, {"rms_norm_eps": 1e-4}) == []
    assert look.layout.rms_norm_eps == 1e-4


# Layer ids.


def test_ids_of_dflash_that_eagle_config_hides_from_one_reader(look):
    """Model runner V1 overwrites them by those of eagle_config, even by none."""
    config = {
        TOP: ...,
        "eagle_config": {"use_aux_hidden_state": True},
        "dflash_config": {"target_layer_ids": [3, 10, 20]},
    }
    for version in ("0.24.0", "0.32.0", "0.33.0"):
        assert "HS404" in look(("vllm", version), config)
        said = next(p.got for p in look.problems if p.code == "HS404")
        assert "V2 feeds [d4, d11, d21]" in said
        assert "V1 feeds [d2, d15, d27]" in said
    assert look(VLLM, {**config, "eagle_config": {}}) == []
    assert look.layout.keys == ("d4", "d11", "d21")


def test_an_empty_list_captures_nothing_in_sglang(look):
    assert look(SGLANG, {"eagle_config": {TOP: []}, TOP: ...}) == ["HS403"]
    assert look.layout is None
    assert "captures nothing" in look.problems[0].got
    assert look(VLLM, {"eagle_config": {TOP: []}, TOP: ...}) == ["HS403"]
    assert look.layout.keys == ("d2", "d15", "d27")


@BOTH
@pytest.mark.parametrize("value", [False, 0, None, ""])
def test_a_draft_that_is_fed_no_captures(look, engine, value):
    """Engines take the value by its truth."""
    assert look(engine, {"eagle_config": {TOP: [1, 14, 26], "use_aux_hidden_state": value}}) == ["HS410"]
    assert look(engine, {"eagle_config": {TOP: [1, 14, 26], "use_aux_hidden_state": "x"}}) == ["HS603"]


@pytest.mark.parametrize(
    ("architecture", "n", "version", "lowest"),
    [
        ("DeepseekV3ForCausalLM", 61, "0.5.13.post1", 1), ("DeepseekV3ForCausalLM", 61, "0.5.14", 0),
        ("KimiK25ForConditionalGeneration", 61, "0.5.13", 1), ("KimiK25ForConditionalGeneration", 61, "0.5.23", 0),
        ("GlmMoeDsaForCausalLM", 61, "0.5.23", 0), ("Glm4MoeLiteForCausalLM", 47, "0.5.20", 1),
        ("Glm4MoeLiteForCausalLM", 47, "0.5.21", 0), ("GptOssForCausalLM", 36, "0.5.17", 0),
    ],
)  # fmt: skip
def test_the_embedding_where_nothing_is_added(look, architecture, n, version, lowest):
    """Of these targets id 0 stands for depth 0; before, a sum with a residual failed that was not there yet."""
    ids = [0, 18, n] if architecture.startswith("Gpt") else [0, 15, 27]
    target = {"architectures": [architecture], "num_hidden_layers": n}
    errors = look(("sglang", version), {TOP: ..., "eagle_config": {TOP: ids}}, target=target)
    assert errors == (["HS304"] if lowest else [])
    row = capture_row("sglang", version, architecture)
    assert ids_of(row, ids, n) == (None if lowest else ids)
    assert depths_of(row, ids, n) == ids


def test_lists_beside_a_target_that_the_other_engine_does_not_know(look):
    """SGLang does not read the list at the top level; what it means to vLLM is not known."""
    target = {"architectures": ["Qwen2MoeForCausalLM"]}
    assert look(SGLANG, target=target) == []
    assert look.warnings == ["HS404"]
    assert "unknown to vLLM" in look.problems[0].got
    assert look.layout.keys == ("d2", "d15", "d27")


def test_the_other_engine_is_asked_of_the_target_itself(monkeypatch, look):
    """Not of another architecture that stands in the same row."""
    row = numbering_row("sglang", "Qwen2MoeForCausalLM", "0.5.23")
    mixed = row.model_copy(update={"architectures": ("LlamaForCausalLM", "Qwen2MoeForCausalLM")})
    known = ENGINES["sglang"]
    others = tuple(r for r in known.captures if "Qwen2MoeForCausalLM" not in r.architectures)
    monkeypatch.setitem(ENGINES, "sglang", replace(known, captures=(mixed, *others)))
    assert look(SGLANG, target={"architectures": ["Qwen2MoeForCausalLM"]}) == []
    assert "unknown to vLLM" in look.problems[0].got


def test_ids_of_the_decoder_count_for_the_width_of_fc(tmp_path):
    """vLLM's Qwen3 class counts ids wherever they stand."""
    inner = {k: v for k, v in draft_config(model_type="qwen3").items() if k not in ("eagle_config", "architectures")}
    inner |= {TOP: [2, 15, 20, 27]}
    del inner["num_aux_hidden_states"], inner["draft_vocab_size"]
    config = {
        "speculators_model_type": "eagle3", "draft_vocab_size": VD, "norm_before_residual": True,
        "transformer_layer_config": inner,
    }  # fmt: skip
    norms = {f"layers.0.self_attn.{n}_norm.weight": np.ones(4, np.float32) for n in "qk"}
    draft = write_draft(tmp_path / "d", config, draft_weights(layer="layers.0", captures=4, **norms))
    target = write_target(tmp_path / "t")
    layout, problems = inspect("vllm", draft=draft, target=target, version="0.32.0")
    assert [p for p in problems if p.severity is Severity.ERROR] == []
    assert layout.keys == ("d2", "d15", "d20", "d27")
    for key in ("rms_norm_eps", "num_key_value_heads"):  # nothing fills them in in this layout
        write_draft(draft, {**config, "transformer_layer_config": {k: v for k, v in inner.items() if k != key}})
        found = inspect("vllm", draft=draft, target=target, version="0.32.0")[1]
        assert any(p.code == "HS603" and key in p.where for p in found)


# Weights.


def test_a_map_under_another_name(look):
    weights = draft_weights()
    weights["model.d2t"] = weights.pop("d2t")
    assert look(SGLANG, weights=weights) == []
    assert look(VLLM, weights=weights) == ["HS408"]
    assert "fails to load" in look.problems[0].got
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **MLA, "q_lora_rank": 6}
    mla = {**latent(6), "model.d2t": weights["model.d2t"]}
    del mla["d2t"]
    assert look(SGLANG, config, mla) == []
    mla["my_d2t_map"] = mla.pop("model.d2t")
    assert look(SGLANG, config, mla) == ["HS408"]


def test_older_names_of_norms(look):
    """SGLang maps them, from 0.5.12 on."""
    norms = {f"aux_norm_{n}.weight": np.ones(H, np.float32) for n in ("low", "mid", "high")}
    config = {"use_aux_norm": True}
    assert look(SGLANG, config, draft_weights(**norms)) == []
    assert look.layout.fc_norm
    assert look(("sglang", "0.5.12"), config, draft_weights(**norms)) == []
    assert look(("sglang", "0.5.11"), config, draft_weights(**norms)) == ["HS405"]
    assert look(VLLM, {"fc_norm": True}, draft_weights(**norms)) == ["HS411"] * 6  # three missing, three refused


def test_a_mask_of_parallel_drafting(look):
    weights = draft_weights(mask_hidden=np.ones((1, 3 * H), np.float32))
    assert look(VLLM, weights=weights) == []
    assert look.warnings == ["HS411"]
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **MLA, "q_lora_rank": 6}
    assert look(VLLM, config, {**latent(6), "mask_hidden": weights["mask_hidden"]}) == ["HS411"]


def test_what_is_named_beside_a_missing_weight(look):
    """Not what is loaded for another one."""
    assert look(VLLM, weights=draft_weights(**{"norm.weight": None})) == ["HS411"]
    assert look.problems[0].got == "no such weight"


@BOTH
def test_every_safetensors_file_of_a_folder_is_loaded(look, engine):
    assert look(engine) == []
    whole = look.folder / "model.safetensors"
    save_file({"fc.weight": np.zeros((H, 3 * H), np.float32)}, look.folder / "other.safetensors")
    assert look(engine, written=True) == ["HS602"]
    assert "model.safetensors, other.safetensors" in look.problems[0].got
    index = {"weight_map": dict.fromkeys(draft_weights(), "model.safetensors")}
    (look.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert look(engine, written=True) == []  # what the index does not name is left out
    (look.folder / "model.safetensors.index.json").unlink()
    whole.rename(look.folder / "draft.safetensors")
    (look.folder / "other.safetensors").unlink()
    assert look(engine, written=True) == []


# Embedding and head.


def test_a_wider_draft_without_a_head_of_its_own(look):
    """SGLang puts embedding and head of the target in their places whatever their width."""
    config = {"target_hidden_size": 8, "draft_vocab_size": None}
    weights = draft_weights(target_width=8, ids=None, embedding=True, size=V)
    target = {"hidden_size": 8}
    assert look(SGLANG, config, weights, target) == ["HS409"]
    assert look.layout.embedding == "target"
    assert look(VLLM, config, weights, target) == []
    assert look.layout.embedding == "draft"
    assert look(SGLANG, {**config, "draft_vocab_size": V}, weights, target) == []


@BOTH
def test_weights_that_cannot_be_read_are_no_facts(look, engine):
    assert look(engine) == []
    (look.folder / "model.safetensors").write_bytes(b"x" * 64)
    assert look(engine, written=True) == ["HS602"]
    layout = look.layout
    assert (layout.head, layout.vocab_map) == ("unknown", "unknown")
    assert layout.embedding == ("target" if engine == SGLANG else "unknown")
    assert layout.keys == ("d2", "d15", "d27")


def test_no_map_is_the_first_ids(look):
    """Not the target's vocabulary, which None would say."""
    assert look(VLLM, weights=draft_weights(ids=None)) == ["HS408"]
    assert look.layout.vocab_map.startswith("sha256:")


# Rotary embedding.


@BOTH
def test_a_base_of_zero_is_stated(look, engine):
    assert look(engine, {"rope_theta": 0}) == ["HS407"]
    assert look(engine, {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}) == []
    assert look.warnings == ["HS407"]


def test_the_layout_rotates_what_the_engine_rotates(look):
    inside = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}
    assert look(SGLANG, {"rope_theta": ..., **inside}) == ["HS407"]
    assert look.layout.rope[0].rotary_dim == 4
    assert look(VLLM, {"rope_theta": ..., **inside}) == []
    assert look.layout.rope[0].rotary_dim == 2


# Profiles.


def test_a_profile_says_nothing_of_what_was_not_tried():
    """The newest row of the tables does, and the profile's digest is that of what it holds."""
    path = Path(__file__).parents[1] / "data/profiles/sglang-0.5.23-LlamaForCausalLM.json"
    profile = load_profile(path)
    assert "loading" not in profile.to_json()["drafts"][0]
    newer = profile.model_copy(update={"version": "0.9.0"})
    row = draft_row("sglang", "0.9.0", "plain", "LlamaForCausalLMEagle3", newer)
    assert row.loads.mlp_width == "llama4"
    with pytest.raises(ValueError, match="probe"):
        _ = profile.drafts[0].loads
