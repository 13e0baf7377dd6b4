"""The refusals: whether the data means what the other side will do with it.

:func:`compare` returns every disagreement, with both values. It reads no file and guesses nothing. This module may
import ``problems``, ``contract``, ``layout`` and ``compare_serving``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hsformat.compare_serving import compare_servings, compare_with_serving, keys_text, moved
from hsformat.contract import Contract, compatibility_view, differing_fields
from hsformat.layout import Layout, ServingLayout, parse_capture_key
from hsformat.problems import Problem, Severity, problem

__all__ = ["compare"]

_FIELD_CODES = (
    ("target.quantization", "HS305"),
    ("target.hidden_size", "HS409"),
    ("target", "HS301"),
    ("tokenizer_digest", "HS302"),
)


def compare(contract: Contract | ServingLayout, other: Layout | ServingLayout | Contract) -> list[Problem]:
    """Compare what data holds with what it will be used for, or a draft's training with its serving.

    Parameters
    ----------
    contract
        Of the data; or a serving layout: what a draft was trained with, compared with another serving layout.
    other
        A layout: the ordered captures that a draft is fed. A serving layout: what an engine does with a draft
        (:func:`hsformat.engines.resolve`). A contract: data that must mean the same.

    Returns
    -------
    All disagreements. Between two contracts, those outside the compatibility digest (name, revision, layout, codec,
    fields that need not be understood) are notes: reported, never a refusal. Equal sides give an empty list.

    Raises
    ------
    TypeError
        ``contract`` is no contract, or ``other`` neither a layout nor a contract.
    """
    if isinstance(contract, ServingLayout) and isinstance(other, ServingLayout):
        return compare_servings(contract, other)
    if not isinstance(contract, Contract):
        raise TypeError(f"what is compared is a Contract (store.contract), not {type(contract).__name__}")
    if isinstance(other, Layout):
        return _compare_layout(contract, other)
    if isinstance(other, ServingLayout):
        return compare_with_serving(contract, other)
    if isinstance(other, Contract):
        return _compare_contract(contract, other)
    raise TypeError(f"a contract is compared with a Layout or a Contract, not with {type(other).__name__}")


def _compare_layout(contract: Contract, served: Layout) -> list[Problem]:
    out = []
    own = contract.layout
    absent = [k for k in served.keys if k not in contract.keys]
    if own.aux != served.aux:
        out.append(
            problem(
                "HS402" if len(own.aux) != len(served.aux) else "HS401",
                where="layout.aux",
                got=keys_text(own.aux),
                expected=f"{keys_text(served.aux)}{moved(own.aux, served.aux)}",
                fix=_aux_fix(served, absent),
            )
        )
        if len(own.aux) != len(served.aux):
            # The order is as wrong as the number: both are said, since each has its own remedy.
            out.append(
                problem(
                    "HS401",
                    where="layout.aux",
                    got=keys_text(own.aux),
                    expected=keys_text(served.aux),
                    fix=_aux_fix(served, absent),
                )
            )
    out.extend(_compare_last(contract, served))
    out.extend(
        problem(
            "HS109",
            where="captures",
            got=f"captures {keys_text(contract.keys)}",
            expected=f"{key} among them",
            fix=f"extract again with depth {parse_capture_key(key)[0]}; no other capture can stand in for {key}",
        )
        for key in absent
    )
    return out


def _compare_last(contract: Contract, served: Layout) -> list[Problem]:
    last, n = served.last, contract.target.num_layers
    if last is None or last == contract.layout.last:
        return []
    depth, normed = parse_capture_key(last)
    own = contract.layout.last
    got = "no last capture" if own is None else own
    if depth != n:
        return [
            problem(
                "HS401",
                where="layout.last",
                got=got,
                expected=last,
                fix=f"the target distribution comes from depth {n}, after the last layer",
            )
        ]
    if own is not None and parse_capture_key(own)[1] != normed:
        return [
            problem(
                "HS405",
                where="layout.last",
                got=f"{own} ({_norm(own)})",
                expected=f"{last} ({_norm(last)})",
                fix=f"use last={own!r} and say on the other side whether the final norm is still to be applied",
            )
        ]
    return []  # stored or not, HS109 says it


def _compare_contract(contract: Contract, other: Contract) -> list[Problem]:
    a, b = contract.to_json(), other.to_json()
    binding = {path for path, _, _ in differing_fields(compatibility_view(a), compatibility_view(b))}
    out = []
    for path, got, expected in differing_fields(a, b):
        binds = path in binding or (path.startswith("fields") and any(p.startswith("fields") for p in binding))
        out.append(
            problem(
                _field_code(path, binds=binds),
                where=path,
                got=_short(got),
                expected=_short(expected),
                severity=Severity.ERROR if binds else Severity.NOTE,
                fix=_field_fix(path, binds=binds),
            )
        )
    return out


def _field_code(path: str, *, binds: bool) -> str:
    if binds:
        for prefix, code in _FIELD_CODES:
            if path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")):
                return code
    return "HS507"


def _field_fix(path: str, *, binds: bool) -> str:
    if not binds:
        return "nothing: it does not decide meaning"
    if _field_code(path, binds=binds) in ("HS301", "HS302", "HS305"):
        return "give the right target, or extract again with the one that will be served"
    return f"make {path} equal on both sides"


def _aux_fix(served: Layout, absent: Sequence[str]) -> str:
    if absent:
        return (
            f"the data lacks {keys_text(absent)}: extract again with depths {_depths(served)}, or feed the draft the "
            "captures that the data was extracted for"
        )
    selected = f"--aux {','.join(served.aux)}" + ("" if served.last is None else f" --last {served.last}")
    return (
        f"all of them are stored: hsformat train selects them by {selected}; elsewhere read captures="
        f"{list(served.aux)!r} in this order, and compare with a contract whose layout is Layout(aux={served.aux!r}, "
        f"last={served.last!r}); or change the draft"
    )


def _depths(layout: Layout) -> str:
    return ", ".join(str(parse_capture_key(k)[0]) for k in layout.keys)


def _norm(key: str) -> str:
    return "after the final norm" if parse_capture_key(key)[1] else "before the final norm"


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
