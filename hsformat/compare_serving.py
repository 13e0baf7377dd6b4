"""The refusals about serving: whether data, or a draft as it was trained, means what the engine will do.

``compare`` dispatches to :func:`compare_with_serving` (a store's contract against a serving layout) and
:func:`compare_servings` (what a draft was trained with against what is done with it). No file is read and nothing is
guessed. May import ``contract`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hsformat.contract import Contract
from hsformat.layout import EAGLE3_SHIFT, ServingLayout, Shift, parse_capture_key
from hsformat.problems import Problem, problem

__all__ = ["compare_servings", "compare_with_serving", "keys_text", "moved"]


def compare_with_serving(contract: Contract, served: ServingLayout) -> list[Problem]:
    """Return every disagreement between data and what an engine does.

    The ordered aux inputs are compared with the contract's layout, not with what is stored: data extracted for
    ``[d0, d3, d31]`` is refused for ``[d3, d31, d59]`` even if it holds d59. Where the served list can be had from what
    is stored, the fix names the selection; what cannot be had is named, a last capture included.

    Returns
    -------
    HS401 and HS402 (aux inputs), HS109 (what is not stored), HS405 (norm of an input), HS406 (shift), HS301, HS408 and
    HS409 (another target).
    """
    target, own, fed = contract.target, contract.layout.aux, served.keys
    out: list[Problem] = []
    if target.hidden_size != served.target_hidden_size:
        out.append(_differs("HS409", "target.hidden_size", target.hidden_size, served.target_hidden_size))
    for name in ("architecture", "num_layers"):
        a, b = getattr(target, name), getattr(served, name)
        if a != b:
            out.append(_differs("HS301", f"target.{name}", a, b))
    if target.vocab_size != served.vocab_size:
        out.append(_differs("HS408", "target.vocab_size", target.vocab_size, served.vocab_size))
    if own != fed:
        out += _aux(contract, served)
    if served.shift != EAGLE3_SHIFT:
        out.append(_shift(EAGLE3_SHIFT, served.shift))
    return out


def compare_servings(trained: ServingLayout, served: ServingLayout) -> list[Problem]:
    """Return every difference between what a draft was trained with and what is done with it when it is served.

    Returns
    -------
    HS401 and HS402 (aux inputs), HS405 (norms), HS406 (shift), HS407 (rotary embedding and positions), HS408
    (vocabulary), HS409 (widths), HS411 (layers), HS412 (embedding or head of the other side), HS301 (another target).
    """
    out: list[Problem] = []
    if len(trained.aux) != len(served.aux):
        out.append(_differs("HS402", "aux", len(trained.aux), len(served.aux)))
    if trained.aux != served.aux:
        expected = f"{keys_text(served.keys)}{moved(trained.keys, served.keys)}"
        out.append(
            problem(
                "HS401",
                where="aux",
                got=keys_text(trained.keys),
                expected=expected,
                fix="state the layers that the draft was trained with, or train with these",
            )
        )
    for code, names in _CODES:
        for name in names:
            a, b = getattr(trained, name), getattr(served, name)
            if a != b:
                out.append(_differs(code, name, a, b))
    if None not in (trained.rms_norm_eps, served.rms_norm_eps) and trained.rms_norm_eps != served.rms_norm_eps:
        out.append(_differs("HS405", "rms_norm_eps", trained.rms_norm_eps, served.rms_norm_eps))
    for name in ("embedding", "head"):
        a, b = getattr(trained, name), getattr(served, name)
        if a != b and "unknown" not in (a, b):
            out.append(_differs("HS412", name, a, b))
    if trained.shift != served.shift:
        out.append(_shift(trained.shift, served.shift))
    if trained.max_positions and served.max_positions and served.max_positions < trained.max_positions:
        out.append(_differs("HS407", "max_positions", trained.max_positions, served.max_positions))
    return out


_CODES = (
    ("HS301", ("architecture", "num_layers")),
    ("HS409", ("target_hidden_size", "hidden_size")),
    ("HS408", ("vocab_size", "draft_vocab_size", "vocab_map")),
    ("HS405", ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "later_layers_norm")),
    ("HS407", ("rope",)),
    ("HS411", ("num_draft_layers",)),
)


def _aux(contract: Contract, served: ServingLayout) -> list[Problem]:
    own, fed = contract.layout.aux, served.keys
    absent = [key for key in fed if key not in contract.keys]
    expected, fix = f"{keys_text(fed)}{moved(own, fed)}", _selection(contract, fed, absent)
    codes = ["HS402", "HS401"] if len(own) != len(fed) else ["HS401"]
    out = [problem(code, where="layout.aux", got=keys_text(own), expected=expected, fix=fix) for code in codes]
    n = contract.target.num_layers
    for key in fed:
        depth, normed = parse_capture_key(key)
        other = f"d{n}" if normed else f"d{n}n"
        if depth == n and key not in own and other in own:
            out.append(
                problem(
                    "HS405",
                    where="layout.aux",
                    got=f"{other} ({_norm(other)})",
                    expected=f"{key} ({_norm(key)})",
                    fix=f"feed the draft {key} when training",
                )
            )
    stored = keys_text(contract.keys)
    out += [
        problem(
            "HS109",
            where="captures",
            got=f"captures {stored}",
            expected=f"{key} among them",
            fix=f"extract again with depth {parse_capture_key(key)[0]}; no other capture can stand in for {key}",
        )
        for key in absent
    ]
    if not any(parse_capture_key(key)[0] == n for key in contract.keys):
        out.append(
            problem(
                "HS109",
                where="captures",
                got=f"captures {stored}, with no state after the last layer",
                expected=f"d{n} (or d{n}n) as last, for the target distribution beside {keys_text(fed)}",
                fix=f"extract again with depth {n} as last",
            )
        )
    return out


def _selection(contract: Contract, fed: Sequence[str], absent: Sequence[str]) -> str:
    if absent:
        depths = ", ".join(str(parse_capture_key(key)[0]) for key in fed)
        return f"the data lacks {keys_text(absent)}: extract again with depths {depths}, or change the draft"
    last = contract.layout.last
    if last is None:
        n = contract.target.num_layers
        last = next((key for key in (f"d{n}", f"d{n}n") if key in contract.keys), None)
    selected = f"--aux {','.join(fed)}" + ("" if last is None else f" --last {last}")
    return (
        f"all of them are stored: train with {selected} (in Python: Layout(aux={tuple(fed)!r}, last={last!r})), which "
        "reads them in this order; or change the layers that the draft's config names"
    )


def _shift(own: Shift, served: Shift) -> Problem:
    differing = [n for n in Shift.model_fields if getattr(own, n) != getattr(served, n)]
    text: Callable[[Shift], str] = lambda s: ", ".join(f"{n} t{getattr(s, n):+d}" for n in differing)  # noqa: E731 - as it is typed
    fix = "train with the engine's shift, or serve with an engine that follows EAGLE-3's"
    return problem("HS406", where="shift", got=text(own), expected=text(served), fix=fix)


def _differs(code: str, where: str, got: Any, expected: Any) -> Problem:
    fix = "give the target of the data, or extract again" if code == "HS301" else f"make {where} equal on both sides"
    return problem(code, where=where, got=_short(got), expected=f"{_short(expected)} when served", fix=fix)


def moved(own: Sequence[str], served: Sequence[str]) -> str:
    """Name the usual causes when the numbers show them: one order or another, all slots moved by the same step."""
    if sorted(own) == sorted(served):
        return " (the same captures in another order)"
    if len(own) == len(served):
        steps = {parse_capture_key(b)[0] - parse_capture_key(a)[0] for a, b in zip(own, served, strict=True)}
        if len(steps) == 1:
            return f" (every slot is shifted by {steps.pop():+d})"
    return ""


def keys_text(keys: Sequence[str]) -> str:
    """Return keys for people: ``[d2, d15, d27]``."""
    return f"[{', '.join(keys)}]"


def _norm(key: str) -> str:
    return "after the final norm" if parse_capture_key(key)[1] else "before the final norm"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
