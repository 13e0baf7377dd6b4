"""Rotary position embedding of a config, in the layouts of Transformers 4 and 5, as one form.

Transformers 4 writes ``rope_theta`` beside ``rope_scaling`` ``{type | rope_type, ...}`` or null; Transformers 5 writes
``rope_parameters`` with all of it inside, or one such object a layer type. Readers that knew one layout took a base of
10000 for the other (sfllm PR#32, Model-Optimizer PR#917).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsformat.contract import Rope
from hsformat.problems import Problem, problem
from hsformat.target.families import RopeRule

__all__ = ["KINDS", "ROPE_KEYS", "normalise_ropes"]

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""Kinds that a contract can hold; another one is refused (a silent fallback: NeMo Automodel PR#2399)."""

ROPE_KEYS = frozenset(
    {"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
    | {"original_max_position_embeddings"}
)
"""Config keys that are read here and replaced by ``rope`` in the normalised config."""

_READ = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_NEEDS_ORIGINAL = ("llama3", "yarn", "longrope")


def normalise_ropes(
    config: Mapping[str, Any],
    rule: RopeRule | None,
    *,
    head_dim: int,
    where: str,
    problems: list[Problem],
    head_dims: Mapping[str, int] | None = None,
) -> tuple[Rope, ...]:
    """Return one entry a set of layers; what cannot be read is added to ``problems`` (HS603).

    ``rule`` is the family's; None: nothing may be filled in, and a config without any RoPE key has no RoPE.
    ``head_dims`` are those of layer types whose heads are not ``head_dim`` wide.
    """
    widths = head_dims or {}
    scaling, newer = config.get("rope_scaling"), config.get("rope_parameters")
    problems += _disagreements(scaling, newer, config.get("rope_theta"), where)
    given = scaling or newer
    if given is None and rule is None and config.get("rope_theta") is None:
        return ()
    rule_used = rule or RopeRule()
    parameters = given or dict(rule_used.parameters)
    if not isinstance(parameters, dict):
        problems.append(_problem(f"{where}: rope_parameters", repr(parameters)[:100], "an object or null"))
        return ()
    theta, local = config.get("rope_theta"), config.get("rope_local_base_freq")
    theta = (rule_used.theta if rule else None) if theta is None else theta  # 0 is stated, and wrong
    local = rule_used.local_theta if local is None else local
    if parameters and all(isinstance(v, dict) or v is None for v in parameters.values()):
        sets = {layers: p for layers, p in sorted(parameters.items()) if p is not None}
    elif local is not None:  # Gemma 3 as Transformers 4 writes it: the flat parameters are those of the full layers
        sets = {"full_attention": parameters, "sliding_attention": {}}
    else:
        sets = {rule_used.applies_to: parameters}
    ropes = []
    for layers, p in sets.items():
        place = f"{where}: rope_parameters" + ("" if len(sets) == 1 else f".{layers}")
        base = local if layers == "sliding_attention" and local is not None else theta
        ropes.append(
            _rope(
                config,
                p,
                rule_used,
                layers=layers,
                theta=base,
                head_dim=widths.get(layers, head_dim),
                where=place,
                problems=problems,
            )
        )
    return tuple(r for r in ropes if r is not None)


def _disagreements(scaling: Any, newer: Any, theta: Any, where: str) -> list[Problem]:
    """Refuse a config that states one thing in the layout of Transformers 4 and another in that of 5."""
    if not isinstance(newer, dict):
        return []
    older = dict(scaling) if isinstance(scaling, dict) else {}
    if theta is not None:
        older["rope_theta"] = theta
    if "type" in older:
        older.setdefault("rope_type", older.pop("type"))
    return [
        _problem(
            f"{where}: rope_parameters.{k}", repr(newer[k])[:100], f"{older[k]!r}, as rope_scaling or rope_theta say"
        )
        for k in sorted(older.keys() & newer.keys())
        if older[k] != newer[k]
    ]


def _rope(
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    rule: RopeRule,
    *,
    layers: str,
    theta: Any,
    head_dim: int,
    where: str,
    problems: list[Problem],
) -> Rope | None:
    before = len(problems)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = rule.kinds.get(kind, kind) if isinstance(kind, str) else kind
    if sections := sorted(k for k in parameters if k.startswith("mrope")):
        # Transformers 5 calls the kind "default"; the keys say that a position is three numbers (SpecForge#310).
        got, expected = f"{sections[0]}: positions of several dimensions", "one position a token (rule C-8)"
        fix = "use a target without M-RoPE; this version of the format has no positions for it"
        problems.append(problem("HS603", where=f"{where}: {sections[0]}", got=got, expected=expected, fix=fix))
    elif kind not in KINDS:
        problems.append(_problem(f"{where}: rope_type", repr(kind), f"one of {', '.join(KINDS)}"))
    inner, outer = parameters.get("rope_theta"), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer and layers != "sliding_attention":
        problems.append(_problem(f"{where}: rope_theta", f"{inner} here and {outer} beside it", "one value"))
    theta = inner if inner is not None else theta
    if not _positive(theta):
        problems.append(_problem(f"{where}: rope_theta", repr(theta), "a number above 0"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", rule.partial))
    if not _positive(partial) or partial > 1 or _rotated(kind, head_dim, partial) < 1:
        problems.append(_problem(f"{where}: partial_rotary_factor", repr(partial), "a number above 0, at most 1"))
    rest = {k: v for k, v in parameters.items() if k not in _READ and v is not None}
    if kind in _NEEDS_ORIGINAL:
        own = config.get("original_max_position_embeddings")
        fallback = rest.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        rest["original_max_position_embeddings"] = fallback if own is None else own
    if kind == "proportional":  # its frequencies are spread over the whole head
        rest["head_dim"] = head_dim
    out: dict[str, Any] = {}
    for key, value in sorted(rest.items()):
        if isinstance(value, list) and all(_number(v) for v in value):
            out[key] = [float(v) for v in value]
        elif isinstance(value, (str, bool)) or _number(value):
            # 8 and 8.0 are one factor: the two versions write them differently.
            out[key] = int(value) if isinstance(value, float) and value.is_integer() else value
        else:
            problems.append(_problem(f"{where}: {key}", repr(value)[:100], "a number, text, or a list of numbers"))
    if len(problems) > before:
        return None
    rotary_dim = _rotated(kind, head_dim, partial)
    return Rope(applies_to=layers, kind=str(kind), theta=float(theta), rotary_dim=rotary_dim, parameters=out)


def _rotated(kind: Any, head_dim: int, partial: float) -> int:
    """Return how many dimensions are rotated: ``proportional`` counts pairs (Transformers, modeling_rope_utils)."""
    return 2 * int(partial * head_dim // 2) if kind == "proportional" else int(head_dim * partial)


def _number(value: Any) -> bool:
    """Whether it is a number that both JSON and float64 keep."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 2**53


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _problem(where: str, got: str, expected: str) -> Problem:
    fix = "correct the config, or use a version of hsformat that knows this form"
    return problem("HS603", where=where, got=got, expected=expected, fix=fix)
