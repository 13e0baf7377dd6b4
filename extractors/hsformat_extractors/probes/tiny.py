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

__all__ = ["DRAFT_VOCAB", "HIDDEN", "PROMPT", "VOCAB", "save_draft", "save_target"]

HIDDEN, VOCAB, DRAFT_VOCAB, HEAD_DIM, HEADS = 64, 128, 56, 32, 2
INNER = 160
PROMPT = (5, 9, 17, 33, 65, 100, 3, 77, 8, 21, 44)
"""Token ids, none of them special: a number of rows that no width of the model has."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER, "n_shared_experts": 1, "shared_expert_intermediate_size": INNER,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "decoder_sparse_step": 1,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
"""Sizes by the names that configs give them; a config takes those that it has."""


def save_target(folder: Path, architecture: str, num_layers: int, *, dtype: str) -> None:
    """Save a random target with a tokenizer of whole words; norms are not left at 1.

    Raises
    ------
    ResolveError
        HS410: Transformers does not know the architecture, or cannot build it at this size.
    """
    import torch
    import transformers

    config_class = _config_class(architecture)
    known = {*config_class().to_dict(), "tie_word_embeddings"}
    sizes = {k: v for k, v in _SIZES.items() if k in known}
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model = auto.from_config(config_class(**sizes, num_hidden_layers=num_layers, dtype=dtype), dtype=torch.float32)
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
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _save_tokenizer(folder)


def _config_class(architecture: str) -> Any:
    """Return Transformers' config class of an architecture."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = [t for t, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if architecture in (names, *_tuple(names))]
    if not types:
        raise ResolveError(
            problem("HS410", where="--architecture", got=architecture,
                    expected="a causal language model by its class in Transformers, such as LlamaForCausalLM",
                    fix="use the first entry of architectures in the target's config.json")
        )  # fmt: skip
    return CONFIG_MAPPING[types[0]]


def _tuple(names: Any) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else ()


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0").save_pretrained(folder)


def save_draft(folder: Path, *, slots: int, keys: Mapping[str, Any], dtype: str) -> None:
    """Save a random EAGLE-3 draft of one layer whose ``fc`` takes ``slots`` captures; ``keys`` go into its config."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray[Any, Any]:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    kv, q = HEAD_DIM, HEADS * HEAD_DIM
    shapes = {
        "fc": (HIDDEN, slots * HIDDEN), "midlayer.self_attn.q_proj": (q, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (kv, 2 * HIDDEN), "midlayer.self_attn.v_proj": (kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, q), "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN), "midlayer.mlp.down_proj": (HIDDEN, INNER),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
    }  # fmt: skip
    weights = {f"{name}.weight": draw(*shape) for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + draw(HIDDEN)
    # Draft id i is target id 2 i + 3: an offset, which is no target id itself.
    weights["d2t"] = np.arange(DRAFT_VOCAB, dtype=np.int64) + 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2, **keys,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
