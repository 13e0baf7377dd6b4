"""Bookkeeping of the KV cache: which slot of the pool holds which token of a request.

``req_to_token`` is [requests, pool_len]: row r lists the slots of request r by position.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "copy_all_layer_kv_cache_cpu",
]

Tensor = torch.Tensor


def _ranges(requests: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(requests.tolist(), start.tolist(), end.tolist(), strict=True))


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, columns: int
) -> None:
    """Copy the ``topk * columns`` slots after each sequence to ``out``, one request after the other."""
    assign_extend_cache_locs_cpu(requests, req_to_token, seq_lens, seq_lens + topk * columns, out, pool_len)


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """Copy the slots of the positions ``start`` to ``end`` of each request to ``out``, packed."""
    parts = [req_to_token[r, a:b] for r, a, b in _ranges(requests, start, end)]
    if parts:
        packed = torch.cat(parts)
        out[: len(packed)] = packed.to(out.dtype)


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Write packed slots to the positions ``start`` to ``end`` of each request: the reverse of the one above."""
    done = 0
    for r, a, b in _ranges(requests, start, end):
        req_to_token[r, a:b] = slots[done : done + b - a].to(req_to_token.dtype)
        done += b - a


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """Return one row of slots a candidate: the sequence, then the slots that this candidate's steps go to."""
    out = req_to_token.new_zeros((len(requests) * topk, pool_len))
    for row in range(len(out)):
        request, candidate = divmod(row, topk)
        length = int(seq_lens[request])
        slots = req_to_token[int(requests[request])]
        out[row, :length] = slots[:length]
        first = length + candidate * steps
        out[row, length : length + steps] = slots[first : first + steps]
    return out


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Move slots within every buffer; ``strides`` are bytes a slot. Sources are read before anything is written."""
    for base, size in zip(pointers.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + slot * size, size) for slot in source.tolist()]
        for slot, data in zip(target.tolist(), held, strict=True):
            ctypes.memmove(base + slot * size, data, size)
