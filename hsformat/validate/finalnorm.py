"""Whether the last capture is before or after the final norm, as the contract says: by what a norm leaves (HS205).

What comes out of an RMS norm, divided by its weight, has a mean square of 1, and after a layer norm also a mean of 0;
what goes in has any. So one row tells, whoever wrote the tokens. May import ``target`` and ``validate.excerpt``.
Shapes: R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture
from hsformat.problems import Problem, problem
from hsformat.target.ends import TargetEnds
from hsformat.validate.excerpt import Excerpt

__all__ = ["final_norm_problems"]

NEAR = 0.05
"""How far the root of the mean square of a normed row is from 1, at most: rounding to bfloat16 moves it by 0.001."""
MOST = 0.9
"""Of the rows of a record."""


def final_norm_problems(
    excerpts: Sequence[Excerpt], ends: TargetEnds, *, capture: Capture, where: str
) -> list[Problem]:
    """Compare excerpts of a capture of depth N with the norm that the contract gives it.

    Parameters
    ----------
    where
        The store's place, for a finding that holds for most of the records.

    Returns
    -------
    HS205 for records whose states are normed although the capture's norm is ``none``, or the reverse: one finding if
    those are more than half, otherwise one a record.
    """
    kept = [e for e in excerpts if len(e.at)]
    normed = [float(_is_normed(e.states, ends).mean()) for e in kept]
    after = capture.norm == "final"
    # Between the two nothing is sure, and nothing is said.
    wrong = [e for e, share in zip(kept, normed, strict=True) if (share <= 1 - MOST if after else share >= MOST)]
    if len(wrong) > max(1, len(kept) // 2):
        return [
            _finding(f"{where}: hidden[{capture.key!r}]", f"{len(wrong)} of {len(kept)} records compared", after=after)
        ]
    return [_finding(e.where, f"{len(e.at)} rows compared", after=after, record=e.record) for e in wrong]


def _is_normed(states_RH: npt.NDArray[np.float32], ends: TargetEnds) -> npt.NDArray[np.bool_]:
    """Return which rows are what the final norm gives, whatever it was given."""
    y_RH = states_RH if ends.norm_bias is None else states_RH - ends.norm_bias
    weight_H = np.ones(y_RH.shape[1], np.float32)
    if ends.norm_weight is not None:
        weight_H = ends.norm_weight + np.float32(ends.model.final_norm.unit_offset)
    # Channels of small weights hold rounding more than they hold the state.
    known_H = np.abs(weight_H) > np.abs(weight_H).max() / 1000
    y_RH = y_RH[:, known_H] / weight_H[known_H]
    square_R = np.square(y_RH, dtype=np.float64).mean(axis=1)
    near_R: npt.NDArray[np.bool_] = np.abs(np.sqrt(square_R) - 1) <= NEAR
    if ends.model.final_norm.kind == "layernorm":
        near_R &= np.abs(y_RH.mean(axis=1)) <= NEAR
    return near_R


def _finding(where: str, compared: str, *, after: bool, record: str | None = None) -> Problem:
    states = ("before", "after") if after else ("after", "before")
    return problem(
        "HS205",
        where=where,
        got=f"states {states[0]} the final norm ({compared})",
        expected=f"states {states[1]} it, as the contract says",
        fix="extract again, or write the states into a store whose contract declares the norm that they have",
        record=record,
    )
