"""Tiny random causal LMs of many families, saved to a folder, with what a contract must say of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from factories import digest

from hsformat.contract import Capture, TargetModel
from hsformat.extraction.protocol import ExtractionRequest
from hsformat.record import Generation

__all__ = ["FAMILIES", "HIDDEN", "LAYERS", "VOCAB", "TinyModel", "captures", "request_for", "save_tiny"]

pytestmark = pytest.mark.needs("torch")  # nothing imports this module without it

HIDDEN, LAYERS, VOCAB = 32, 4, 96
GIVEN = Generation(mode="none")
RMS: dict[str, Any] = {"kind": "rmsnorm", "eps": 1e-6, "unit_offset": False}
LAYERNORM: dict[str, Any] = {"kind": "layernorm", "eps": 1e-5, "unit_offset": False}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A saved model and its description."""

    folder: Path
    target: TargetModel


def _family(config: str, options: dict[str, Any], **facts: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return config, options, facts


FAMILIES = {
    "llama": _family("LlamaConfig", GATED, norm=RMS),
    "qwen3": _family("Qwen3Config", {**GATED, "head_dim": 8}, norm=RMS),
    "gemma2": _family(
        "Gemma2Config", {**GATED, "head_dim": 8, "sliding_window": 8}, norm={**RMS, "unit_offset": True},
        embedding=HIDDEN**0.5, tied=True, softcap=30.0,
    ),
    "gemma3": _family(
        "Gemma3TextConfig", {**GATED, "head_dim": 8, "sliding_window": 8}, norm={**RMS, "unit_offset": True},
        embedding=HIDDEN**0.5, tied=True,
    ),
    "gpt2": _family(
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 128,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2},
        norm=LAYERNORM, tied=True,
    ),
    "gpt_neox": _family("GPTNeoXConfig", {**SIZES, "intermediate_size": 64}, norm=LAYERNORM),
    "mixtral": _family("MixtralConfig", {**GATED, "num_local_experts": 4}, norm={**RMS, "eps": 1e-5}),
    "granite": _family(
        "GraniteConfig", {**GATED, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.5},
        norm=RMS, embedding=12.0, head=1 / 8,
    ),
    "cohere": _family("CohereConfig", {**GATED, "logit_scale": 0.25}, norm=LAYERNORM, tied=True, head=0.25),
    "olmo": _family("OlmoConfig", GATED, norm=LAYERNORM),
    "mamba": _family(
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4,
         "initializer_range": 0.2, "residual_in_fp32": False},
        norm={**RMS, "eps": 1e-5}, tied=True,
    ),
}  # fmt: skip
"""Family: config class, its options, and facts for the contract where they are not the plain ones."""


def save_tiny(family: str, folder: Path, *, dtype: str = "float32", **options: Any) -> TinyModel:
    """Save a random model; norms are not left at 1 and 0, so that an offset or a bias shows."""
    config_class, defaults, facts = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**defaults, **options})
    config.tie_word_embeddings = facts.get("tied", False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.1 * torch.randn_like(p)
    model.save_pretrained(folder)
    target = TargetModel.model_validate(
        {
            "name": family, "revision": None, "architecture": type(model).__name__, "num_layers": LAYERS,
            "hidden_size": HIDDEN, "vocab_size": VOCAB, "dtype": dtype, "quantization": None,
            "embedding": {"scale": facts.get("embedding", 1.0), "tied": facts.get("tied", False)},
            "head": {"bias": False, "softcap": facts.get("softcap"), "scale": facts.get("head", 1.0),
                     "padded_vocab": VOCAB},
            "final_norm": facts["norm"], "rope": (), "config_digest": digest("1"), "basis_digest": digest("2"),
            "weights_digest": None,
        }
    )  # fmt: skip
    return TinyModel(folder=folder, target=target)


def captures(*keys: str, dtype: str = "float32") -> tuple[Capture, ...]:
    """Return captures by key: ``d2``, ``d4n``."""
    return tuple(
        Capture.model_validate(
            {"depth": int(k.strip("dn")), "norm": "final" if k.endswith("n") else "none", "dtype": dtype}
        )
        for k in keys
    )


ALL_KEYS = (*(f"d{d}" for d in range(LAYERS + 1)), f"d{LAYERS}n")


def request_for(
    tiny: TinyModel, *keys: str, generation: Generation = GIVEN, batch_tokens: int = 64, **options: str
) -> ExtractionRequest:
    """Return a request for these captures (none named: all there are), on the CPU."""
    return ExtractionRequest(
        model=tiny.folder,
        target=tiny.target,
        captures=captures(*(keys or ALL_KEYS), dtype=tiny.target.dtype),
        generation=generation,
        batch_tokens=batch_tokens,
        options={"device": "cpu", **options},
    )
