"""The refusal: whether data, draft and every engine that will serve it mean the same, before any weight is loaded.

What is compared, all of it before anything is said: the stores with each other (HS507) and with the target's folder
(3xx); the captures to train on with what is stored (HS109, HS401); the draft as each engine of ``--serve`` would feed
it with the stores' contract, with what training does, and with the other engines (4xx). Any error refuses the run, and
no option goes past it. Importing this module brings no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hsformat.compare import compare
from hsformat.compare_serving import compare_servings
from hsformat.contract import Contract, compatibility_view, differing_fields
from hsformat.engines.custom import PREFIX
from hsformat.engines.positions import check_record_length
from hsformat.engines.profile import EngineProfile, load_profile
from hsformat.engines.targets import target_facts
from hsformat.layout import Layout, ServingLayout, parse_capture_key
from hsformat.problems import ContractMismatch, NothingToOpen, Problem, Severity, problem
from hsformat.source import RecordSource
from hsformat.validate.target import check_target, describe_target
from hsformat_trainer.admitted import Admitted, Source
from hsformat_trainer.attempt import attempt
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.draft_files import trained_layout
from hsformat_trainer.draft_plan import existing_spec, exported_draft, new_spec, served_by
from hsformat_trainer.engines_named import NamedEngine, parse_serve
from hsformat_trainer.held_out import lengths_of, split
from hsformat_trainer.origins import origins_of, templates_of
from hsformat_trainer.same_tokens import same_tokens
from hsformat_trainer.special_ids import special_ids
from hsformat_trainer.supervision import nothing_supervised

__all__ = ["Admitted", "Source", "admit"]

_SAID = frozenset({"aux", "architecture", "num_layers", "target_hidden_size", "vocab_size"})
"""Of a comparison of training with serving: what the comparison with the stores' contract says already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A source, before its records are divided."""

    name: str
    source: RecordSource
    weight: float

    @property
    def contract(self) -> Contract:
        return self.source.contract


def admit(
    config: TrainConfig,
    *,
    sources: Sequence[tuple[str, RecordSource, float]] | None = None,
    held_out: tuple[str, RecordSource] | None = None,
) -> Admitted:
    """Compare stores, target, draft and engines, and divide the records.

    Parameters
    ----------
    sources
        Name, records and weight of what is trained on, in place of ``config.stores``: any source of records.
    held_out
        In place of ``config.held_out.store``.

    Raises
    ------
    NothingToOpen
        A path that was given does not exist.
    ContractMismatch
        Every error that was found, with its store and its engine; worse ones do not hide others.
    """
    problems: list[Problem] = []
    opened, apart = _open(config, sources, held_out)
    every = [*opened, *([apart] if apart else [])]
    first = opened[0]
    _check_paths(config)
    profile = attempt(lambda: _profile(config), problems)
    facts = attempt(lambda: target_facts(config.target), problems)
    described = attempt(lambda: describe_target(first.contract, config.target), problems)
    problems += [p for one in every[1:] for p in _drift(one, first)]
    if described is not None:
        for one in every:
            problems += check_target(one.contract, templates_of(one.source), described, where=one.name)
    layout = _layout(config, every, problems)
    if config.mask_rule == "feature":
        problems.append(_shifted_masks())
    longest = max(int(lengths_of(one.source).max(initial=0)) for one in every)
    contract = first.contract.model_copy(update={"layout": layout})
    engines = parse_serve(config.serve)
    existing = config.init or config.draft_config
    spec = None
    servings: list[ServingLayout | None] = []
    if facts is not None and existing is not None:
        spec, now = existing_spec(config, facts, engines, profile, problems)
        problems += _serving_problems(contract, every, engines, now)
    elif described is not None:
        spec = new_spec(config, described, layout, engines, profile, problems)
    trained = None
    if spec is not None and facts is not None and (existing is None or not _errors(problems)):
        draft = exported_draft(spec, layout, contract.target, engines, profile, problems)
        servings = [] if draft is None else served_by(draft, facts, engines, profile, problems)
        problems += _serving_problems(contract, every, engines, servings)
        if set(layout.aux) <= set(contract.keys):  # otherwise there is no such training, and HS109 has said it
            trained = trained_layout(spec, layout, contract.target, problems)
            problems += _training_problems(trained, engines, servings)
    if spec is not None:
        place = f"{len(opened)} store(s)"
        limit = spec.max_position_embeddings
        problems += check_record_length(limit, longest, where=place, draft=existing or "the draft")
    parts = split(
        [(one.name, one.source, one.weight) for one in opened],
        None if apart is None else (apart.name, apart.source),
        config.held_out,
        seed=config.seed,
        most_tokens=config.batch_tokens,
        problems=problems,
    )
    problems += nothing_supervised(parts, config.mask_rule)
    if not _errors(problems):
        problems += same_tokens(parts)
    problems = list(dict.fromkeys(problems))
    if _errors(problems):
        raise ContractMismatch(problems)
    if described is None or spec is None or trained is None:
        raise RuntimeError("nothing was admitted and nothing was refused: a defect of the gate")
    return Admitted(
        contract=contract,
        layout=layout,
        trained=trained,
        servings=tuple(s for s in servings if s is not None),
        spec=spec,
        target=described.model,
        target_folder=Path(config.target),
        sources=parts,
        special_ids=special_ids(Path(config.target), described.model.vocab_size),
        origins=origins_of([(s.source, s.train) for s in parts]),
        notes=tuple(problems),
    )


