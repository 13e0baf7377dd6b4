"""From what a draft was fed to a row of facts. Pure: numbers and rows, no engine and no torch.

A slot holds the depth that it equals, if it equals exactly one. A row is proved if it predicts every trial and no other
row does. Shapes: T tokens, K slots, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hsformat.engines.ids import capturable, depths_of, fed
from hsformat.engines.profile import Measurement
from hsformat.engines.rows import CaptureRow, parse_depth
from hsformat.problems import HsError, Problem, problem
from hsformat_extractors.probes.trials import Trial

__all__ = ["MARGIN", "TOLERANCE", "Slot", "Tried", "identify", "prove_captures", "row_error"]

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean relative error of a row for one computation by two programs. Measured in float32: below 3e-6 (vLLM, SGLang)."""
MARGIN = 10.0
"""A second depth within this factor of the nearest one's error, or within the tolerance, is no answer."""

Norm = Literal["none", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one slot holds: a capture's key, its relative error, and the smallest one of any other capture."""

    key: str
    error: float
    runner_up: float


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A trial and what came of it.

    Attributes
    ----------
    trial
        What was asked.
    slots
        What the draft was fed, in order; None: nothing was seen.
    outcome
        In words, if nothing was seen or a slot holds no depth.
    """

    trial: Trial
    slots: tuple[Slot, ...] | None
    outcome: str | None = None

    @property
    def depths(self) -> tuple[int, ...] | None:
        """Depths in the order in which they were fed; None: nothing was seen."""
        return None if self.slots is None else tuple(int(s.key.strip("dn")) for s in self.slots)

    def measurement(self) -> Measurement:
        """Return it as a profile records it."""
        slots = self.slots or ()
        return Measurement(
            asked=self.trial.asked,
            depths=self.depths or (),
            relative_error=max((s.error for s in slots), default=None),
            runner_up=min((s.runner_up for s in slots), default=None),
            outcome=self.outcome,
        )


def row_error(got_TH: npt.NDArray[Any], want_TH: npt.NDArray[Any]) -> float:
    """Return the mean over rows of ``|got - want| / |want|``; infinity if it is no number."""
    got, want = got_TH.astype(np.float64), want_TH.astype(np.float64)
    size = np.maximum(np.linalg.norm(want, axis=-1), np.finfo(np.float32).tiny)
    error = float((np.linalg.norm(got - want, axis=-1) / size).mean())
    return error if np.isfinite(error) else float("inf")


def identify(
    features_TKH: npt.NDArray[Any], states: Mapping[str, npt.NDArray[Any]], *, tolerance: float
) -> tuple[Slot, ...]:
    """Return which capture each slot holds.

    Parameters
    ----------
    features_TKH
        What the draft was fed.
    states
        Every capture of the target by key, [T, H].
    tolerance
        Largest relative error of an equal state.

    Raises
    ------
    HsError
        HS204: a slot equals no capture, or two of them.
    """
    out, problems = [], []
    for k in range(features_TKH.shape[1]):
        errors = sorted((row_error(features_TKH[:, k], want), key) for key, want in states.items())
        (best, key), (second, other) = errors[0], errors[1]
        if best > tolerance:
            problems.append(_unclear(k, f"nearest is {key}, relative error {best:.2g}", tolerance))
        elif second <= max(tolerance, MARGIN * best):
            got = f"{key} with a relative error of {best:.2g}, and {other} with {second:.2g}"
            problems.append(_unclear(k, got, tolerance))
        out.append(Slot(key=key, error=best, runner_up=second))
    if problems:
        raise HsError(problems)
    return tuple(out)


def prove_captures(tried: Sequence[Tried], *, architecture: str, version: str, source: str) -> CaptureRow:
    """Return the one row that predicts every trial.

    Raises
    ------
    HsError
        HS410: no row does, or more than one; the trials are listed.
    """
    found = [row for row in _rows(tried, architecture, version, source) if all(_agrees(row, t) for t in tried)]
    if len(found) == 1:
        return found[0]
    said = "; ".join(f"{t.trial.asked} -> {_shown(t)}" for t in tried)
    differ = [n for n in CaptureRow.model_fields if len({str(getattr(r, n)) for r in found}) > 1]
    got = f"{len(found)} rules that differ in {', '.join(differ)}" if found else "captures that no rule describes"
    raise HsError(
        problem(
            "HS410",
            where=f"probe of {architecture}",
            got=f"{got}: {said}",
            expected="one rule that says what every list of ids means",
            fix="describe the layout yourself (--engine custom:layout.json), or report it with this text",
        )
    )


def _rows(tried: Sequence[Tried], architecture: str, version: str, source: str) -> Iterator[CaptureRow]:
    """Yield every row that could be true; rules that mean the same are named once."""
    default = _default(tried)
    norm = _norm(tried)
    rules = [("shift", s) for s in (-1, 0, 1, 2)]
    rules += [(r, s) for r in ("shift_if_first_is_one", "shift_unless_max_is_n") for s in (-1, 1, 2)]
    for (rule, shift), order, duplicates, lowest, deepest in itertools.product(
        rules, ("ascending", "as_given"), ("once", "repeated"), (0, 1, 2), ("N-1", "N")
    ):
        if rule != "shift_if_first_is_one" and lowest < shift:
            continue  # no id means such a depth
        if rule == "shift_unless_max_is_n" and deepest != "N":
            continue  # the exception is about depth N alone
        yield CaptureRow.model_validate(
            {
                "architectures": (architecture,), "rule": rule, "shift": shift, "lowest": lowest, "deepest": deepest,
                "default": default, "order": order, "duplicates": duplicates, "norm": norm, "versions": (version,),
                "source": source, "evidence": "proved",
            }
        )  # fmt: skip


def _agrees(row: CaptureRow, tried: Tried) -> bool:
    trial = tried.trial
    if not trial.ids:
        return True  # the default is read off the trials of both targets, see _default
    asked = depths_of(row, trial.ids, trial.num_layers)
    predicted = tuple(fed(row, asked))
    if all(capturable(row, d, trial.num_layers) for d in asked) and len(predicted) == trial.slots:
        return tried.depths == predicted
    return tried.depths is None or len(set(tried.depths)) < trial.slots  # refused, killed, or a depth repeated


def _default(tried: Sequence[Tried]) -> tuple[str, ...]:
    """Return the default as expressions that hold for both targets; empty: the engine refuses both.

    Raises
    ------
    HsError
        HS410: no expression holds for both.
    """
    seen = {t.trial.num_layers: t.depths for t in tried if not t.trial.ids}
    if all(d is None for d in seen.values()):
        return ()
    if any(d is None for d in seen.values()) or len({len(d) for d in seen.values() if d is not None}) != 1:
        raise HsError(_no_default(seen))
    out = []
    for depths in zip(*(d for d in seen.values() if d is not None), strict=True):
        wanted = dict(zip(seen, depths, strict=True))
        fitting = [e for e in _expressions(wanted) if all(parse_depth(e, n) == d for n, d in wanted.items())]
        if len(fitting) != 1:
            raise HsError(_no_default(seen))
        out += fitting
    return tuple(out)


def _expressions(wanted: Mapping[int, int]) -> Iterator[str]:
    n, depth = next(iter(wanted.items()))
    yield str(depth)
    for name, base in (("N", n), ("N//2", n // 2)):
        yield name + (f"{depth - base:+d}" if depth != base else "")


def _no_default(seen: Mapping[int, tuple[int, ...] | None]) -> Problem:
    got = "; ".join(f"{n} layers: {'nothing' if d is None else list(d)}" for n, d in seen.items())
    return problem("HS410", where="probe: a draft without ids", got=got,
                   expected="depths that follow from the number of layers",
                   fix="drafts for this engine must name their ids; report it with this text")  # fmt: skip


def _norm(tried: Sequence[Tried]) -> Norm:
    """Return the norm of depth N, if it was seen; otherwise ``none``, since it cannot be captured."""
    last = {s.key[-1] for t in tried for s in t.slots or () if s.key.strip("dn") == str(t.trial.num_layers)}
    if len(last) > 1 and "n" in last:
        raise HsError(
            problem("HS205", where="probe: depth N", got="before the final norm and after it",
                    expected="one of the two", fix="report it: the engine captures the last depth in two ways")
        )  # fmt: skip
    return "final" if "n" in last else "none"


def _shown(tried: Tried) -> str:
    return str(list(tried.depths)) if tried.depths is not None else str(tried.outcome)


def _unclear(slot: int, got: str, tolerance: float) -> Problem:
    expected = f"one state within {tolerance:g}, no other"
    fix = "the engine feeds something else than the residual stream, or computes in another precision"
    return problem("HS204", where=f"probe: slot {slot}", got=got, expected=expected, fix=fix)
