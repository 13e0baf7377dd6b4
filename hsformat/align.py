"""The only shift code: which positions train what, at each step of training-time test.

Arrays are indexed by token and unshifted everywhere else. Here a step k of EAGLE-3's training-time test picks, for
training index t: token ``ids[t+1+k]``, features ``h[t]`` (at k = 0; the draft's own output after that), position
``t+k``, target distribution ``last[t+1+k]`` over token ``ids[t+2+k]``. Everything is a slice, so that NumPy arrays and
torch tensors are served alike, without a copy. This module may import ``layout`` alone.

What each rule supervises, for assistant spans [a, b) of the unshifted mask m:

=========== ========================== ===========================================================================
``serving`` all of m[t+1] .. m[t+2+k]  Exactly the chains that an engine drafts: the first drafted token is a+1.
``input``   m[t+1+k]                   The token fed in is the assistant's; adds the first token past each span.
``target``  m[t+2+k]                   The token predicted is the assistant's; adds the span's first token.
``feature`` m[t+k]                     What several trainers do; supervises past the span and misses its start.
=========== ========================== ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hsformat.layout import EAGLE3_SHIFT, Shift

__all__ = ["MaskRule", "StepView", "step_view", "supervised"]

MaskRule = Literal["serving", "input", "target", "feature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """Slices into token-indexed arrays for one step; all of length ``count``.

    Attributes
    ----------
    count
        Number of training indexes t = 0..count-1; 0 when the sequence is too short for the step.
    token
        Into ``input_ids``: the token fed in.
    feature
        Into the states: ``h[t]``, for step 0.
    position
        Into ``position_ids``.
    distribution
        Into the last capture: the target distribution.
    target
        Into ``input_ids``: the token that the distribution is over, if the sequence was written by the target.
    """

    count: int
    token: slice
    feature: slice
    position: slice
    distribution: slice
    target: slice


def step_view(num_tokens: int, step: int, *, shift: Shift = EAGLE3_SHIFT) -> StepView:
    """Return the slices of one step for a sequence of T tokens.

    No slice reaches row T-1 of the states, so that records of T-1 states are served as well.

    Raises
    ------
    ValueError
        ``step`` or ``num_tokens`` is negative.
    """
    if step < 0 or num_tokens < 0:
        raise ValueError(f"step and num_tokens are not negative: {step}, {num_tokens}")
    count = max(0, num_tokens - shift.target - step)

    def at(offset: int) -> slice:
        return slice(offset, offset + count)

    return StepView(
        count=count,
        token=at(shift.token + step),
        feature=at(0),
        position=at(shift.position + step),
        distribution=at(shift.distribution + step),
        target=at(shift.target + step),
    )


def supervised(loss_mask: Any, step: int, *, rule: MaskRule = "serving") -> Any:
    """Return which training indexes carry loss at a step.

    Parameters
    ----------
    loss_mask
        [T] 0 or 1 (or bool), NumPy or torch, unshifted: 1 where the assistant produced the token.
    step
        k, from 0.
    rule
        See the module's table.

    Returns
    -------
    [T] bool of the same kind of array. An index without a target (t > T-3-k) is False under every rule, so that
    no loss falls on padding (SafeAILab/EAGLE#317).

    Raises
    ------
    ValueError
        The rule is unknown, ``step`` is negative, or the mask is no single row of integers or booleans: a batch axis
        would be taken for tokens, and a float may be a weight.

    Examples
    --------
    >>> import numpy as np
    >>> m = np.array([0, 0, 0, 1, 1, 0])
    >>> supervised(m, 0).nonzero()[0].tolist(), supervised(m, 0, rule="input").nonzero()[0].tolist()
    ([2], [2, 3])
    """
    if loss_mask.ndim != 1 or "float" in str(loss_mask.dtype):
        raise ValueError(f"a mask is [T] integers or booleans, not {tuple(loss_mask.shape)} {loss_mask.dtype}")
    view = step_view(len(loss_mask), step)
    m = loss_mask != 0
    out = m & ~m  # all False, on the mask's device
    n = view.count
    if rule == "serving":
        chain = m[EAGLE3_SHIFT.token : EAGLE3_SHIFT.token + n]
        for offset in range(EAGLE3_SHIFT.token + 1, EAGLE3_SHIFT.target + step + 1):
            chain = chain & m[offset : offset + n]
    elif rule == "input":
        chain = m[view.token]
    elif rule == "target":
        chain = m[view.target]
    elif rule == "feature":
        chain = m[view.position]
    else:
        raise ValueError(f"unknown mask rule {rule!r}; known: serving, input, target, feature")
    out[:n] = chain
    return out
