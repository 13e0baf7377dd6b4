"""States at depth N against tokens that the target wrote greedily: each is the argmax of the state before it (HS206).

May import ``target`` and ``validate.excerpt``. Shapes: R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture
from hsformat.problems import Problem, problem
from hsformat.target.ends import TargetEnds
from hsformat.validate.excerpt import Excerpt

__all__ = ["greedy_problems"]

MOST = 0.9
"""Share of the states of all records whose argmax is the next token, at least."""
HALF = 0.5
"""The same of one record, of which few rows are looked at."""
FEWEST_ROWS, FEWEST_OF_RECORD = 32, 8
"""Rows from which all records, or one, are judged."""

_NEAR = {"float32": 1e-4, "float16": 2**-10, "bfloat16": 2**-7}
"""A logit within this share of the largest counts as the largest: two roundings of the dtype. In bfloat16, logits from
16 to 32 are multiples of 0.125, and which of two equal ones an engine takes is no matter."""

_SHIFTS = (-1, 0, 1)
_WORDS = {
    -1: "the token itself: states stand one place late",
    1: "the token after the next: states stand one place early",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Hits:
    """Of one excerpt: which rows predict the token at t + 1 + shift, [3, R] in the order of the shifts."""

    excerpt: Excerpt
    hit_3R: npt.NDArray[np.bool_]

    @property
    def rows(self) -> int:
        return len(self.excerpt.at)


def greedy_problems(
    excerpts: Sequence[Excerpt],
    ends: TargetEnds,
    *,
    capture: Capture,
    where: str,
    tick: Callable[[float], None] = lambda share: None,
) -> list[Problem]:
    """Compare excerpts of a capture of depth N, of records that were generated greedily, with their next tokens.

    Parameters
    ----------
    excerpts
        Of rows whose next token the target wrote.
    where
        The store's place, for a finding that holds for most of the records.
    tick
        Called with the share of the vocabulary that is done.

    Returns
    -------
    One HS206 if fewer than 90% of the states predict the next token in most records; otherwise one for each record in
    which fewer than half do. 2,472 states of the demo's 48 records: 98.4% exactly, 99.9% up to rounding.
    """
    kept = [e for e in excerpts if len(e.at)]
    if not kept:
        return []
    states_RH = np.concatenate([e.states for e in kept])
    if capture.norm == "none":
        states_RH = ends.normed(states_RH)
    wanted_3R = np.concatenate([np.stack([e.ids(1 + s) for s in _SHIFTS]) for e in kept], axis=1)
    hit_3R = _hits(states_RH, wanted_3R, ends, near=max(_NEAR[ends.model.dtype], _NEAR[capture.dtype]), tick=tick)
    cuts = np.cumsum([len(e.at) for e in kept])[:-1]
    told = [_Hits(excerpt=e, hit_3R=h) for e, h in zip(kept, np.split(hit_3R, cuts, axis=1), strict=True)]
    low = [h for h in told if h.hit_3R[1].mean() < MOST]
    if hit_3R.shape[1] >= FEWEST_ROWS and hit_3R[1].mean() < MOST and 2 * len(low) > len(told):
        return [_of_all(hit_3R, low, told, where=where, capture=capture)]
    return list(_of_records(told))


def _hits(
    normed_RH: npt.NDArray[np.float32],
    wanted_3R: npt.NDArray[np.int64],
    ends: TargetEnds,
    *,
    near: float,
    tick: Callable[[float], None],
) -> npt.NDArray[np.bool_]:
    """Return where the logit of a wanted token is the largest, or within rounding of it, [3, R]."""
    rows = np.arange(len(normed_RH))
    top_R = np.full(len(rows), -np.inf, np.float32)
    logit_3R = np.full(wanted_3R.shape, -np.inf, np.float32)
    for first, logits_RV in ends.logit_blocks(normed_RH):
        top_R = np.maximum(top_R, logits_RV.max(axis=1))
        place_3R = wanted_3R - first
        inside_3R = (place_3R >= 0) & (place_3R < logits_RV.shape[1])
        found_3R = logits_RV[rows, np.where(inside_3R, place_3R, 0)]
        logit_3R = np.where(inside_3R, found_3R, logit_3R)
        tick((first + logits_RV.shape[1]) / ends.model.vocab_size)
    hit_3R: npt.NDArray[np.bool_] = logit_3R >= top_R - near * np.abs(top_R)
    return hit_3R


def _of_all(
    hit_3R: npt.NDArray[np.bool_], low: Sequence[_Hits], told: Sequence[_Hits], *, where: str, capture: Capture
) -> Problem:
    rate_3 = hit_3R.mean(axis=1)
    got = (
        f"{rate_3[1]:.1%} of {hit_3R.shape[1]:,} states predict the next token (below {MOST:.0%} in {len(low)} of "
        f"{len(told)} records compared, first in {low[0].excerpt.record!r})"
    )
    shift = _better(rate_3)
    if shift is None:
        before = f"d{capture.depth - 1}"
        fix = (
            f"see whether the capture holds another depth ({before} stored as {capture.key} gives a rate between), "
            "whether the answers were written by this target and greedily, without a penalty, and whether states and "
            "records were matched by id"
        )
    else:
        got += f"; {rate_3[_SHIFTS.index(shift)]:.1%} predict {_WORDS[shift]}"
        fix = "extract again with h[t] the state after reading token t; nothing is stored shifted"
    return problem("HS206", where=f"{where}: hidden[{capture.key!r}]", got=got, expected=_expected(MOST), fix=fix)


def _of_records(told: Sequence[_Hits]) -> Iterator[Problem]:
    for h in told:
        rate_3 = h.hit_3R.mean(axis=1)
        if h.rows < FEWEST_OF_RECORD or rate_3[1] >= HALF:
            continue
        first = int(np.argmin(h.hit_3R[1]))
        got = f"{int(h.hit_3R[1].sum())} of {h.rows} states from there on predict the next token"
        if (shift := _better(rate_3)) is not None:
            got += f"; {int(h.hit_3R[_SHIFTS.index(shift)].sum())} predict {_WORDS[shift]}"
        yield problem(
            "HS206",
            where=f"{h.excerpt.where} token {int(h.excerpt.at[first])}",
            got=got,
            expected=_expected(HALF),
            record=h.excerpt.record,
        )


def _expected(share: float) -> str:
    return (
        f"at least {share:.0%}: the target wrote these tokens greedily, so that each is the argmax of the state before"
    )


def _better(rate_3: npt.NDArray[np.float64]) -> int | None:
    """Return the shift under which states and tokens belong together; None: there is none."""
    best = int(rate_3.argmax())
    return _SHIFTS[best] if _SHIFTS[best] and rate_3[best] >= max(HALF, 2 * rate_3[1]) else None