def _open(
    config: TrainConfig,
    sources: Sequence[tuple[str, RecordSource, float]] | None,
    held_out: tuple[str, RecordSource] | None,
) -> tuple[list[_Opened], _Opened | None]:
    """Open all stores.

    Raises
    ------
    HsError
        All problems of all stores that cannot be opened.
    """
    from hsformat.store import open as open_store

    problems: list[Problem] = []

    def opened(path: str, weight: float) -> _Opened | None:
        store = attempt(lambda: open_store(path), problems)
        return None if store is None else _Opened(name=path, source=store, weight=weight)

    if sources is None:
        found = [opened(s.path, s.weight) for s in config.stores]
    else:
        found = [_Opened(name=name, source=source, weight=weight) for name, source, weight in sources]
    apart = None
    if held_out is not None:
        apart = _Opened(name=held_out[0], source=held_out[1], weight=0.0)
    elif config.held_out.store is not None:
        apart = opened(config.held_out.store, 0.0)
    if problems:
        raise ContractMismatch(problems)
    return [one for one in found if one is not None], apart


def _check_paths(config: TrainConfig) -> None:
    """Refuse paths that do not exist: nothing could be begun.

    Raises
    ------
    NothingToOpen
        HS602, one problem a path.
    """
    named = [(config.target, "a model folder"), (config.engine_profile, "an engine profile")]
    named += [(e.removeprefix(PREFIX), "a custom layout") for e in config.serve if e.startswith(PREFIX)]
    problems = [
        problem("HS602", where=path, got="no such path", expected=expected, fix="check the path")
        for path, expected in named
        if path is not None and not Path(path).exists()
    ]
    if problems:
        raise NothingToOpen(problems)


def _profile(config: TrainConfig) -> EngineProfile | None:
    return None if config.engine_profile is None else load_profile(config.engine_profile)


def _drift(one: _Opened, first: _Opened) -> list[Problem]:
    """Return HS507 for each clause in which a store means something else than the first."""
    theirs, ours = compatibility_view(one.contract.to_json()), compatibility_view(first.contract.to_json())
    fix = "these stores are not of one meaning: train on one of them, or extract the other again"
    return [
        problem(
            "HS507", where=f"{one.name}: {path}", got=got, expected=f"{expected}, as in {first.name}", fix=fix
        )
        for path, got, expected in differing_fields(theirs, ours)
    ]  # fmt: skip


