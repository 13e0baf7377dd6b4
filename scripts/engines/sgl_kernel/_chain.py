"""Drafted tokens as a chain: one candidate a step (``speculative_eagle_topk=1``), verified greedily.

N tokens a request: the last accepted one and N - 1 drafted ones. A token is numbered ``request * N + place``.
"""

from __future__ import annotations

import torch

__all__ = [
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

Tensor = torch.Tensor
_QLEN_ONLY = 1
"""Mask mode in which a request's mask is [N, N]: the drafted tokens alone."""


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor,
    retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, topk: int, depth: int,
    draft_token_num: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """Describe each request's tokens: position, number, the token that follows (-1: none), no sibling."""
    if topk != 1 or int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(f"topk {topk}, mask mode {tree_mask_mode}: this stand-in knows chains alone")
    n, places = draft_token_num, torch.arange(draft_token_num)
    requests = torch.arange(len(seq_lens))
    positions.copy_((seq_lens[:, None] + places).flatten())
    retrieve_index.copy_(requests[:, None] * n + places)
    retrieve_next_token.copy_(torch.where(places < n - 1, places + 1, -1).expand_as(retrieve_next_token))
    retrieve_next_sibling.fill_(-1)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    tree_mask[: len(requests) * n * n] = causal.flatten().repeat(len(requests))


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Accept drafted tokens as long as each is what the target predicts after the one before it.

    ``accept_index`` [requests, steps + 1] gets the numbers of the accepted tokens, the last accepted one of the step
    before first; ``accept_token_num`` how many were drafted; ``predicts`` what the target says after each of them.
    """
    answers = target_predict.reshape(candidates.shape)
    for request in range(len(candidates)):
        hits = (candidates[request, 1:] == answers[request, :-1]).long().cumprod(0)
        count = min(int(hits.sum()), accept_index.shape[1] - 1)
        numbers = retrive_index[request, : count + 1]
        accept_index[request, : count + 1] = numbers.to(accept_index.dtype)
        accept_token_num[request] = count
        predicts[numbers.long()] = answers[request, : count + 1].to(predicts.dtype)


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """Write the last accepted token of each request; ``tokens`` has ``stride`` places a request."""
    rows = torch.arange(len(lengths)) * stride
    bonus.copy_(tokens.reshape(-1)[rows + lengths - 1].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write the slots of the accepted tokens, packed; -1 stands for none."""
    accepted = accept_index.reshape(-1)
    kept = slots[accepted[accepted >= 0].long()]
    out[: len(kept)] = kept.to(out.dtype)
