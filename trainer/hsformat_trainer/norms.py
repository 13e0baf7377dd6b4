"""Norms, computed in float32 whatever the dtype of states and weights. H: hidden size."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["RMSNorm", "layer_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * (weight + offset)`` over the last dimension, in at least float32.

    Parameters
    ----------
    offset
        1 where a family stores the weight minus one (Gemma).
    """
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    weight = weight_H.to(wide.dtype)
    return wide * scale * (weight + offset if offset else weight)


def layer_norm(x: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the layer norm over the last dimension, in at least float32; ``bias_H`` None: no bias."""
    wide = x if x.dtype == torch.float64 else x.float()
    bias = None if bias_H is None else bias_H.to(wide.dtype)
    return nn.functional.layer_norm(wide, wide.shape[-1:], weight_H.to(wide.dtype), bias, eps)


class RMSNorm(nn.Module):
    """A trained RMSNorm of the draft; its weight begins at one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., H] after the norm, in at least float32."""
        return rms_norm(x, self.weight, self.eps)
