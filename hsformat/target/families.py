"""What a config does not say about a model family, as a table.

Each row was read in Transformers 5.24.0 (``models/<model_type>/``) and recomputed:
``tests/unit/test_target_families.py`` instantiates every family at a tiny size and compares logits with
``cap(scale * (norm(depth N) @ W.T + b))`` and depth 0 with ``scale * row``. A ``model_type`` without a row is
refused, never taken for its nearest relative.

The scale of an embedding is exact here; Transformers rounds it to the embedding's dtype before it multiplies.
``family_defaults.json`` holds what a family's config class fills in for a key that a config leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "FAMILIES", "SEVERAL_STREAMS", "WITHOUT_CAP", "WRAPPERS", "Family", "LayerTypes", "RopeRule", "family_defaults",
]  # fmt: skip

LayerTypes = Callable[[Mapping[str, Any]], list[str]]
"""Computes ``layer_types`` from the other keys of a config that leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    """How a family reads its rotary embedding.

    Attributes
    ----------
    theta
        Base where the config gives none.
    partial
        Share of a head's dimensions that is rotated, where the config gives none.
    local_theta
        Base of the sliding layers where the config gives no ``rope_local_base_freq``; None: all layers have one base.
    applies_to
        Layers that are rotated: ``all``, a layer type, or ``no_rope_layers`` (those whose entry in that list is 1).
    kinds
        Other names of a kind, old or wrong ones that the family's class replaces.
    parameters
        What it uses when the config gives no parameters at all; or one such object a layer type.
    """

    theta: float = 10_000.0
    partial: float = 1.0
    local_theta: float | None = None
    applies_to: str = "all"
    kinds: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row.

    Attributes
    ----------
    norm, eps_key, unit_offset, norm_bias
        Final norm: its kind, the config key of its epsilon, whether its weight is stored minus one, and whether it
        has a bias.
    embedding_scale
        Config key of the factor, or ``sqrt(hidden_size)``; None: 1.
    head_scale
        Config key of the factor on the logits, or ``1/key``; None: 1.
    softcap
        Config key of the cap on the logits; None: no cap.
    head_bias
        Whether lm_head has a bias.
    learned_positions
        Whether a learned position embedding is added to depth 0.
    latent_attention
        DeepSeek: the rotated part of a head, ``qk_rope_head_dim``, is its ``head_dim``.
    renames
        Config keys of this family to the usual ones.
    layer_types
        How they follow from other keys; None: all layers are alike.
    ends_full
        Whether the last layer is ``full_attention``, whatever the config lists.
    full_head_dim
        ``head_dim`` of the full layers where the config gives none (``hsformat.target.layerwise``); None: that of all.
    rope
        None: no rotary embedding.
    source
        The classes in which the row was read.
    """

    source: str
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps_key: str = "rms_norm_eps"
    unit_offset: bool = False
    norm_bias: bool = False
    embedding_scale: str | None = None
    head_scale: str | None = None
    softcap: str | None = None
    head_bias: bool = False
    learned_positions: bool = False
    latent_attention: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    layer_types: LayerTypes | None = None
    ends_full: bool = False
    full_head_dim: int | None = None
    rope: RopeRule | None = field(default_factory=RopeRule)


def _full_every(period: int) -> LayerTypes:
    """Every ``period``-th layer is full, the others slide; ``sliding_window_pattern`` overrides the period."""

    def layer_types(config: Mapping[str, Any]) -> list[str]:
        n = config.get("sliding_window_pattern", period)
        return _types(config, lambda i: bool((i + 1) % n))

    return layer_types


def _slide_but_every_sixth(config: Mapping[str, Any]) -> list[str]:
    return _types(config, lambda i: bool((i + 1) % 6))


def _types(config: Mapping[str, Any], slides: Callable[[int], bool]) -> list[str]:
    return ["sliding_attention" if slides(i) else "full_attention" for i in range(config["num_hidden_layers"])]


def _slide_after_window_layers(config: Mapping[str, Any]) -> list[str]:
    slides = bool(config.get("sliding_window"))
    return _types(config, lambda i: slides and i >= config.get("max_window_layers", 28))


def _slide_even_below_window_layers(config: Mapping[str, Any]) -> list[str]:
    slides = bool(config.get("sliding_window"))
    return _types(config, lambda i: slides and i % 2 == 0 and i < config.get("max_window_layers", 28))


def _slide_without_rope(config: Mapping[str, Any]) -> list[str]:
    slides, rotated = bool(config.get("sliding_window")), config["no_rope_layers"]
    return _types(config, lambda i: slides and not rotated[i])


_ACTIVATION = {"hidden_activation": "hidden_act"}
_GPT2_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act",
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family(source="LlamaRMSNorm, LlamaForCausalLM"),
    "mistral": Family(source="MistralRMSNorm, MistralForCausalLM"),
    "mixtral": Family(source="MixtralRMSNorm, MixtralForCausalLM", rope=RopeRule(theta=1e6)),
    "qwen2": Family(source="Qwen2RMSNorm, Qwen2ForCausalLM", layer_types=_slide_after_window_layers),
    "qwen3": Family(source="Qwen3RMSNorm, Qwen3ForCausalLM", layer_types=_slide_after_window_layers),
    "qwen2_moe": Family(source="Qwen2MoeRMSNorm, Qwen2MoeForCausalLM", layer_types=_slide_even_below_window_layers),
    "qwen3_moe": Family(source="Qwen3MoeRMSNorm, Qwen3MoeForCausalLM"),
    "phi3": Family(
        source="Phi3RMSNorm, Phi3ForCausalLM; Phi3Config: su and yarn are longrope",
        rope=RopeRule(kinds={"su": "longrope", "yarn": "longrope"}),
    ),
    "gemma": Family(
        source="GemmaRMSNorm (1 + weight), GemmaTextScaledWordEmbedding", unit_offset=True,
        embedding_scale="sqrt(hidden_size)", renames=_ACTIVATION,
    ),
    "gemma2": Family(
        source="Gemma2RMSNorm (1 + weight), Gemma2TextScaledWordEmbedding, Gemma2ForCausalLM", unit_offset=True,
        embedding_scale="sqrt(hidden_size)", softcap="final_logit_softcapping", renames=_ACTIVATION,
        layer_types=_full_every(2),
    ),
    "gemma3_text": Family(
        source="Gemma3RMSNorm (1 + weight), Gemma3TextScaledWordEmbedding, Gemma3ForCausalLM", unit_offset=True,
        embedding_scale="sqrt(hidden_size)", softcap="final_logit_softcapping", renames=_ACTIVATION,
        layer_types=_full_every(6), rope=RopeRule(theta=1e6, local_theta=10_000.0),
    ),
    # One residual stream in all sizes: a layer returns (h + attention + feed-forward (+ experts) + gated input of that
    # layer) * layer_scalar. What embed_tokens_per_layer gives enters beside it, from the token and from depth 0, and
    # depth 0 itself is the scaled row alone; shared keys and values change what a layer attends to.
    "gemma4_text": Family(
        source="Gemma4RMSNorm (weight alone), Gemma4TextScaledWordEmbedding, Gemma4TextDecoderLayer, Gemma4TextModel, "
        "Gemma4ForCausalLM, Gemma4TextConfig; _compute_proportional_rope_parameters",
        embedding_scale="sqrt(hidden_size)", softcap="final_logit_softcapping", renames=_ACTIVATION,
        layer_types=_slide_but_every_sixth, ends_full=True, full_head_dim=512,
        rope=RopeRule(
            parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        ),
    ),
    "gpt2": Family(
        source="GPT2Model: ln_f, wte + wpe", norm="layernorm", norm_bias=True, eps_key="layer_norm_epsilon",
        learned_positions=True, renames=_GPT2_NAMES, rope=None,
    ),
    "gpt_neox": Family(
        source="GPTNeoXModel: final_layer_norm; GPTNeoXConfig: rotary_pct 0.25", norm="layernorm", norm_bias=True,
        eps_key="layer_norm_eps", renames={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        rope=RopeRule(partial=0.25),
    ),
    "granite": Family(
        source="GraniteRMSNorm, GraniteModel: embedding_multiplier, GraniteForCausalLM: logits / logits_scaling",
        embedding_scale="embedding_multiplier", head_scale="1/logits_scaling",
    ),
    "olmo2": Family(source="Olmo2RMSNorm, Olmo2ForCausalLM"),
    "smollm3": Family(
        source="SmolLM3RMSNorm, SmolLM3ForCausalLM, SmolLM3Config", layer_types=_slide_without_rope,
        rope=RopeRule(theta=2e6, applies_to="no_rope_layers"),
    ),
    "starcoder2": Family(
        source="Starcoder2Model: nn.LayerNorm", norm="layernorm", norm_bias=True, eps_key="norm_epsilon",
    ),
    "gpt_oss": Family(
        source="GptOssRMSNorm, GptOssForCausalLM, GptOssConfig", layer_types=_full_every(2),
        rope=RopeRule(
            theta=150_000.0,
            parameters={
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    "deepseek_v2": Family(source="DeepseekV2RMSNorm, DeepseekV2ForCausalLM", latent_attention=True),
    "deepseek_v3": Family(source="DeepseekV3RMSNorm, DeepseekV3ForCausalLM", latent_attention=True),
    "glm4": Family(source="Glm4RMSNorm, Glm4ForCausalLM, Glm4Config", rope=RopeRule(partial=0.5)),
    "glm4_moe": Family(source="Glm4MoeRMSNorm, Glm4MoeForCausalLM, Glm4MoeConfig", rope=RopeRule(partial=0.5)),
    "cohere2": Family(
        source="Cohere2LayerNorm (no bias), Cohere2ForCausalLM: logits * logit_scale, Cohere2Attention",
        norm="layernorm", eps_key="layer_norm_eps", head_scale="logit_scale", layer_types=_full_every(4),
        rope=RopeRule(applies_to="sliding_attention"),
    ),
}  # fmt: skip

WRAPPERS: Mapping[str, str] = {
    "gemma3": "Gemma3ForConditionalGeneration: the decoder of text_config, unchanged for text",
    "gemma4": "Gemma4ForConditionalGeneration: the decoder of text_config, unchanged for text, with its cap",
}
"""Multimodal models whose text part is the decoder that ``text_config`` describes."""

WITHOUT_CAP = frozenset({"gemma3"})
"""Those of them that ignore the cap on the logits, which the text model heeds (Transformers 5.24.0, run)."""

SEVERAL_STREAMS: Mapping[str, str] = {
    "gemma3n": "AltUp keeps several predictions of the residual stream",
    "deepseek_v4": "hyper-connections keep several residual streams",
    "glm5_next": "hyper-connections keep several residual streams",
    "hy_v4": "hyper-connections keep several residual streams",
    "hy_v4_vl": "hyper-connections keep several residual streams",
    "qwen4_exp": "hyper-connections keep several residual streams",
}
"""Models that have no depth (with and without the suffix ``_text``): no single tensor is the residual stream after d
layers."""


@cache
def family_defaults(model_type: str) -> Mapping[str, Any]:
    """Return what the family's config class of Transformers 5.24.0 fills in for a key that a config leaves out."""
    table = json.loads(Path(__file__).with_name("family_defaults.json").read_text("utf-8"))
    defaults: dict[str, Any] = table["defaults"].get(model_type, {})
    return defaults
