"""What an engine will really do with a draft folder and a target: :func:`inspect` and :func:`resolve`.

Everything that is wrong is found, not the first thing: layer ids (``layer_ids``), norms (``options``), rotary embedding
(``positions``), vocabulary (``vocabulary``), weights (``weights``), embedding and head (``sharing``). Nothing is loaded
and no engine is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hsformat.engines.custom import PREFIX, CustomLayout, load_custom
from hsformat.engines.drafts import Draft, read_draft
from hsformat.engines.fc_inputs import check_skipped_fc, fc_captures
from hsformat.engines.layer_ids import FedBy, FedDepths, fed_depths
from hsformat.engines.options import check_layers, check_sections, read_options
from hsformat.engines.positions import check_positions, max_positions, read_ropes
from hsformat.engines.profile import EngineProfile, load_profile
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.engines.sharing import check_sizes, embedding_of, head_of
from hsformat.engines.sizes import read_epsilon, read_sizes
from hsformat.engines.table import capture_row, draft_row, engine_of, known_versions, parse_version
from hsformat.engines.targets import Target, TargetFacts, target_facts
from hsformat.engines.vocabulary import read_vocabulary
from hsformat.engines.weights import check_weights
from hsformat.layout import AuxInput, ServingLayout
from hsformat.problems import HsError, NothingToOpen, Problem, ResolveError, Severity, problem

__all__ = ["Rules", "inspect", "inspect_draft", "require_paths", "resolve", "rules_for"]

T = TypeVar("T")
PathText = str | os.PathLike[str]

_STRENGTH = ("read", "ran", "proved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is known of an engine for one draft and one target.

    Attributes
    ----------
    captures
        None: a custom layout, which states the aux inputs itself (``aux``).
    profile
        That was given, of this engine or of another one.
    """

    engine: str
    version: str
    title: str
    captures: CaptureRow | None
    draft: DraftRow
    aux: tuple[AuxInput, ...] | None
    evidence: str
    profile: EngineProfile | None = None


def resolve(
    engine: str,
    *,
    draft: PathText,
    target: Target,
    version: str | None = None,
    profile: EngineProfile | PathText | None = None,
) -> ServingLayout:
    """Return what an engine will do with a draft.

    Parameters
    ----------
    engine
        ``vllm``, ``sglang``, or ``custom:PATH`` for a layout of one's own (docs/guides/serving.md).
    draft
        Folder with ``config.json`` and safetensors.
    target
        Model folder (its ``config.json`` is enough), target model or contract.
    version
        Of the engine. None: the profile's; a custom layout needs none.
    profile
        What the probe proved of a version that the tables do not know, or its file.

    Raises
    ------
    ResolveError
        Every error that :func:`inspect` finds; among them HS403 for a layout that the engine would fill in by a default
        of its own, and HS410 for what is not known.
    """
    layout, problems = inspect(engine, draft=draft, target=target, version=version, profile=profile)
    errors = [p for p in problems if p.severity is Severity.ERROR]
    if errors or layout is None:
        raise ResolveError(errors or problems)
    return layout


def inspect(
    engine: str,
    *,
    draft: PathText,
    target: Target,
    version: str | None = None,
    profile: EngineProfile | PathText | None = None,
) -> tuple[ServingLayout | None, list[Problem]]:
    """Return what an engine will do with a draft as far as it can be told, and everything that is wrong with it.

    Parameters are those of :func:`resolve`. Nothing is raised for what files hold, nor for files that are not there.
    """
    problems: list[Problem] = []
    facts = _attempt(lambda: target_facts(target), problems)
    proved = _attempt(lambda: _profile(profile), problems)
    folder, found = read_draft(draft)
    if folder is None:
        return None, problems + found
    if version is None and profile is not None and proved is None:
        return None, problems + found  # the version is that of a profile that cannot be read
    rules = _attempt(lambda: rules_for(engine, version, folder, facts, proved), problems)
    if rules is None or facts is None:
        return None, problems + found
    layout, wrong = inspect_draft(folder, facts, rules)
    return layout, problems + found + wrong


