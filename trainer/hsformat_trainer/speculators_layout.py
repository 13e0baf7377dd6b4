"""A draft's config in the layout of the speculators project, which vLLM reads beside the plain one. Brings no torch.

What the plain layout leaves to defaults is stated here, ``norm_before_residual`` above all, which is true in this
layout where nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["INNER_KEYS", "speculators_config"]

INNER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "rope_parameters",
    "rope_theta", "rope_scaling", "partial_rotary_factor", "max_position_embeddings", "vocab_size",
    "num_aux_hidden_states", "tie_word_embeddings",
)  # fmt: skip
"""Keys of the plain layout that describe the decoder."""

_OUTER_KEYS = (
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "eagle_aux_hidden_state_layer_ids", "tie_word_embeddings", "dtype", "torch_dtype",
)  # fmt: skip


def speculators_config(
    plain: Mapping[str, Any], *, target: str, architecture: str, speculative_tokens: int
) -> dict[str, Any]:
    """Return the same draft's config in this layout.

    Parameters
    ----------
    plain
        The config in the plain layout, with vLLM's layer ids at the top level.
    target, architecture
        Of the target: its name on a hub or the absolute path of its folder, since an engine may run in another; its
        class.
    speculative_tokens
        Tokens that are drafted a round: the steps of training.
    """
    inner = {key: plain[key] for key in INNER_KEYS if key in plain}
    outer = {key: plain[key] for key in _OUTER_KEYS if key in plain}
    method = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        **outer,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
    }
