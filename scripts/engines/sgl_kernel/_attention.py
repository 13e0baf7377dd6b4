"""The two attention operators that SGLang's ``intel_amx`` backend calls, over a cache that is addressed by slot.

Shapes: T query tokens, S tokens of one sequence, Q query heads, K key heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["register_attention"]

Tensor = torch.Tensor


def register_attention() -> None:
    """Put the operators where SGLang looks for them."""
    operators: Any = torch.ops.sgl_kernel
    operators.decode_attention_cpu = _decode
    operators.extend_attention_cpu = _extend


def _attend(q_TQD: Tensor, k_SKD: Tensor, v_SKD: Tensor, seen_TS: Tensor, *, scale: float, cap: float) -> Tensor:
    """Return softmax attention, [T, Q, D]; computed in float32, whatever the cache holds."""
    groups = q_TQD.shape[1] // k_SKD.shape[1]
    k_SQD, v_SQD = (x.float().repeat_interleave(groups, dim=1) for x in (k_SKD, v_SKD))
    scores_QTS = torch.einsum("tqd,sqd->qts", q_TQD.float(), k_SQD) * scale
    if cap > 0:
        scores_QTS = cap * torch.tanh(scores_QTS / cap)
    weights_QTS = scores_QTS.masked_fill(~seen_TS, float("-inf")).softmax(-1)
    return torch.einsum("qts,sqd->tqd", weights_QTS, v_SQD)


def _seen(length: int, new: int, *, causal: bool, window: int) -> Tensor:
    """Return which of ``length`` tokens each of the last ``new`` ones sees; ``window`` 0: all that came before."""
    query, key = torch.arange(length - new, length)[:, None], torch.arange(length)
    seen_TS = key <= query if causal else torch.ones(new, length, dtype=torch.bool)
    return seen_TS & (query - key < window) if window > 0 else seen_TS


def _only_what_is_here(*, cross: bool, sinks: Tensor | None, key_scale: float, value_scale: float) -> None:
    if cross or sinks is not None or (key_scale, value_scale) != (1.0, 1.0):
        raise NotImplementedError("cross attention, sinks and scaled caches are not in hsformat's stand-in")


def _decode(
    q_TQD: Tensor, keys: Tensor, values: Tensor, key_scale: float, value_scale: float, out_TQD: Tensor,
    k: Tensor | None, v: Tensor | None, slots: Tensor, attn_logits: Tensor, req_to_token: Tensor, requests: Tensor,
    seq_lens: Tensor, scale: float, cap: float, cross: bool, window: int, encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    """Write the new token's key and value to its slot, then attend from it to its whole sequence."""
    _only_what_is_here(cross=cross, sinks=sinks, key_scale=key_scale, value_scale=value_scale)
    if k is not None and v is not None:
        keys[slots] = k.reshape(-1, *keys.shape[1:]).to(keys.dtype)
        values[slots] = v.reshape(-1, *values.shape[1:]).to(values.dtype)
    for i, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        held = req_to_token[request, :length].long()
        seen_TS = _seen(length, 1, causal=True, window=window)
        out_TQD[i : i + 1] = _attend(q_TQD[i : i + 1], keys[held], values[held], seen_TS, scale=scale, cap=cap)


def _extend(
    q_TQD: Tensor, k: Tensor | None, v: Tensor | None, out_TQD: Tensor, keys: Tensor, values: Tensor,
    key_scale: float, value_scale: float, req_to_token: Tensor, requests: Tensor, seq_lens: Tensor,
    extend_lens: Tensor, extend_start: Tensor, max_extend_len: int, scale: float, cap: float, cross: bool, window: int,
    encoder_lens: Tensor | None, sinks: Tensor | None, tree_mask: Tensor | None, causal: bool,
) -> None:  # fmt: skip
    """Attend from the last ``extend_lens`` tokens of each sequence, whose keys and values are in the cache already."""
    _only_what_is_here(cross=cross, sinks=sinks, key_scale=key_scale, value_scale=value_scale)
    if tree_mask is not None:
        raise NotImplementedError("a tree of drafted tokens: this stand-in knows chains alone")
    sizes = zip(requests.tolist(), seq_lens.tolist(), extend_lens.tolist(), extend_start.tolist(), strict=True)
    for request, length, new, start in sizes:
        held = req_to_token[request, :length].long()
        rows, seen_TS = slice(start, start + new), _seen(length, new, causal=causal, window=window)
        out_TQD[rows] = _attend(q_TQD[rows], keys[held], values[held], seen_TS, scale=scale, cap=cap)
