"""Settings of single layers: ``per_layer_config`` in one form, whichever keys a config says them with.

Of the table Gemma 4 alone has them: its full layers have wider heads, and fewer of keys and values in some sizes.
Files that Transformers 5.24.0 writes have ``per_layer_config``; published ones have ``global_head_dim`` and
``num_global_key_value_heads``, which the config class turns into it (Gemma4TextConfig.__post_init__).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsformat.problems import Problem, problem

__all__ = ["head_dims", "layer_overrides"]

_KEY = "per_layer_config"
_WIDTH, _KV_HEADS = "global_head_dim", "num_global_key_value_heads"
_COUNTS = ("head_dim", "num_key_value_heads")


def layer_overrides(
    values: dict[str, Any], *, full_head_dim: int, defaults: Mapping[str, Any], where: str
) -> list[Problem]:
    """Replace the keys about single layers by ``per_layer_config``, or by nothing where all layers are alike.

    Its keys are layers as decimal numbers, its values what differs from the config's own. Nothing is replaced where
    HS603 is returned.

    Parameters
    ----------
    values
        A config with ``layer_types``, ``head_dim`` and ``num_key_value_heads`` filled in; changed in place.
    full_head_dim
        Of the full layers, where the config gives neither key.
    """
    given = values.get(_KEY)
    if _KEY not in values:
        own = {"head_dim": values.get(_WIDTH, full_head_dim)}
        if own["head_dim"] is None:
            return [_problem(f"{where}: {_WIDTH}", None, "an integer above 0")]
        if values.get("attention_k_eq_v") and values.get(_KV_HEADS) is not None:
            own["num_key_value_heads"] = values[_KV_HEADS]
        given = {str(i): own for i, kind in enumerate(values["layer_types"]) if kind == "full_attention"}
    given = {} if given is None else given
    if problems := _wrong(given, values["num_hidden_layers"], where):
        return problems
    plain = {**defaults, **values}
    out: dict[str, dict[str, Any]] = {}
    for key, own in given.items():
        if rest := {k: v for k, v in own.items() if v != ([] if k == "skip" else plain.get(k))}:
            out[str(int(key))] = rest
    for key in (_KEY, _WIDTH, _KV_HEADS):
        values.pop(key, None)
    if out:
        values[_KEY] = out
    return []


def head_dims(values: Mapping[str, Any], *, where: str) -> tuple[dict[str, int], list[Problem]]:
    """Return the width of a head for each layer type; HS603: layers of one type differ, for which there is no RoPE."""
    found: dict[str, set[int]] = {}
    for i, kind in enumerate(values.get("layer_types") or ["full_attention"] * values["num_hidden_layers"]):
        own = values.get(_KEY, {}).get(str(i), {})
        found.setdefault(kind, set()).add(own.get("head_dim", values["head_dim"]))
    problems = [
        _problem(f"{where}: {_KEY}", f"head_dim {sorted(dims)} in {kind} layers", "one head_dim for a layer type")
        for kind, dims in sorted(found.items())
        if len(dims) > 1
    ]
    return {kind: max(dims) for kind, dims in found.items()}, problems


def _wrong(given: Any, layers: int, where: str) -> list[Problem]:
    if not isinstance(given, dict):
        return [_problem(f"{where}: {_KEY}", given, "an object or null")]
    numbers = [int(k) for k in given if k.isascii() and k.isdigit() and len(k) < 10]
    if len(numbers) < len(given) or len(set(numbers)) < len(numbers) or any(i >= layers for i in numbers):
        return [_problem(f"{where}: {_KEY}", sorted(given), f"layers from 0 to {layers - 1}, each once")]
    problems = []
    for key, own in given.items():
        if not isinstance(own, dict):
            problems.append(_problem(f"{where}: {_KEY}.{key}", own, "an object"))
            continue
        problems += [
            _problem(f"{where}: {_KEY}.{key}.{name}", own[name], "an integer above 0")
            for name in _COUNTS
            if name in own and not (type(own[name]) is int and 0 < own[name] < 2**31)
        ]
    return problems


def _problem(where: str, got: Any, expected: str) -> Problem:
    fix = "correct it in config.json as the model's publisher does"
    return problem("HS603", where=where, got=repr(got)[:200], expected=expected, fix=fix)
