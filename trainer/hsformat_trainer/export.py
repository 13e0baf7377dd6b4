"""From a checkpoint to a folder that engines serve, read back before anybody gets it.

What is written: the weights under the names that engines load, each of them there; the config keys that make every
engine named feed the draft what it was trained with; the vocabulary map, and none for a whole vocabulary; a note of
what it was trained on (``hsformat.json``). Then the folder is read as the engines would read it
(:mod:`hsformat.engines`), compared with the training, and loaded again: its forward pass gives the same bits as the
checkpoint's. Any difference refuses the export, and no folder stays.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

import hsformat
from hsformat.compare_serving import compare_servings
from hsformat.contract import TargetModel
from hsformat.engines.drafts import read_draft
from hsformat.engines.emission import emit_for
from hsformat.engines.profile import EngineProfile
from hsformat.engines.targets import target_facts
from hsformat.engines.vocabulary import check_map, vocabulary_digest
from hsformat.layout import Layout, ServingLayout
from hsformat.problems import ContractMismatch, ForeignFileError, NothingToOpen, Problem, Severity, StoreError, problem
from hsformat.validate.target import describe_target
from hsformat_trainer.checkpoint import MODEL, STATE, checkpoints, instead_of, read_state, read_tensors
from hsformat_trainer.checkpoint_state import ExportedState, model_problems, parse_state
from hsformat_trainer.draft_files import draft_config, exported_name, plain_config, trained_layout, weight_shapes
from hsformat_trainer.draft_plan import served_by
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.engines_named import NamedEngine
from hsformat_trainer.forward_check import forward_differs
from hsformat_trainer.rope_served import rope_problems
from hsformat_trainer.speculators_layout import speculators_config
from hsformat_trainer.target_head import TargetHead
from hsformat_trainer.tensor_files import write_tensors

__all__ = ["Exported", "Style", "Trained", "export_draft", "read_trained"]

Style = Literal["plain", "speculators"]
Dtype = Literal["bfloat16", "float16", "float32"]

NOTE = "hsformat.json"
_TRAINING_LAYER = "layers.0"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAP = {"d2t": (torch.int64,), "t2d": (torch.bool,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a checkpoint says of itself.

    Attributes
    ----------
    step
        Of the optimizer.
    spec, layout
        The draft, and what it was trained on.
    target
        The target, of which the contract does not keep name and revision here.
    target_folder
        Where it was.
    serve
        The engines that it was trained for.
    steps
        K of training-time test.
    admitted
        What was compared before training, as it was recorded.
    """

    step: int
    spec: DraftSpec
    layout: Layout
    target: TargetModel
    target_folder: str
    serve: tuple[str, ...]
    steps: int
    admitted: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A folder that was written, and what each engine does with it; ``notes`` are no errors."""

    folder: Path
    servings: tuple[ServingLayout, ...]
    notes: tuple[Problem, ...]


def read_trained(checkpoint: str | Path) -> Trained:
    """Return what a checkpoint says of its training.

    Raises
    ------
    NothingToOpen
        HS602: there is no such folder, or it is no checkpoint; of a run's folder, its checkpoints are named.
    ForeignFileError
        HS602, HS603: it is damaged, or of another version.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        expected, fix = "a folder OUT/checkpoints/step-N", "check the path"
        raise NothingToOpen(problem("HS602", where=str(folder), got="no such folder", expected=expected, fix=fix))
    if not (folder / STATE).is_file():
        expected, found = "a folder OUT/checkpoints/step-N", [str(p) for p in checkpoints(folder)]
        fix = f"name a checkpoint of this run: {', '.join(found)}" if found else "name a folder OUT/checkpoints/step-N"
        raise NothingToOpen(problem("HS602", where=str(folder), got=f"no {STATE}", expected=expected, fix=fix))
    state, file, fix = read_state(folder), str(folder / STATE), instead_of(folder)
    parsed, damage = parse_state(ExportedState, state, where=file, fix=fix)
    if parsed is None:
        raise ForeignFileError(damage)
    try:
        target = TargetModel.model_validate_json(
            json.dumps({"name": "target", "revision": None, **parsed.admitted.target})
        )
    except ValidationError as e:
        raise ForeignFileError(model_problems(e, where=file, fix=fix, inside=("admitted", "target"))) from e
    return Trained(
        step=parsed.step,
        spec=parsed.spec,
        layout=parsed.admitted.layout,
        target=target,
        target_folder=parsed.config.target,
        serve=tuple(parsed.config.serve),
        steps=parsed.config.steps,
        admitted=state["admitted"],
    )