def _layout(config: TrainConfig, every: Sequence[_Opened], problems: list[Problem]) -> Layout:
    """Return what is trained on: what the options select, otherwise the layout that the stores were extracted for."""
    own = every[0].contract.layout
    layout = Layout(aux=config.aux or own.aux, last=config.last or own.last)
    for one in every:
        stated = one.contract.layout
        asked = Layout(
            aux=stated.aux if config.aux is not None else layout.aux,
            last=stated.last if config.last is not None else layout.last,
        )
        found = compare(one.contract, asked)
        problems += [p.at(one.name) for p in found]
        problems += [p.at(one.name) for p in _selected(one.contract, layout)]
    return layout


def _selected(contract: Contract, layout: Layout) -> list[Problem]:
    """Return what a selection lacks: HS109 for captures that are not stored, HS401 for a last one of another depth."""
    n, stored = contract.target.num_layers, f"captures [{', '.join(contract.keys)}]"
    out = [
        problem(
            "HS109",
            where="captures",
            got=stored,
            expected=f"{key} among them",
            fix=f"extract again with depth {parse_capture_key(key)[0]}; no other capture can stand in for {key}",
        )
        for key in layout.keys
        if key not in contract.keys
    ]
    ends = [key for key in contract.keys if parse_capture_key(key)[0] == n]
    if layout.last is not None and parse_capture_key(layout.last)[0] != n:
        fix = f"select --last {ends[0]}" if ends else f"extract again with depth {n} as last"
        expected = f"d{n} (or d{n}n): the target distribution comes from depth {n}, after the last layer"
        out.append(problem("HS401", where="layout.last", got=layout.last, expected=expected, fix=fix))
    if not ends:
        expected = f"d{n} (or d{n}n) as last, for the target distribution"
        fix = f"extract again with depth {n} as last"
        out.append(problem("HS109", where="captures", got=stored, expected=expected, fix=fix))
    elif layout.last is None:
        got, fix = "no last capture in the layout of the data", f"select --last {ends[0]}"
        out.append(problem("HS109", where="layout.last", got=got, expected=" or ".join(ends), fix=fix))
    return out


def _shifted_masks() -> Problem:
    fix = "use --mask-rule serving (exactly what engines draft), or input"
    got = "feature: loss at m[t+k], the mask of the token that the features are of"
    expected = "a rule that moves the mask with the token that is predicted"
    return problem("HS110", where="--mask-rule", got=got, expected=expected, fix=fix)


def _errors(problems: Sequence[Problem]) -> bool:
    return any(p.severity is Severity.ERROR for p in problems)


def _serving_problems(
    contract: Contract,
    every: Sequence[_Opened],
    engines: Sequence[NamedEngine],
    servings: Sequence[ServingLayout | None],
) -> list[Problem]:
    """Return what the data and each engine disagree on, and each two engines."""
    out: list[Problem] = []
    known = [(e, s) for e, s in zip(engines, servings, strict=False) if s is not None]
    for engine, served in known:
        for one in every:
            chosen = one.contract.model_copy(update={"layout": contract.layout})
            out += [p.at(f"{one.name}: {engine}") for p in compare(chosen, served)]
    for (a, x), (b, y) in combinations(known, 2):
        out += [p.at(f"{a} and {b}") for p in compare_servings(x, y) if p.where != "max_positions"]
    return out


def _training_problems(
    trained: ServingLayout, engines: Sequence[NamedEngine], servings: Sequence[ServingLayout | None]
) -> list[Problem]:
    """Return what training would do and an engine would not: norms, rotary embedding, widths, embedding and head."""
    return [
        p.at(f"training and {engine}")
        for engine, served in zip(engines, servings, strict=False)
        if served is not None
        for p in compare_servings(trained, served.model_copy(update={"vocab_map": None}))
        if p.where not in _SAID
    ]
