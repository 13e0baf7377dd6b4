"""The families table against Transformers: every row is a claim about numbers, so every row is computed.

The defaults table is made by ``python tests/unit/test_target_families.py > hsformat/target/family_defaults.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hsformat.dtypes import to_float32
from hsformat.target import FAMILIES, describe, load_key_tensor
from hsformat.target.config import _usual_names, is_ignored
from hsformat.target.families import WRAPPERS, family_defaults
from hsformat.target.rope import ROPE_KEYS

pytestmark = pytest.mark.needs("torch")

N, H, V = 3, 16, 48
SIZES = {
    "num_hidden_layers": N, "hidden_size": H, "vocab_size": V, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
SPECIAL = {
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8},
    "gemma3_text": {
        "final_logit_softcapping": 3.0,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4_text": {
        "final_logit_softcapping": 3.0,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        # what some sizes alone have, all at once: inputs a layer, shared keys and values, experts
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 4,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    },
    "gemma": {"head_dim": 8},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "cohere2": {"logit_scale": 0.25},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3": {"head_dim": 8},
    "glm4": {"head_dim": 8},
}


def tiny_config(model_type: str):
    return AutoConfig.for_model(model_type, **{**SIZES, **SPECIAL.get(model_type, {})}, dtype="float32")


def tiny_model(model_type: str):
    """Return a model whose every parameter is random: a norm weight of ones would hide what a norm is."""
    torch.manual_seed(0)
    if model_type == "gemma3":
        text = {**SIZES, **SPECIAL["gemma3_text"], "final_logit_softcapping": None}
        vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        config = AutoConfig.for_model(
            "gemma3", text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, dtype="float32"
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    elif model_type == "gemma4":
        text = {**SIZES, **SPECIAL["gemma4_text"], "use_bidirectional_attention": "vision"}
        vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        vision |= {"num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 16}
        config = AutoConfig.for_model("gemma4", text_config=text, vision_config=vision, dtype="float32")
        model = transformers.Gemma4ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # 1 when it is new
                buffer.mul_(0.7)
        for name in ("final_norm", "norm"):
            if hasattr(model, name):
                getattr(model, name).weight.mul_(1.5)
    return model.eval()


def final_norm_module(model):
    named = dict(model.named_modules())
    names = ("model.norm", "model.language_model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm")
    return next(named[n] for n in names if n in named)


def write(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    return folder


def norm(x, kind, eps, weight, bias):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * weight + (0 if bias is None else bias)


@pytest.mark.parametrize("model_type", [*FAMILIES, *WRAPPERS])
def test_row_gives_the_models_own_logits_and_depth_0(model_type, tmp_path):  # speculators PR#1038, TorchSpec#169
    model = tiny_model(model_type)
    seen = {}
    final_norm_module(model).register_forward_pre_hook(lambda _, args: seen.setdefault("last", args[0]))
    ids = torch.tensor([[3, 7, 11, 5, 40]])
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    target = describe(write(model, tmp_path / "m")).model
    weights = {
        role: None if (w := load_key_tensor(tmp_path / "m", role)) is None else to_float32(w)
        for role in ("embedding", "final_norm", "final_norm_bias", "lm_head", "lm_head_bias")
    }
    h = norm(
        seen["last"][0].numpy(), target.final_norm.kind, target.final_norm.eps,
        weights["final_norm"] + target.final_norm.unit_offset, weights["final_norm_bias"],
    )  # fmt: skip
    logits = h @ weights["lm_head"].T + (0 if weights["lm_head_bias"] is None else weights["lm_head_bias"])
    logits = logits * target.head.scale
    if target.head.softcap is not None:
        logits = target.head.softcap * np.tanh(logits / target.head.softcap)
    np.testing.assert_allclose(logits, out.logits[0].numpy(), rtol=2e-4, atol=2e-4)

    depth_0 = weights["embedding"][ids[0].numpy()] * np.float32(target.embedding.scale)
    family = FAMILIES.get(model_type)
    if family and family.learned_positions:
        depth_0 = depth_0 + model.transformer.wpe.weight.detach().numpy()[: ids.shape[1]]
    np.testing.assert_allclose(depth_0, out.hidden_states[0][0].numpy(), rtol=1e-5, atol=1e-5)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (N, H, V)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4"])
def test_layers_with_inputs_of_their_own_return_one_residual_stream(model_type):
    """Depth d in 1..N is what layer d returns: the next one takes it as it is, the final norm after the last."""
    model = tiny_model(model_type)
    layers = next(m for n, m in model.named_modules() if n in ("model.layers", "model.language_model.layers"))
    taken, given = [], []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args, kw: taken.append([*args, *kw.values()][0]), with_kwargs=True)
        layer.register_forward_hook(lambda _, __, out: given.append(out[0] if isinstance(out, tuple) else out))
    final_norm_module(model).register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 7, 11, 5, 40]]))
    assert len(given) == N
    for out, entered in zip(given, taken[1:], strict=True):
        torch.testing.assert_close(entered, out, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", [m for m, f in FAMILIES.items() if f.rope])
def test_rope_is_the_models_own(model_type, tmp_path):  # speculators#613: partial_rotary_factor ignored
    model = tiny_model(model_type)
    target = describe(write(model, tmp_path / "m")).model
    rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
    assert len(target.rope) == (2 if model_type in ("gemma3_text", "gemma4_text") else 1)
    for rope in target.rope:
        name = f"{rope.applies_to}_inv_freq" if len(target.rope) == 2 else "inv_freq"
        inv_freq = getattr(rotary, name).numpy()
        assert rope.rotary_dim == 2 * np.count_nonzero(inv_freq)
        if rope.kind == "proportional":
            width = rope.parameters["head_dim"]
            assert 2 * len(inv_freq) == width
            own = rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / width) / rope.parameters.get("factor", 1)
            np.testing.assert_allclose(inv_freq[: len(own)], own, rtol=1e-5)
            assert not inv_freq[len(own) :].any()
        if rope.kind == "default":
            exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
            np.testing.assert_allclose(inv_freq, rope.theta**-exponents, rtol=1e-5)


def class_defaults(model_type: str) -> dict[str, object]:
    """Return what the config class fills in, by usual names, without what changes no state or is computed."""
    cls = CONFIG_MAPPING[model_type]
    fields = {f.name: f.default for f in dataclasses.fields(cls)}
    config = cls().to_dict()
    values = _usual_names({k: fields.get(k, v) for k, v in config.items()}, FAMILIES[model_type])
    skip = ROPE_KEYS | {"model_type", "layer_types", "no_rope_layers", "max_window_layers", "per_layer_config"}
    computed = {"head_dim", "num_key_value_heads"}
    return {
        k: v for k, v in sorted(values.items())
        if k not in skip and not is_ignored(k) and v is not None and (k not in computed or fields.get(k) is not None)
    }  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_config_class(model_type):
    assert family_defaults(model_type) == class_defaults(model_type)


if __name__ == "__main__":
    table = {"made_by": f"{Path(__file__).name}, Transformers {transformers.__version__}"}
    json.dump({**table, "defaults": {m: class_defaults(m) for m in FAMILIES}}, sys.stdout, indent=1)
    print()
