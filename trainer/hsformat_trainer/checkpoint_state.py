"""What ``state.json`` of a checkpoint holds, part by part, and whether its parts agree. Brings no torch.

What a part means for a run (other data, other options) is another question: :mod:`.resume` compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, JsonValue, ValidationError

from hsformat.layout import Layout
from hsformat.models import Frozen
from hsformat.problems import Problem, problem
from hsformat_trainer.differing import differing_leaves
from hsformat_trainer.draft_spec import DraftSpec

__all__ = ["Evaluated", "ExportedState", "ResumedState", "model_problems", "parse_state"]

Count = Annotated[int, Field(ge=0, lt=2**63)]
Epoch = Annotated[int, Field(ge=0, lt=2**31)]
Object = dict[str, JsonValue]


class _Part(Frozen):
    """Keys that no reader asks for may be there."""

    model_config = ConfigDict(extra="ignore")


class Evaluated(_Part):
    """The evaluation at the checkpoint's step, as far as checkpoints are compared by it."""

    step: Count
    compared_length: Annotated[float, Field(ge=1)]


class _Loader(_Part):
    """As :meth:`hsformat_trainer.mixture.MixedLoader.state_dict`."""

    weights: list[float]
    version: int
    epoch: Epoch
    batches: Count
    batching: Object
    plan: str


class _Random(_Part):
    """As :func:`hsformat_trainer.randomness.random_states`, of one process."""

    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


class _Recorded(_Part):
    """As :meth:`hsformat_trainer.admitted.Admitted.record`, as far as it is taken apart."""

    target: Object
    layout: Layout
    servings: list[Object]
    spec: DraftSpec
    sources: list[Object]


class _State(_Part):
    admitted: _Recorded
    spec: DraftSpec


class ResumedState(_State):
    """What a run that goes on takes out of it."""

    step: Count
    tokens: Count
    epoch: Epoch
    config: Object
    loader: _Loader
    random: Annotated[list[_Random], Field(min_length=1)]
    evaluation: Evaluated | None


class _Trained(_Part):
    target: Annotated[str, Field(min_length=1)]
    serve: Annotated[list[str], Field(min_length=1)]
    steps: Annotated[int, Field(gt=0)]


class ExportedState(_State):
    """What an export takes out of it."""

    step: Count
    config: _Trained


_Model = TypeVar("_Model", ResumedState, ExportedState)


def parse_state(
    kind: type[_Model], state: Mapping[str, Any], *, where: str, fix: str
) -> tuple[_Model | None, list[Problem]]:
    """Return the parts of a state that are needed; None, with HS602 for each field that is wrong.

    HS602 for each field also where two parts say the same thing differently.

    Parameters
    ----------
    where
        The file.
    """
    try:
        parsed = kind.model_validate_json(json.dumps(state))
    except ValidationError as e:
        return None, model_problems(e, where=where, fix=fix)
    said: list[tuple[str, object, str, object]] = [
        (f"spec.{path}", here, f"admitted.spec.{path}", there)
        for path, here, there in differing_leaves(state["spec"], state["admitted"]["spec"])
    ]
    layout, spec = parsed.admitted.layout, parsed.spec
    if len(layout.aux) != spec.num_aux:
        said.append(("spec.num_aux", spec.num_aux, "admitted.layout.aux", f"{len(layout.aux)} captures"))
    for name, key in (("target_hidden_size", "hidden_size"), ("vocab_size", "vocab_size")):
        if (of_target := parsed.admitted.target.get(key)) != getattr(spec, name):
            said.append((f"spec.{name}", getattr(spec, name), f"admitted.target.{key}", of_target))
    if isinstance(parsed, ResumedState):
        if parsed.epoch != parsed.loader.epoch:
            said.append(("epoch", parsed.epoch, "loader.epoch", parsed.loader.epoch))
        if parsed.evaluation is not None and parsed.evaluation.step != parsed.step:
            said.append(("evaluation.step", parsed.evaluation.step, "step", parsed.step))
    found = [
        problem("HS602", where=f"{where}: {a}", got=x, expected=f"{y}, as {b} says", fix=fix) for a, x, b, y in said
    ]
    return (None if found else parsed), found


def model_problems(error: ValidationError, *, where: str, fix: str, inside: tuple[str, ...] = ()) -> list[Problem]:
    """Return HS602 for each field in which JSON data is not what a model takes.

    Parameters
    ----------
    inside
        Keys under which the data is in the file.
    """
    out = []
    for err in error.errors(include_url=False):
        place = ".".join([*inside, *map(str, err["loc"])])
        got = "nothing" if err["type"] == "missing" else f"{type(err['input']).__name__} {err['input']!r}"
        at = f"{where}: {place}" if place else where
        out.append(problem("HS602", where=at, got=got[:300], expected=err["msg"], fix=fix))
    return out