def export_draft(
    checkpoint: str | Path,
    engines: Sequence[NamedEngine],
    *,
    out: str | Path,
    target: str | Path | None = None,
    style: Style = "plain",
    dtype: Dtype | None = None,
    profile: EngineProfile | None = None,
) -> Exported:
    """Write a folder that all of the engines serve as the draft was trained.

    Parameters
    ----------
    checkpoint
        ``OUT/checkpoints/step-N``.
    out
        The folder; it must not be there.
    target
        The target's folder; None: where it was when the draft was trained.
    style
        ``plain``: what both engines read. ``speculators``: vLLM's other layout.
    dtype
        Of the weights; None: the target's, in which engines run a draft.

    Raises
    ------
    NothingToOpen
        There is no checkpoint or no target, or there is something at ``out``.
    ContractMismatch
        Everything in which the folder would not be served as the draft was trained: 4xx, HS201, HS301, HS304.
    ForeignFileError
        The checkpoint or the target cannot be read.
    StoreError
        HS506: the folder cannot be written, as to a full disk. Nothing of it stays.
    """
    trained = read_trained(checkpoint)
    folder, model_folder = Path(out), Path(target or trained.target_folder)
    _check_places(folder, model_folder)
    facts = target_facts(model_folder)
    tensors = read_tensors(checkpoint, MODEL)
    problems = _check_target(trained.target, model_folder)
    stored = getattr(torch, dtype or trained.target.dtype)
    problems += _check_tensors(trained.spec, tensors, stored, str(checkpoint))
    config = _config(trained, engines, profile, style, model_folder, problems)
    if config is None or _errors(problems):
        raise ContractMismatch(problems)
    config |= {"dtype": str(stored).removeprefix("torch."), "torch_dtype": str(stored).removeprefix("torch.")}
    named = _named(tensors, stored, first_layer=_TRAINING_LAYER if style == "speculators" else None)
    new = folder.with_name(f".{folder.name}.new")
    try:
        _clear(new)  # of an export that was killed
        new.mkdir(parents=True)
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(new / "model.safetensors", named, metadata={"format": "pt"})
        (new / NOTE).write_text(json.dumps(_note(trained, engines), indent=2) + "\n", encoding="utf-8")
        draft, found = read_draft(new)
        problems += found
        servings = [] if draft is None else served_by(draft, facts, engines, profile, problems)
        problems += _compare(trained, tensors, engines, servings, problems)
        if not _errors(problems):
            head = TargetHead.load(model_folder, trained.target, dtype=torch.float32, device="cpu")
            problems += forward_differs(trained.spec, trained.layout, head, tensors, new, stored)
        if _errors(problems):
            raise ContractMismatch(list(dict.fromkeys(problems)))
        new.rename(folder)
    except (OSError, SafetensorError) as e:
        raise StoreError(_unwritable(folder, e)) from e
    finally:
        shutil.rmtree(new, ignore_errors=True)
    notes = tuple(dict.fromkeys(problems))
    return Exported(folder=folder, servings=tuple(s for s in servings if s is not None), notes=notes)


def _check_places(out: Path, target: Path) -> None:
    if out.exists():
        fix = "give a folder that is not there: nothing is overwritten"
        raise NothingToOpen(problem("HS602", where=str(out), got="something is there", expected="nothing", fix=fix))
    if not target.is_dir():
        fix = "give --target: the target's folder, whose embedding the forward pass needs"
        raise NothingToOpen(
            problem("HS602", where=str(target), got="no such folder", expected="a model folder", fix=fix)
        )


def _clear(new: Path) -> None:
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new)
    else:
        new.unlink(missing_ok=True)


def _unwritable(folder: Path, e: Exception) -> Problem:
    full = getattr(e, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC})" in str(e)
    fix = "free space on this disk, or give another --out" if full else "give --out a folder that can be made"
    expected = "a draft folder that is written as a whole"
    return problem("HS506", where=str(folder), got=e, expected=expected, fix=fix, severity=Severity.ERROR)


def _check_target(trained: TargetModel, folder: Path) -> list[Problem]:
    """Return HS301 for a folder of another target than that of the training: by its config, embedding, norm and head.

    Other weights are not read here; they have no part in the export.
    """
    own = describe_target(trained.model_copy(update={"weights_digest": None}), folder).model
    fix = "give --target: the folder of the target that the draft was trained for; or train a draft for this one"
    return [
        problem("HS301", where=f"{folder}: target.{name}", got=got, expected=f"{was}, as in training", fix=fix)
        for name in ("config_digest", "basis_digest")
        if (got := getattr(own, name)) != (was := getattr(trained, name))
    ]


