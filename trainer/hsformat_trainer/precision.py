"""In which dtype matrix products are computed.

Autocast to bfloat16 is for speed. A processor without instructions for it (x86 before AVX512-BF16 and AMX) computes
such products 5 to 70 times slower than in float32 (docs/benchmarks.md), so that there they are computed in float32:
exactly what was asked for, but for a rounding that is left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

__all__ = ["PRODUCT_ROWS", "head_product", "product_dtype", "products", "slow_bfloat16"]

PRODUCT_ROWS = 1024
"""Rows of a head that are multiplied at a time on a CPU in float32: what stays in its cache."""


@cache
def slow_bfloat16() -> bool:
    """Return whether this processor has no instructions for products in bfloat16."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return not any(f() for f in known if f is not None)


@contextmanager
def products(device: torch.device) -> Iterator[None]:
    """Switch autocast off where its products would be slower than in float32."""
    off = device.type == "cpu" and torch.is_autocast_enabled("cpu") and slow_bfloat16()
    with torch.autocast("cpu", enabled=False) if off else nullcontext():
        yield


def product_dtype(device: torch.device, like: torch.dtype) -> torch.dtype:
    """Return the dtype of products under the autocast that is in force; float64 stays what it is."""
    if like == torch.float64:
        return like
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


def head_product(hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Return ``hidden @ weight.T``, [C, V], of one dtype; not differentiable.

    A large head is taken in blocks on a CPU, which was up to 1.4 times as fast (docs/benchmarks.md).
    """
    rows = len(weight_VH)
    if hidden_CH.device.type != "cpu" or hidden_CH.dtype != torch.float32 or rows <= PRODUCT_ROWS:
        return hidden_CH @ weight_VH.T
    out = hidden_CH.new_empty(len(hidden_CH), rows)
    for i in range(0, rows, PRODUCT_ROWS):
        torch.mm(hidden_CH, weight_VH[i : i + PRODUCT_ROWS].T, out=out[:, i : i + PRODUCT_ROWS])
    return out
