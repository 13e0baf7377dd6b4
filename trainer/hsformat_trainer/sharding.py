"""Whole tensors of parts, and parts of whole ones: what FSDP2 has cut, as a checkpoint holds it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["placed", "whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, contiguous; of a tensor in parts all of it, for which every process must ask."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous()


def placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor as another one lies: on its device, and in parts if that one is.

    A scalar beside parameters in parts (AdamW's count of steps) is in no parts: it is returned on the CPU, where the
    optimizer keeps it.
    """
    if tensor.ndim == 0:
        return tensor
    if isinstance(like, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