def _check_tensors(
    spec: DraftSpec, tensors: Mapping[str, torch.Tensor], stored: torch.dtype, where: str
) -> list[Problem]:
    """Return HS411 for a weight that is missing, unknown or of another shape or type, HS201 for one that is not finite.

    Also where it is finite in the checkpoint and beyond what the dtype of the export holds.
    """
    out: list[Problem] = []
    expected = dict(weight_shapes(spec, first_layer=_TRAINING_LAYER))
    reduced = spec.draft_vocab_size < spec.vocab_size
    if reduced:
        expected["t2d"] = (spec.vocab_size,)
    for name in sorted({*expected, *tensors}):
        place = f"{where}/{MODEL}: {name}"
        if name not in tensors:
            out.append(problem("HS411", where=place, got="no such weight", expected=list(expected[name])))
        elif name not in expected:
            got, fix = f"a weight {list(tensors[name].shape)}", "train again: the checkpoint is not of this draft"
            out.append(problem("HS411", where=place, got=got, expected="no such weight", fix=fix))
        elif tuple(tensors[name].shape) != expected[name]:
            shape = list(tensors[name].shape)
            out.append(problem("HS411", where=place, got=shape, expected=list(expected[name])))
        elif tensors[name].dtype not in _MAP.get(name, _FLOATS):
            got, kinds = str(tensors[name].dtype).removeprefix("torch."), _MAP.get(name, _FLOATS)
            want = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
            out.append(problem("HS411", where=place, got=got, expected=want, fix="export an earlier checkpoint"))
        elif not bool(torch.isfinite(tensors[name]).all()):
            fix = "export an earlier checkpoint"
            out.append(problem("HS201", where=place, got="NaN or infinity", expected="finite weights", fix=fix))
        elif tensors[name].is_floating_point() and not bool(torch.isfinite(tensors[name].to(stored)).all()):
            got = f"{float(tensors[name].abs().max()):.3g}, which is infinite in {str(stored).removeprefix('torch.')}"
            fix = "export with --dtype bfloat16 or float32"
            out.append(problem("HS201", where=place, got=got, expected="finite weights", fix=fix))
    if reduced and not _errors(out):
        d2t, t2d = tensors["d2t"].numpy(), tensors["t2d"].numpy()
        out += check_map(d2t, t2d, size=spec.draft_vocab_size, total=spec.vocab_size, where=where)
    return out


def _config(
    trained: Trained,
    engines: Sequence[NamedEngine],
    profile: EngineProfile | None,
    style: Style,
    target: Path,
    problems: list[Problem],
) -> dict[str, Any] | None:
    versions = {e.engine: e.version_or(profile) for e in engines if not e.is_custom}
    problems += rope_problems(trained.spec, engines)
    keys: dict[str, Any] | None = {}
    if versions:
        model = trained.target
        about: dict[str, Any] = {"architecture": model.architecture, "num_layers": model.num_layers}
        keys, found = emit_for(trained.layout.aux, draft_config(trained.spec), versions, profile=profile, **about)
        serving = ", ".join(f"{e} {v}".strip() for e, v in versions.items())
        problems += [p.at(f"one folder for {serving}") for p in found]
    if keys is None:
        return None
    config = plain_config(trained.spec, keys)
    if style == "plain":
        return config
    return speculators_config(
        config,
        target=str(target.absolute()),
        architecture=trained.target.architecture,
        speculative_tokens=trained.steps,
    )


def _named(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, *, first_layer: str | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of the folder: floats in one dtype, the map as it is."""
    out = {}
    for name, tensor in tensors.items():
        served = name if first_layer is not None else exported_name(name)
        out[served] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
    return out


def _compare(
    trained: Trained,
    tensors: Mapping[str, torch.Tensor],
    engines: Sequence[NamedEngine],
    servings: Sequence[ServingLayout | None],
    problems: list[Problem],
) -> list[Problem]:
    """Return what training did and an engine would not do."""
    layout = trained_layout(trained.spec, trained.layout, trained.target, problems)
    d2t = tensors.get("d2t")
    digest = None if d2t is None else vocabulary_digest(d2t.numpy())
    layout = layout.model_copy(update={"vocab_map": digest})
    out = []
    for engine, served in zip(engines, servings, strict=False):
        if served is not None:
            out += [p.at(f"training and {engine}") for p in compare_servings(layout, served)]
    return out


def _note(trained: Trained, engines: Sequence[NamedEngine]) -> dict[str, Any]:
    """Return what is written beside the weights: what the draft was trained on, and for what it was written."""
    return {
        "hsformat_version": hsformat.__version__,
        "step": trained.step,
        "serve": [str(e) for e in engines],
        "layout": trained.layout.model_dump(mode="json"),
        "trained": dict(trained.admitted),
    }


def _errors(problems: Sequence[Problem]) -> bool:
    return any(p.severity is Severity.ERROR for p in problems)
