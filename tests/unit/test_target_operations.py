"""What a forward pass takes, against the matrices of Transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hsformat.target.config import read_config
from hsformat.target.operations import ForwardCost, forward_cost

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
PLAIN = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = {**PLAIN, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
GEMMA4 = {**PLAIN, "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
          "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1,
          "use_double_wide_mlp": True, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
          "moe_intermediate_size": 24, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 96}  # fmt: skip
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
          "n_group": 1, "topk_group": 1}  # fmt: skip


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {**PLAIN, "head_dim": 16}),
        ("Gemma2", {**PLAIN, "head_dim": 8}),
        ("Gemma4Text", GEMMA4),
        ("Gemma4Text", {**GEMMA4, "layer_types": ["full_attention"] * 4, "attention_k_eq_v": False}),
        ("Gemma4Text", {**GEMMA4, "enable_moe_block": False, "hidden_size_per_layer_input": 0}),
        ("Phi3", {**PLAIN, "pad_token_id": 0}),
        ("GPT2", {"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4}),
        ("GPTNeoX", {**SIZES, "intermediate_size": 48}),
        ("Starcoder2", PLAIN),
        ("Mixtral", {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Qwen2Moe", {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
        ("Qwen3Moe", {**EXPERTS, "num_experts": 6, "mlp_only_layers": [1]}),
        ("GptOss", {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
        ("Glm4Moe", {**EXPERTS, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
        ("DeepseekV3", {**EXPERTS, **LATENT, "n_routed_experts": 6, "num_key_value_heads": 4}),
        ("DeepseekV2", {**EXPERTS, **LATENT, "n_routed_experts": 6, "num_key_value_heads": 4, "q_lora_rank": None}),
    ],
)
def test_matrices_are_those_of_the_model(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**options, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    cost = forward_cost(read_config(tmp_path))
    assert isinstance(cost, ForwardCost), cost
    experts = options.get("num_local_experts") or options.get("num_experts") or options.get("n_routed_experts") or 1
    active = 0
    for key, p in model.named_parameters():
        if p.ndim < 2 or "embed" in key or "wte" in key or "wpe" in key or key.startswith(("lm_head", "embed_out")):
            continue
        if "bias" in key or "shared_expert_gate" in key:
            continue
        routed = ".experts." in key
        each = options.get("top_k_experts") or options.get("num_experts_per_tok", 1)
        active += p.numel() * each // experts if routed else p.numel()
    assert cost.layers == active
    assert cost.head == 96 * 32


def test_layers_of_other_heads_have_other_products(tmp_path: Path) -> None:
    changes = {**GEMMA4, "model_type": "gemma4_text", "sliding_window": 3}
    cost = forward_cost(config_of(tmp_path, **changes))
    assert isinstance(cost, ForwardCost)
    assert cost.pairs == (2 * 4 * 8, 2 * 4 * 12) * 2
    slid, full = (sum(min(t + 1, window) for t in range(7)) for window in (3, 7))
    assert cost.operations(7) == 2 * (7 * cost.layers + 2 * (2 * 4 * 8) * slid + 2 * (2 * 4 * 12) * full)


def config_of(folder: Path, **changes: Any) -> Any:
    values = {**PLAIN, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(values | changes))
    return read_config(folder)


def test_attention_is_causal_and_ends_at_the_window(tmp_path: Path) -> None:
    for window in (None, 3):
        cost = forward_cost(config_of(tmp_path, sliding_window=window))
        assert isinstance(cost, ForwardCost)
        met = sum(min(t + 1, window or 7) for t in range(7))
        assert cost.operations(7) == 2 * (7 * cost.layers + 4 * (2 * 4 * 8) * met)
    assert cost.operations(7, written=2) - cost.operations(7) == 2 * 2 * cost.head


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "unheard_of"}, "not in the table"),
        ({"intermediate_size": "many"}, "intermediate_size"),
        ({"intermediate_size": 10**30}, "no size"),
        ({"num_local_experts": 4, "num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    told = forward_cost(config_of(tmp_path, **changes))
    assert isinstance(told, str)
    assert why in told
