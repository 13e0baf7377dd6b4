"""States against the target's embedding: depth 0 is ``scale * row`` of its token, and no other depth is (HS206, HS204).

May import ``target`` and ``validate.excerpt``. Shapes: R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture
from hsformat.problems import Problem, problem
from hsformat.target.ends import TargetEnds
from hsformat.target.rows import read_rows, row_blocks
from hsformat.validate.excerpt import Excerpt

__all__ = ["embedding_problems", "rounding"]

MOST = 0.9
"""Of an excerpt's rows that a reading must explain."""

_ROUNDING = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Relative error of a row for one and the same number: some roundings of the dtype (of the scale, of the product, of
what is stored). Rows of other tokens are off by the order of 1."""

Floats = npt.NDArray[np.float32]


def rounding(*dtypes: str) -> float:
    """Return the relative error to allow where numbers went through these dtypes."""
    return max(_ROUNDING[d] for d in dtypes)


def embedding_problems(excerpts: Sequence[Excerpt], ends: TargetEnds, *, capture: Capture, where: str) -> list[Problem]:
    """Compare excerpts of one capture before any norm with the embedding.

    Parameters
    ----------
    where
        The store's place, for a finding that holds for most of the records.

    Returns
    -------
    At depth 0, HS206 for records in which a row is not that of its token. At another depth, HS204 for records whose
    states are the embedding's rows: a capture in a wrong slot, with which a head trains well and drafts nothing.
    """
    tolerance = rounding(ends.model.dtype, capture.dtype)
    kept = [e for e in excerpts if len(e.at)]
    fits = [_fits(e.states, _rows(ends, e.ids(0)), tolerance) for e in kept]
    if capture.depth:
        slots = [(e, _ANOTHER_SLOT) for e, fit_R in zip(kept, fits, strict=True) if fit_R.mean() >= MOST]
        return [_in_another_slot(f) for f in _told_once(slots, len(kept), where)]
    wrong = [e for e, fit_R in zip(kept, fits, strict=True) if not fit_R.all()]
    bad = {e.record: ~fit_R for e, fit_R in zip(kept, fits, strict=True)}
    looks = [_shifted(e, ends, tolerance) or _scaled(e, ends, tolerance) for e in wrong]
    others = [e for e, look in zip(wrong, looks, strict=True) if look is None]
    near = _nearest(others, [int(bad[e.record].argmax()) for e in others], ends, tolerance)
    found = [(e, look or next(near)) for e, look in zip(wrong, looks, strict=True)]
    return [_wrong_tokens(f, bad[f.excerpt.record], ends) for f in _told_once(found, len(kept), where)]


class _Look(NamedTuple):
    """What rows look like instead, and what to do."""

    text: str
    fix: str


_ANOTHER_SLOT = _Look(
    "the embedding's rows of the tokens, depth 0",
    "extract again with the depths that the draft is served with; a head trained on this drafts garbage",
)


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """One record, or with ``of`` the first of many that are wrong in one way."""

    excerpt: Excerpt
    look: _Look
    where: str
    count: str = ""

    @property
    def record(self) -> str | None:
        return None if self.count else self.excerpt.record


def _told_once(found: Sequence[tuple[Excerpt, _Look]], compared: int, where: str) -> Iterator[_Finding]:
    """Yield one finding for what is wrong in the same way with more than half of the records, else one a record."""
    for look, members in groupby(sorted(found, key=lambda pair: pair[1]), key=lambda pair: pair[1]):
        alike = [e for e, _ in members]
        if len(alike) > max(1, compared // 2):
            count = f"{len(alike)} of {compared} records compared"
            yield _Finding(excerpt=alike[0], look=look, where=f"{where}: hidden[{alike[0].key!r}]", count=count)
        else:
            yield from (_Finding(excerpt=e, look=look, where=e.where) for e in alike)


def _rows(ends: TargetEnds, ids_R: npt.NDArray[np.int64]) -> Floats:
    """Return what depth 0 is for token ids, [R, H]; NaN for those that are none."""
    known_R = (ids_R >= 0) & (ids_R < ends.embedding.shape[0])
    out_RH = np.full((len(ids_R), ends.embedding.shape[1]), np.nan, np.float32)
    out_RH[known_R] = np.float32(ends.model.embedding.scale) * read_rows(ends.embedding, ids_R[known_R])
    return out_RH


def _fits(states_RH: Floats, wanted_RH: Floats, tolerance: float) -> npt.NDArray[np.bool_]:
    size_R = np.maximum(np.linalg.norm(wanted_RH, axis=1), np.finfo(np.float32).tiny)
    fit_R: npt.NDArray[np.bool_] = np.linalg.norm(states_RH - wanted_RH, axis=1) <= tolerance * size_R
    return fit_R


def _in_another_slot(f: _Finding) -> Problem:
    e = f.excerpt
    return problem(
        "HS204",
        where=f.where,
        got=f"{f.look.text} ({f.count or f'{len(e.at)} rows compared'})",
        expected=f"{e.key}, which is another depth",
        fix=f.look.fix,
        record=f.record,
    )


def _wrong_tokens(f: _Finding, bad_R: npt.NDArray[np.bool_], ends: TargetEnds) -> Problem:
    e, first = f.excerpt, int(bad_R.argmax())
    t = int(e.at[first])
    place = f"{f.where} token {t}"
    if f.count:
        place = f"{f.where}: first in record {e.record!r} token {t}"
    return problem(
        "HS206",
        where=place,
        got=f"{f.look.text} ({f.count or f'{int(bad_R.sum())} of {len(bad_R)} rows compared are wrong'})",
        expected=f"{ends.model.embedding.scale:g} x row {int(e.input_ids[t])} of the embedding, that of its token",
        fix=f.look.fix,
        record=f.record,
    )


def _shifted(e: Excerpt, ends: TargetEnds, tolerance: float) -> _Look | None:
    for shift, words in ((1, "one place early"), (-1, "one place late")):
        ids_R = e.ids(shift)
        fit_R = _fits(e.states, _rows(ends, ids_R), tolerance)
        if len(fit_R) > 1 and fit_R.sum() >= max(2, MOST * (ids_R >= 0).sum()):
            text = f"the row of token {'t + 1' if shift == 1 else 't - 1'}: states stand {words}"
            return _Look(text, "extract again with h[t] the state after reading token t; nothing is stored shifted")
    return None


def _scaled(e: Excerpt, ends: TargetEnds, tolerance: float) -> _Look | None:
    """Say if the rows are those of the tokens but for one factor, as where the scale of the embedding is lost."""
    wanted_RH = _rows(ends, e.ids(0))
    good_R = np.isfinite(wanted_RH).all(axis=1)
    wanted_RH, states_RH = wanted_RH[good_R], e.states[good_R]
    if not len(states_RH) or not (square := float((wanted_RH * wanted_RH).sum())):
        return None
    factor = float((states_RH * wanted_RH).sum()) / square
    fits = factor > 0 and _fits(states_RH, np.float32(factor) * wanted_RH, tolerance).mean() >= MOST
    if not fits:
        return None
    return _Look(f"{factor:.3g} times what it should be", "extract again: a scale was lost, or applied twice")


def _nearest(excerpts: Sequence[Excerpt], rows: Sequence[int], ends: TargetEnds, tolerance: float) -> Iterator[_Look]:
    """Yield for one row of each excerpt which row of the embedding it is, if any."""
    by_id = "match states to requests by id, not by order of arrival"
    if not excerpts:
        return
    states_RH = np.array([e.states[row] for e, row in zip(excerpts, rows, strict=True)])
    token_R = _nearest_rows(states_RH, ends)
    for token, fits in zip(token_R, _fits(states_RH, _rows(ends, token_R), tolerance), strict=True):
        if fits:
            yield _Look(f"row {token} of the embedding", by_id)
        else:
            yield _Look("no row of the embedding", "see whether the capture holds another depth; extract again")


def _nearest_rows(states_RH: Floats, ends: TargetEnds) -> npt.NDArray[np.int64]:
    """Return the token id whose embedding is nearest to each row, [R]."""
    best_R = np.full(len(states_RH), np.inf)
    token_R = np.zeros(len(states_RH), np.int64)
    scale = np.float32(ends.model.embedding.scale)
    for first, rows_VH in row_blocks(ends.embedding, columns=len(states_RH)):
        wanted_VH = scale * rows_VH
        distance_RV = np.square(wanted_VH).sum(axis=1) - 2 * (states_RH @ wanted_VH.T)
        at_R = distance_RV.argmin(axis=1)
        value_R = distance_RV[np.arange(len(at_R)), at_R]
        better_R = value_R < best_R
        best_R[better_R], token_R[better_R] = value_R[better_R], first + at_R[better_R]
    return token_R
