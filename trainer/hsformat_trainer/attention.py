"""Attention of training-time test: the keys of step 0 causally, and a row's own keys of the steps after it.

Exact, without a matrix of rows by keys in memory: queries are taken in blocks, a block's scores exist while it is
worked on, and the backward pass computes them again; gradients of the keys of step 0 are added up over the blocks in
float32. What is kept for the backward pass grows with the square of the number of steps K: each step keeps a copy of
every row's own keys and values of the steps before it, K (K - 1) / 2 of each in all.

Shapes: n queries, N keys of step 0 (of all records, one after another), J later steps, G query heads a key head, A key
heads, D width of a head, w keys of a block, b queries of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BLOCK_ELEMENTS", "Visible", "attend"]

BLOCK_ELEMENTS = 2**23
"""Most scores of a block, of all heads (32 MiB in float32), unless a single block of the fewest queries has more."""

_MOST_QUERIES, _FEWEST_QUERIES = 256, 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visible:
    """Which keys of step 0 each of n queries sees: ``first .. own``, both included, both ascending.

    Attributes
    ----------
    first, own
        [n] int64.
    host
        The same two as lists, so that a GPU is not waited for.
    """

    first: torch.Tensor
    own: torch.Tensor
    host: tuple[Sequence[int], Sequence[int]]

    @classmethod
    def of(cls, first: torch.Tensor, own: torch.Tensor) -> Visible:
        """Return it for tensors on the CPU."""
        return cls(first=first, own=own, host=(tuple(first.tolist()), tuple(own.tolist())))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Visible:
        """Return the same on a device."""
        first, own = (x.to(device, non_blocking=non_blocking) for x in (self.first, self.own))
        return Visible(first=first, own=own, host=self.host)


def attend(
    query_nQD: torch.Tensor,
    key_NAD: torch.Tensor,
    value_NAD: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    visible: Visible,
) -> torch.Tensor:
    """Return [n, Q, D], Q = G * A.

    Parameters
    ----------
    query_nQD
        Rotated queries; head q reads key head ``q // G``.
    key_NAD, value_NAD
        Of step 0; keys rotated.
    own_keys, own_values
        Of the later steps, each [n, A, D]: of the very rows that ask.
    visible
        Which keys of step 0 each row sees.
    """
    if not len(query_nQD):  # still a function of all three, so that their weights have gradients in every process
        return query_nQD + 0 * (key_NAD.sum() + value_NAD.sum())
    kept = query_nQD.dtype
    work = torch.float32 if query_nQD.device.type == "cpu" and kept in (torch.bfloat16, torch.float16) else kept
    q, k, v = (x.to(work) for x in (query_nQD, key_NAD, value_NAD))
    ok = torch.stack(own_keys, 1).to(work) if own_keys else q.new_zeros((len(q), 0, *k.shape[1:]))
    ov = torch.stack(own_values, 1).to(work) if own_values else ok
    out: torch.Tensor = _Attend.apply(q, k, v, ok, ov, visible)  # type: ignore[no-untyped-call] # torch's
    return out.to(kept)


def _blocks(visible: Visible, heads: int) -> list[tuple[int, int, int, int]]:
    """Return ``(query, past the last, key, past the last)`` of each block: whatever a query of it may see."""
    firsts, owns = visible.host
    out, start = [], 0
    while start < len(owns):
        low = firsts[start]
        end = start + 1
        while end < len(owns) and end - start < _MOST_QUERIES:
            elements = heads * (end - start + 1) * (owns[end] + 1 - low)
            if end - start >= _FEWEST_QUERIES and elements > BLOCK_ELEMENTS:
                break
            end += 1
        out.append((start, end, low, owns[end - 1] + 1))
        start = end
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ok: torch.Tensor,
        ov: torch.Tensor,
        visible: Visible,
    ) -> torch.Tensor:
        heads = k.shape[1]
        q_AGnD = _by_key_head(q, heads)
        k_AND, v_AND = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out_AGnD = torch.empty_like(q_AGnD)
        blocks = _blocks(visible, q.shape[1])
        with torch.autocast(q.device.type, enabled=False):
            for block in blocks:
                i, j = block[:2]
                weights, own = _weights(q_AGnD, k_AND, ok, visible, block)
                out = (weights.flatten(1, 2) @ v_AND[:, block[2] : block[3]]).reshape(*weights.shape[:3], -1)
                if own is not None:
                    out = out + torch.einsum("agbj,bjad->agbd", own, ov[i:j])
                out_AGnD[:, :, i:j] = out
        ctx.save_for_backward(q_AGnD, k_AND, v_AND, ok, ov, out_AGnD)
        ctx.blocks, ctx.visible = blocks, visible
        return out_AGnD.permute(2, 0, 1, 3).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_AGnD, k_AND, v_AND, ok, ov, out_AGnD = ctx.saved_tensors
        visible = ctx.visible
        grad_AGnD = _by_key_head(grad, k_AND.shape[0])
        scale = q_AGnD.shape[-1] ** -0.5
        wide = _wide(k_AND.dtype)  # many blocks are added up in these
        dq, dk, dv = torch.empty_like(q_AGnD), *(torch.zeros_like(x, dtype=wide) for x in (k_AND, v_AND))
        dok, dov = torch.empty_like(ok), torch.empty_like(ov)
        with torch.autocast(grad.device.type, enabled=False):
            for block in ctx.blocks:
                i, j, low, high = block
                weights, own = _weights(q_AGnD, k_AND, ok, visible, block)
                g = grad_AGnD[:, :, i:j]
                mean = (g * out_AGnD[:, :, i:j]).sum(-1, keepdim=True)
                flat = g.flatten(1, 2)
                dv[:, low:high] += weights.flatten(1, 2).transpose(1, 2) @ flat
                scores = (flat @ v_AND[:, low:high].transpose(1, 2)).reshape(weights.shape)
                scores = scores.sub_(mean).mul_(weights).mul_(scale).flatten(1, 2)
                dq_b = (scores @ k_AND[:, low:high]).reshape(*weights.shape[:3], -1)
                q_b = q_AGnD[:, :, i:j]
                dk[:, low:high] += scores.transpose(1, 2) @ q_b.flatten(1, 2)
                if own is not None:
                    dov[i:j] = torch.einsum("agbj,agbd->bjad", own, g)
                    ds = (torch.einsum("agbd,bjad->agbj", g, ov[i:j]) - mean) * own * scale
                    dok[i:j] = torch.einsum("agbj,agbd->bjad", ds, q_b)
                    dq_b = dq_b + torch.einsum("agbj,bjad->agbd", ds, ok[i:j])
                dq[:, :, i:j] = dq_b
        dq_nQD = dq.permute(2, 0, 1, 3).flatten(1, 2)
        dk, dv = dk.to(k_AND.dtype), dv.to(v_AND.dtype)
        return dq_nQD, dk.transpose(0, 1), dv.transpose(0, 1), dok, dov, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return in what softmax and sums over blocks are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_key_head(x_nQD: torch.Tensor, heads: int) -> torch.Tensor:
    n, queries, width = x_nQD.shape
    return x_nQD.reshape(n, heads, queries // heads, width).permute(1, 2, 0, 3).contiguous()


def _weights(
    q_AGnD: torch.Tensor,
    k_AND: torch.Tensor,
    ok: torch.Tensor,
    visible: Visible,
    block: tuple[int, int, int, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights of a block, [A, G, b, w] over the keys of step 0 and [A, G, b, J] over the later ones."""
    i, j, low, high = block
    q = q_AGnD[:, :, i:j] * q_AGnD.shape[-1] ** -0.5
    scores = (q.flatten(1, 2) @ k_AND[:, low:high].transpose(1, 2)).reshape(*q.shape[:3], -1)
    at = torch.arange(low, high, device=q.device)
    unseen = (at[None] > visible.own[i:j, None]) | (at[None] < visible.first[i:j, None])
    scores.masked_fill_(unseen, float("-inf"))
    wide = _wide(scores.dtype)
    if not ok.shape[1]:
        return torch.softmax(scores, -1, dtype=wide).to(scores.dtype), None
    own = torch.einsum("agbd,bjad->agbj", q, ok[i:j])
    both = torch.softmax(torch.cat((scores, own), -1), -1, dtype=wide).to(scores.dtype)
    width = high - low
    return both[..., :width], both[..., width:]
