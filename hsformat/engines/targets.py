"""What a serving layout has to know of a target: its architecture and sizes, from a folder or from a contract.

Less than :mod:`hsformat.target.describe` needs: a ``config.json`` alone is enough, of any family, so that layouts can
be told of targets whose norms and scales hsformat does not know. May import ``contract`` and ``target``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsformat.contract import Contract, TargetModel
from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.target.families import SEVERAL_STREAMS, family_defaults
from hsformat.target.jsonfiles import corrupt, read_object, require_folder

__all__ = ["Target", "TargetFacts", "target_facts"]

Target = str | os.PathLike[str] | TargetModel | Contract

_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
_STREAM_KEYS = ("hc_mult", "hc_count")
"""Config keys that count residual streams: those of deepseek_v4 and hy_v4, and of qwen4_exp (Transformers 5.19.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """A target's architecture and sizes.

    Attributes
    ----------
    max_positions
        Its ``max_position_embeddings``; None: not known, as of a contract's target, or of no use to positions.
    folder
        Where its weights may be; None: they cannot be looked at.
    """

    where: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    folder: Path | None


def target_facts(target: Target) -> TargetFacts:
    """Return what is needed of a model folder, a :class:`TargetModel` or the target of a :class:`Contract`.

    Raises
    ------
    ForeignFileError
        HS602: no folder, no config, not JSON. HS603: a field is missing or wrong. HS410: several residual streams.
    """
    if isinstance(target, Contract):
        target = target.target
    if isinstance(target, TargetModel):
        return TargetFacts(
            where=f"target {target.name}",
            architecture=target.architecture,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            max_positions=None,
            folder=None,
        )
    folder = Path(target)
    require_folder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise corrupt(str(folder), "no config.json", "a model folder with config.json")
    return _from_config(read_object(path), path)


def _from_config(outer: Mapping[str, Any], path: Path) -> TargetFacts:
    inner = outer.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else outer
    if (reason := _several_streams(outer, text)) is not None:
        fix = "no single tensor is the residual stream after d layers; no depth, and no layout, can be told"
        raise ForeignFileError(
            problem("HS410", where=f"{path}: model_type", got=reason, expected="one residual stream", fix=fix)
        )
    problems: list[Problem] = []
    problems += [
        _field(path, key, streams, "an integer: the number of residual streams")
        for key in _STREAM_KEYS
        for config in ((outer,) if text is outer else (outer, text))
        if (streams := config.get(key)) is not None and type(streams) is not int
    ]
    model_type = text.get("model_type")
    defaults = family_defaults(model_type) if isinstance(model_type, str) else {}
    sizes: list[int] = []
    for key in _SIZES:
        value = next((c[key] for c in (text, outer, defaults) if c.get(key) is not None), None)
        if type(value) is int and 0 < value < 2**31:
            sizes.append(value)
        else:
            problems.append(_field(path, key, value, "an integer above 0"))
    names = outer.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str) and names[0]):
        problems.append(_field(path, "architectures", names, "a list that begins with a class name"))
    if problems:
        raise ForeignFileError(problems)
    num_layers, hidden_size, vocab_size = sizes
    limit = text.get("max_position_embeddings")
    return TargetFacts(
        where=str(path.parent),
        architecture=outer["architectures"][0],
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=limit if type(limit) is int and limit > 0 else None,
        folder=path.parent,
    )


def _several_streams(outer: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    for config in (outer, text):
        name = config.get("model_type")
        if isinstance(name, str) and (reason := SEVERAL_STREAMS.get(name.removesuffix("_text"))):
            return f"{name}: {reason}"
        for key in _STREAM_KEYS:
            value = config.get(key)
            if type(value) is int and value > 1:
                return f"{key} {value}: several residual streams"
    return "an encoder and a decoder have two residual streams" if outer.get("is_encoder_decoder") is True else None


def _field(path: Path, key: str, got: Any, expected: str) -> Problem:
    shown = "no such field" if got is None else repr(got)[:200]
    fix = f"set {key!r} in config.json as the model's publisher does"
    return problem("HS603", where=f"{path}: {key}", got=shown, expected=expected, fix=fix)
