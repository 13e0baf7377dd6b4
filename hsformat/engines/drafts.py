"""A draft folder as it is read: its config by layout, its tensors by header, its vocabulary map. Nothing is loaded.

Two layouts of ``config.json`` are told apart: ``plain`` (SafeAILab, SGLang, vLLM: options at the top level or in
``eagle_config``) and ``speculators`` (``speculators_model_type``, the decoder in ``transformer_layer_config``). May
import ``target``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.target.checkpoint import TensorInfo, read_checkpoint, read_integers
from hsformat.target.jsonfiles import corrupt, read_object, require_folder

__all__ = ["ABSENT", "INNER", "MAX_COUNT", "Draft", "draft_of", "field_problem", "lookup", "read_draft"]

ABSENT: Final = object()
"""What :func:`lookup` gives for a key that is not there; null is a value."""

INNER = "transformer_layer_config"

MAX_COUNT = 1000
"""Layers of a draft, and captures that it is fed: more is a broken config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft folder.

    Attributes
    ----------
    where
        The folder.
    config
        ``config.json`` as it stands.
    layout, architecture
        See the module; ``architecture`` is the first of ``architectures``, of the speculators layout the decoder's
        ``model_type``.
    shapes
        Shape of each tensor by name; None: the weights cannot be read, which was reported.
    tensors
        Where each tensor is, for those that can be read.
    d2t, t2d
        The vocabulary map: int64 [draft vocabulary] and bool [target vocabulary]; None: the folder has none.
    """

    where: str
    config: Mapping[str, Any]
    layout: Literal["plain", "speculators"]
    architecture: str
    shapes: Mapping[str, tuple[int, ...]] | None
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    d2t: npt.NDArray[np.int64] | None = None
    t2d: npt.NDArray[np.bool_] | None = None

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The part of the config that describes the decoder."""
        inner = self.config.get(INNER)
        return inner if self.layout == "speculators" and isinstance(inner, dict) else self.config

    @property
    def decoder_prefix(self) -> str:
        """Path of :attr:`decoder` in the config, with its dot."""
        return f"{INNER}." if self.layout == "speculators" else ""

    def at(self, key: str) -> str:
        """Return the place of a config key, for a problem."""
        return f"{self.where}/config.json: {key}"


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path (dots for nesting), or :data:`ABSENT`."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def draft_of(
    config: Mapping[str, Any],
    *,
    where: str,
    problems: list[Problem],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    d2t: npt.NDArray[np.int64] | None = None,
    t2d: npt.NDArray[np.bool_] | None = None,
) -> Draft | None:
    """Return the draft that a config describes; None, with the reason in ``problems``: it describes none."""
    kind = config.get("speculators_model_type")
    layout: Literal["plain", "speculators"] = "plain" if kind is None else "speculators"
    place = f"{where}/config.json"
    if layout == "speculators":
        if kind != "eagle3":
            fix = "hsformat knows EAGLE-3 drafts alone"
            where_ = f"{place}: speculators_model_type"
            problems.append(problem("HS410", where=where_, got=repr(kind)[:100], expected="eagle3", fix=fix))
            return None
        inner = config.get(INNER)
        name = inner.get("model_type") if isinstance(inner, dict) else None
        key, expected = f"{INNER}.model_type", "the model_type of the draft's decoder"
    else:
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        key, expected = "architectures", "a list that begins with a class name"
    if not isinstance(name, str) or not name:
        problems.append(field_problem(f"{place}: {key}", name, expected))
        return None
    return Draft(where=where, config=config, layout=layout, architecture=name, shapes=shapes, d2t=d2t, t2d=t2d)


def read_draft(folder: str | os.PathLike[str]) -> tuple[Draft | None, list[Problem]]:
    """Read a draft folder; what is wrong with it is returned, and what can be read of it nevertheless.

    Returns
    -------
    The draft, None if its config cannot be read, and problems: HS602 (no folder, no config, not JSON, a broken
    safetensors file), HS601 (pickled weights), HS603, HS408 (a map that is no tensor of integers), HS411 (no weights).
    """
    path = Path(folder)
    problems: list[Problem] = []
    try:
        require_folder(path)
        if not (path / "config.json").is_file():
            fix = "give the folder that holds the draft's config.json and weights"
            raise corrupt(str(path), "no config.json", "a draft folder with config.json", fix)
        config = read_object(path / "config.json")
    except ForeignFileError as e:
        return None, e.problems
    try:
        tensors: Mapping[str, TensorInfo] | None = read_checkpoint(path, every_file=True).tensors
    except ForeignFileError as e:
        problems += e.problems
        tensors = None
    d2t = _map(tensors or {}, "d2t", ("I64", "I32"), problems)
    t2d = _map(tensors or {}, "t2d", ("BOOL", "U8", "I64"), problems)
    draft = draft_of(
        config,
        where=str(path),
        problems=problems,
        shapes=None if tensors is None else {name: info.shape for name, info in tensors.items()},
        d2t=None if d2t is None else d2t.astype(np.int64),
        t2d=None if t2d is None else t2d.astype(np.bool_),
    )
    if draft is None:
        return None, problems
    known = {f: getattr(draft, f) for f in ("where", "config", "layout", "architecture", "shapes", "d2t", "t2d")}
    return Draft(**known, tensors=tensors or {}), problems


def _map(
    tensors: Mapping[str, TensorInfo], name: str, dtypes: tuple[str, ...], problems: list[Problem]
) -> npt.NDArray[Any] | None:
    """Read the tensor whose name holds ``name``, as the engines look for it."""
    found = sorted(n for n in tensors if name in n)
    if not found:
        return None
    info = tensors[found[0]]
    where = f"{info.file}: {info.name}"
    if len(found) > 1:
        fix = "leave one: engines take the last that they meet"
        problems.append(problem("HS408", where=where, got=", ".join(found), expected=f"one {name}", fix=fix))
    if info.dtype not in dtypes or len(info.shape) != 1:
        got = f"{info.dtype} {list(info.shape)}"
        problems.append(problem("HS408", where=where, got=got, expected=f"one dimension of {' or '.join(dtypes)}"))
        return None
    try:
        return read_integers(info)
    except ForeignFileError as e:
        problems += e.problems
        return None


def field_problem(where: str, got: Any, expected: str) -> Problem:
    """Return HS603 about a field of the config; ``got`` None or ABSENT: it is not there."""
    shown = "no such field" if got is None or got is ABSENT else repr(got)[:200]
    return problem("HS603", where=where, got=shown, expected=expected, fix="correct the draft's config.json")