def require_paths(engine: str, *, draft: PathText, target: PathText | None, profile: PathText | None = None) -> None:
    """Refuse paths that a command was given and that are not what they are given for; its exit code is then 2.

    Raises
    ------
    NothingToOpen
        HS602, one problem a path.
    """
    problems = list(_wrong_folder(draft, "a draft folder"))
    if target is not None:
        problems += _wrong_folder(target, "a model folder")
    if profile is not None:
        problems += _wrong_file(profile, "an engine profile")
    if engine.startswith(PREFIX):
        problems += _wrong_file(engine.removeprefix(PREFIX), "a custom layout, as custom:PATH")
    if problems:
        raise NothingToOpen(problems)


def _wrong_folder(path: PathText, expected: str) -> Iterator[Problem]:
    folder = Path(path)
    if not folder.exists():
        yield _wrong_path(path, "no such path", expected)
    elif not folder.is_dir():
        yield _wrong_path(path, "not a folder", expected)
    elif not (folder / "config.json").is_file():
        yield _wrong_path(path, "no config.json", f"{expected} with config.json")


def _wrong_file(path: PathText, expected: str) -> Iterator[Problem]:
    if not os.fspath(path) or not Path(path).exists():
        yield _wrong_path(path or "''", "no such path", expected)
    elif not Path(path).is_file():
        yield _wrong_path(path, "not a file", expected)


def _wrong_path(path: PathText, got: str, expected: str) -> Problem:
    return problem("HS602", where=str(path), got=got, expected=expected, fix="check the path")


def rules_for(
    engine: str, version: str | None, draft: Draft, target: TargetFacts | None, profile: EngineProfile | None
) -> Rules:
    """Return the rows that hold for an engine, a draft and a target.

    Raises
    ------
    ResolveError
        HS410: not known. ForeignFileError: a custom layout that cannot be read.
    """
    if engine.startswith(PREFIX):
        custom = load_custom(engine.removeprefix(PREFIX))
        if version not in (None, custom.version):
            where, fix = f"{engine}: version", "leave the version out, or give the file of that version"
            expected = f"{custom.version}, of which the file is"
            raise ResolveError(problem("HS410", where=where, got=version, expected=expected, fix=fix))
        return _custom_rules(custom, draft)
    found = engine_of(engine, serving=True)
    if version is None:
        if profile is None or profile.engine != engine:
            fix = (
                f"give the version that will serve (--engine-version, or {engine}@VERSION where engines are named so): "
                "what a draft is fed changes between versions"
            )
            expected = f"one of {', '.join(known_versions(engine))}"
            raise ResolveError(problem("HS410", where=f"{engine}: version", got="none", expected=expected, fix=fix))
        version = profile.version
    version = parse_version(engine, version)
    problems: list[Problem] = []
    row = _attempt(lambda: draft_row(engine, version, draft.layout, draft.architecture, profile), problems)
    captures = None
    if target is not None:
        captures = _attempt(lambda: capture_row(engine, version, target.architecture, profile), problems)
    if problems or row is None:
        raise ResolveError(list(dict.fromkeys(problems)))  # a version that neither table knows is one problem
    weakest = min((r.evidence for r in (row, captures) if r is not None), key=_STRENGTH.index)
    return Rules(
        engine=engine, version=version, title=found.title, captures=captures, draft=row, aux=None, evidence=weakest,
        profile=profile,
    )  # fmt: skip


