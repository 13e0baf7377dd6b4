"""Rotary embeddings that cannot be trained, or that an engine computes otherwise than training. Brings no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hsformat.problems import Problem, problem
from hsformat.target.rope import KINDS as KNOWN
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.engines_named import NamedEngine

__all__ = ["KINDS", "rope_problems"]

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Types that are trained and served; another one is refused, never taken for one of these (NeMo Automodel PR#2399).

Not ``proportional``, the one of Gemma 4's full layers: SGLang 0.5.23 reads a draft's share of the head beside the
parameters alone, and both engines leave out its factor (vLLM 0.32.0, rotary_embedding/gemma4_rope.py; SGLang
rotary_embedding/factory.py and models/llama.py: read, not run)."""

_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Parameters without which a type has no frequencies (Transformers 5.24.0, modeling_rope_utils.py)."""
_LISTS = {"longrope": ("short_factor", "long_factor")}

_OTHERWISE = {
    ("dynamic", "sglang"): (
        "dynamic, whose table it scales by the factor at every position",
        "dynamic as it was trained: not scaled up to max_position_embeddings",
    ),
    ("longrope", "sglang"): (
        "longrope, with the long factors for all rows of a batch in which one position is beyond the original ones",
        "longrope as it was trained: the short factors at every position",
    ),
    ("longrope", "vllm"): (
        "longrope, with the long factors at every position where max_model_len is beyond the original positions",
        "longrope as it was trained: the short factors at every position",
    ),
}
"""By type and engine: what it does and what training does. Configs agree, so that only this tells it.

vLLM 0.32.0 (rotary_embedding/phi3_long_rope_scaled_rope.py), SGLang 0.5.23 (layers/rotary_embedding/): read,
not run."""


def rope_problems(spec: DraftSpec, engines: Sequence[NamedEngine]) -> list[Problem]:
    """Return HS407 for a rotary embedding without frequencies, and for one that an engine computes otherwise."""
    out = list(_unusable(spec))
    kind = str(spec.rope["rope_type"])
    for e in engines:
        if (found := _OTHERWISE.get((kind, e.engine))) is not None:
            got, expected = found
            fix = "give --draft-rope of another type, or serve with an engine that computes it so"
            where = f"training and {e}: rope.rope_type"
            out.append(problem("HS407", where=where, got=got, expected=expected, fix=fix))
    return out


def _unusable(spec: DraftSpec) -> Iterator[Problem]:
    rope, kind = spec.rope, str(spec.rope["rope_type"])
    if kind in KNOWN and kind not in KINDS:
        default = json.dumps({"rope_type": "default", "rope_theta": rope["rope_theta"]})
        fix = f"give --draft-rope of one of these types, such as '{default}', which has the same base"
        got, expected = f"{kind}, which no draft is trained with", f"one of {', '.join(KINDS)}"
        yield problem("HS407", where="rope.rope_type", got=got, expected=expected, fix=fix)
        return
    share = rope.get("partial_rotary_factor")
    share = 1.0 if share is None else share
    usable = _positive(share) and float(str(share)) <= 1
    dim = int(spec.head_dim * float(str(share))) if usable else 0
    if not usable or dim < 2 or dim % 2:
        got = f"{share!r} of {spec.head_dim} dimensions of a head"
        fix = "give another --draft-head-dim or another share: dimensions are rotated in pairs"
        expected = "an even number of dimensions, 2 or more"
        yield problem("HS407", where="rope.partial_rotary_factor", got=got, expected=expected, fix=fix)
    fix = "give --draft-rope with all of its parameters"
    for name in _NUMBERS.get(kind, ()):
        if not _positive(value := rope.get(name)):
            got = "nothing" if value is None else repr(value)[:100]
            yield problem(
                "HS407", where=f"rope.{name}", got=got, expected=f"a number above 0: {kind} needs it", fix=fix
            )
    for name in _LISTS.get(kind, ()):
        factors = rope.get(name)
        listed = factors if isinstance(factors, (list, tuple)) else ()
        if len(listed) != dim // 2 or not all(map(_positive, listed)):
            got = "nothing" if factors is None else repr(factors)[:100]
            expected = f"{dim // 2} numbers above 0, one a pair of dimensions"
            yield problem("HS407", where=f"rope.{name}", got=got, expected=expected, fix=fix)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
