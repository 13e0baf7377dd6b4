"""A tiny random target of an architecture, and the draft folders that are served with it.

No width of the target is a multiple of its hidden size but the ones that are meant, so that the draft's ``fc`` is the
only module that maps ``K * HIDDEN`` to ``HIDDEN`` (``watch``). torch and Transformers are imported when they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hsformat.problems import ResolveError, problem

__all__ = [
    "DRAFT_VOCAB", "HEADS", "HEAD_DIM", "HIDDEN", "INNER", "PROMPT", "RMS_EPS", "VOCAB", "Array", "draft_config",
    "draft_weights", "draw", "layer_weights", "save_target", "write_draft",
]  # fmt: skip

Array = np.ndarray[Any, Any]

HIDDEN, VOCAB, DRAFT_VOCAB, HEAD_DIM, HEADS = 64, 128, 56, 32, 2
INNER, RMS_EPS = 160, 1e-6
PROMPT = (5, 9, 17, 33, 65, 100, 3, 77, 8, 21, 44)
"""Token ids, none of them special: a number of rows that no width of the model has."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    # embeddings a layer, which Gemma 4 has in some sizes alone
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER, "n_shared_experts": 1, "shared_expert_intermediate_size": INNER,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "decoder_sparse_step": 1,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
"""Sizes by the names that configs give them; a config takes those that it has."""

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""Of latent attention, as published configs have it; SGLang 0.5.23 has no other for it on a CPU."""


def save_target(
    folder: Path, architecture: str, num_layers: int, *, dtype: str, sizes: Mapping[str, Any] | None = None
) -> None:
    """Save a random target with a tokenizer of whole words; norms are not left at 1.

    Parameters
    ----------
    sizes
        In place of the usual ones, by the names of its config, where an engine's kernels know no others.

    Raises
    ------
    ResolveError
        HS410: Transformers does not know the architecture, or cannot build it at this size.
    """
    import torch
    import transformers

    config_class = _config_class(architecture)
    plain = config_class().to_dict()
    known = {*plain, "tie_word_embeddings"}
    # Null stands for a model without experts: a number makes some engines expect them (vLLM 0.32.0, Gemma 4).
    dense = {"num_experts", "moe_intermediate_size"} if plain.get("num_experts", 0) is None else set()
    given = {k: v for k, v in _SIZES.items() if k in known - dense} | dict(sizes or {})
    if "kv_lora_rank" in known:
        given["num_key_value_heads"] = HEADS  # latent attention has as many as there are heads
        given["rope_parameters"] = _YARN
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model = auto.from_config(config_class(**given, num_hidden_layers=num_layers, dtype=dtype), dtype=torch.float32)
    except Exception as e:  # each config checks its own members in its own way
        raise ResolveError(
            problem("HS410", where=f"--architecture {architecture}", got=f"{type(e).__name__}: {e}",
                    expected="an architecture that Transformers builds from plain sizes",
                    fix="probe another architecture of the same family")
        ) from e  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.2 * torch.randn_like(p)
    model.config.architectures = [architecture]
    # DeepSeek's own configs say these, Transformers' do not, and engines ask for them.
    if "kv_lora_rank" in known:
        model.config.moe_layer_freq, model.config.scoring_func = 1, "softmax"
    if any(name.endswith("e_score_correction_bias") for name in model.state_dict()):
        model.config.topk_method, model.config.scoring_func = "noaux_tc", "sigmoid"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _save_tokenizer(folder)


def _config_class(architecture: str) -> Any:
    """Return Transformers' config class of an architecture.

    Raises
    ------
    ResolveError
        HS410: there is no such causal language model.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {n for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for n in _several(names)}
    model_class = getattr(transformers, architecture, None) if architecture in known else None
    if model_class is None:
        raise ResolveError(
            problem("HS410", where="--architecture", got=architecture,
                    expected="a causal language model by its class in Transformers, such as LlamaForCausalLM",
                    fix="use the first entry of architectures in the target's config.json")
        )  # fmt: skip
    return model_class.config_class


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0").save_pretrained(folder)


def draft_config(keys: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Return the config of a draft of one layer, with ``keys`` merged into it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": RMS_EPS, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2, **keys,
    }  # fmt: skip


def draft_weights(slots: int, hidden: int = HIDDEN) -> dict[str, Array]:
    """Return the random weights of such a draft, ``hidden`` wide; its ``fc`` takes ``slots`` captures. No norm is 1."""
    weights = {"fc.weight": draw("fc", hidden, slots * HIDDEN), "norm.weight": 1 + draw("norm", hidden)}
    weights |= {"lm_head.weight": draw("lm_head", DRAFT_VOCAB, hidden), **layer_weights("midlayer", 2, hidden)}
    ids = 2 * np.arange(DRAFT_VOCAB, dtype=np.int64) + 3  # an offset is no target id itself
    t2d = np.zeros(VOCAB, np.bool_)
    t2d[ids] = True
    return {**weights, "d2t": ids - np.arange(DRAFT_VOCAB), "t2d": t2d}


def layer_weights(name: str, inputs: int, hidden: int = HIDDEN) -> dict[str, Array]:
    """Return the weights of a draft's layer whose attention takes ``inputs`` times the width of the draft."""
    width = inputs * hidden
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, width), "self_attn.k_proj": (HEAD_DIM, width),
        "self_attn.v_proj": (HEAD_DIM, width), "self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, hidden), "mlp.up_proj": (INNER, hidden), "mlp.down_proj": (hidden, INNER),
    }  # fmt: skip
    out = {f"{name}.{part}.weight": draw(f"{name}.{part}", *shape) for part, shape in shapes.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        out[f"{name}.{norm}.weight"] = 1 + draw(f"{name}.{norm}", hidden)
    return out


def draw(name: str, *shape: int) -> Array:
    """Return random numbers that are the same for a name every time."""
    seed = np.random.default_rng(list(name.encode()))
    return (0.2 * seed.standard_normal(shape)).astype(np.float32)


def write_draft(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
    """Write a draft folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