def inspect_draft(draft: Draft, target: TargetFacts, rules: Rules) -> tuple[ServingLayout | None, list[Problem]]:
    """Return what is done with a draft that was read: the part of :func:`inspect` that opens no config."""
    problems: list[Problem] = []
    title, row = rules.title, rules.draft
    fed = _fed(draft, target, rules, problems)
    check_sections(draft, problems)
    sizes = read_sizes(draft, problems, row)
    options = read_options(draft, row, title, problems)
    epsilon = read_epsilon(draft, row, problems)
    limit = max_positions(draft, row, problems)
    problems += check_positions(draft, limit, row, target, title)
    if sizes is None:
        return None, problems
    check_layers(draft, sizes, row, title, problems)
    problems += check_sizes(draft, sizes, target)
    captures = fc_captures(draft, row, fed, title, problems)
    problems += check_skipped_fc(draft, sizes, row, captures, title)
    ropes = read_ropes(draft, sizes, row, title, problems)
    vocabulary = read_vocabulary(draft, sizes, row, target, title, problems)
    problems += check_weights(draft, sizes, row, options, captures=captures, fed=fed.depths, title=title)
    embedding = embedding_of(draft, sizes, row, target, title, problems)
    head = head_of(draft, sizes, row, target, vocabulary.size, title, problems)
    if fed.depths is None:
        return None, problems
    aux = rules.aux or tuple(_aux(d, rules, target) for d in fed.depths)
    layout = ServingLayout.model_validate(
        {
            "engine": rules.engine, "version": rules.version, "evidence": rules.evidence,
            "architecture": target.architecture, "num_layers": target.num_layers,
            "target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "aux": aux,
            "hidden_size": sizes.hidden_size, "num_draft_layers": sizes.num_layers,
            "norm_before_residual": options.norm_before_residual, "norm_before_fc": options.norm_before_fc,
            "fc_norm": options.fc_norm, "norm_output": options.norm_output,
            "later_layers_norm": row.later_layers_norm if sizes.num_layers > 1 else None,
            "rope": ropes, "max_positions": limit, "rms_norm_eps": epsilon, "embedding": embedding, "head": head,
            "draft_vocab_size": vocabulary.size, "vocab_map": vocabulary.map_digest, "shift": row.shift,
        }
    )  # fmt: skip
    return layout, problems


def _fed(draft: Draft, target: TargetFacts, rules: Rules, problems: list[Problem]) -> FedDepths:
    if rules.aux is None:
        if rules.captures is None:
            return FedDepths(depths=None, stated=False)
        about = FedBy(
            engine=rules.engine, version=rules.version, row=rules.draft, captures=rules.captures,
            architecture=target.architecture, num_layers=target.num_layers, profile=rules.profile,
        )  # fmt: skip
        return fed_depths(draft, about, problems)
    n, deep = target.num_layers, False
    for a in rules.aux:
        if a.depth > n or (a.norm == "final" and a.depth != n):
            expected = f"depths 0 to {n}, the final norm at {n} alone"
            problems.append(problem("HS304", where=f"{rules.engine}: aux", got=a.key, expected=expected))
            deep = True
    return FedDepths(depths=None if deep else tuple(a.depth for a in rules.aux), stated=True)


def _aux(depth: int, rules: Rules, target: TargetFacts) -> AuxInput:
    normed = rules.captures is not None and rules.captures.norm == "final" and depth == target.num_layers
    return AuxInput(depth=depth, norm="final" if normed else "none")


def _custom_rules(custom: CustomLayout, draft: Draft) -> Rules:
    return Rules(
        engine=f"custom:{custom.name}", version=custom.version, title=custom.name, captures=None,
        draft=custom.draft_row(draft), aux=custom.inputs, evidence="stated",
    )  # fmt: skip


def _profile(profile: EngineProfile | PathText | None) -> EngineProfile | None:
    return load_profile(profile) if isinstance(profile, (str, os.PathLike)) else profile


def _attempt(call: Callable[[], T], problems: list[Problem]) -> T | None:
    """Return what ``call`` returns, or None with its problems added."""
    try:
        return call()
    except HsError as e:
        problems += e.problems
        return None
