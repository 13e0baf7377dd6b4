"""Rotary position embedding of the draft, by Transformers' own functions. D: width of a head, R: rotated part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.rope_served import KINDS

__all__ = ["Rotary", "rotate"]


class Rotary(nn.Module):
    """Cosines and sines of positions.

    The frequencies are those that Transformers computes for a Llama model of the draft's config, of ``dynamic`` those
    up to ``max_position_embeddings``, which are not scaled. vLLM 0.32.0's table is the same (without
    ``max_trained_positions``); that of SGLang 0.5.23 is scaled by the factor at every position (both read in their
    source, not run): a draft with ``dynamic`` is served differently there.

    Raises
    ------
    ValueError
        The type is not in :data:`~hsformat_trainer.rope_served.KINDS`, or the rotated part of a head is not even and
        at least 2.
    """

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        kind = spec.rope["rope_type"]
        if kind not in KINDS:
            raise ValueError(f"rope_type {kind!r}; known: {', '.join(KINDS)}")
        share = float(str(spec.rope.get("partial_rotary_factor") or 1.0))
        dim = int(spec.head_dim * share)
        if dim < 2 or dim % 2 or dim > spec.head_dim:
            raise ValueError(f"partial_rotary_factor {share} rotates {dim} of {spec.head_dim} dimensions of a head")
        frequencies, factor = _frequencies(spec, str(kind))
        if 2 * len(frequencies) != dim:
            raise ValueError(
                f"Transformers rotates {2 * len(frequencies)} dimensions of a head and the config says {dim}"
            )
        self.rotary_dim = dim
        self._factor = float(factor)
        self._inv_freq: torch.Tensor
        self.register_buffer("_inv_freq", frequencies.float(), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of [n] positions, each [n, R] float32."""
        angles = positions[:, None].float() * self._inv_freq.float()
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self._factor, both.sin() * self._factor


def rotate(x_nAD: torch.Tensor, cos_nR: torch.Tensor, sin_nR: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dimensions of each of A heads, in halves as Llama's; the rest is left as it is."""
    width = cos_nR.shape[-1]
    cos, sin = cos_nR[:, None].to(x_nAD.dtype), sin_nR[:, None].to(x_nAD.dtype)
    part, rest = x_nAD[..., :width], x_nAD[..., width:]
    a, b = part.chunk(2, dim=-1)
    rotated = part * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _frequencies(spec: DraftSpec, kind: str) -> tuple[torch.Tensor, float]:
    parameters: dict[str, Any] = dict(spec.rope)
    if kind == "default":
        # Transformers 5 has no function of this name, and that of its Llama rotates whole heads whatever the factor
        # says (speculators#613): "linear" by a factor of 1 is the same and heeds it.
        kind, parameters = "linear", {**parameters, "rope_type": "linear", "factor": 1.0}
    top = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
    config = LlamaConfig(
        hidden_size=spec.num_heads
        * spec.head_dim,  # a config whose two numbers disagree is refused; heads are what counts
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        **_rope_keywords(parameters),
    )
    for name, value in top.items():  # where Transformers 4 reads them
        setattr(config, name, value)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, factor


def _rope_keywords(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters as the installed Transformers names them (5: ``rope_parameters``; 4: two keys)."""
    if hasattr(LlamaConfig, "standardize_rope_params"):
        return {"rope_parameters": parameters}
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}
