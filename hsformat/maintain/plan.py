"""What a merge will do, found out before anything is written: contract, segments, and every reason to refuse."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hsformat.compare import compare
from hsformat.contract import Contract, compatibility_view, differing_fields
from hsformat.maintain.finalnorm import FinalNormWeights, load_final_norm, normed_contract
from hsformat.problems import Problem, Severity, StoreError, problem
from hsformat.store.backend import Backend, Place
from hsformat.store.commit import CommitRecord, Segments, load_segments
from hsformat.store.create import check_new, exists
from hsformat.store.metadata import SEGMENTS, load_contract
from hsformat.store.places import backend_for

__all__ = ["Input", "Plan", "Step", "plan_merge"]


@dataclass(kw_only=True)
class Input:
    """One store that takes part; the one that is written to as well, if it is there.

    Attributes
    ----------
    contract, meaning
        As it is stored, and of what the merge takes from it: after the final norm, if that is asked for.
    norm
        With which its last capture is taken through the final norm; None: its segments are copied.
    """

    backend: Backend
    contract: Contract
    meaning: Contract
    norm: FinalNormWeights | None
    segments: Segments

    def name_of(self, segment: str) -> str:
        """Return the name that a segment has in the result: another one, always the same, if it is converted.

        It begins with the time in the old one and ends with its number: the order of records stays.
        """
        if self.norm is None:
            return segment
        writer, _, n = segment.rpartition("-")
        unique = hashlib.sha256(f"{writer} {self.contract.target.basis_digest} final".encode()).hexdigest()
        return f"{writer[:12]}{unique[:20]}-{n}"

    def commits(self) -> Iterator[CommitRecord]:
        """Yield the commit records of segments that are in use in this store."""
        for name, (commit, _) in self.segments.found.items():
            if commit is not None and name not in self.segments.owners:
                yield commit


@dataclass(frozen=True, kw_only=True)
class Step:
    """One segment that is to be in the result under ``name``."""

    source: Input
    commit: CommitRecord
    name: str


@dataclass(kw_only=True)
class Plan:
    """What a merge will do.

    Attributes
    ----------
    new
        Whether the store is to be created.
    steps
        Segments that are copied or converted, in order.
    present
        Segments that are there already.
    replaced
        Segments that are left out, since another one has replaced them.
    records
        In the result, ids that occur twice counted twice.
    """

    out: Backend
    contract: Contract
    new: bool
    steps: list[Step] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    records: int = 0
    problems: list[Problem] = field(default_factory=list)


def plan_merge(inputs: Sequence[Place], out: Place, *, final_norm: str | os.PathLike[str] | None, dedupe: bool) -> Plan:
    """Read all contracts and commit records.

    Raises
    ------
    StoreError
        HS501, HS502: an input is no store, or there is something else at ``out``. HS503, HS504: a commit record is
        damaged. HS507: the stores do not mean the same. HS506 (error): a segment of one store was replaced in another,
        and records would be lost. HS107: ids occur twice, and ``dedupe`` is not given.
    ContractMismatch, ForeignFileError
        As :func:`hsformat.maintain.finalnorm.load_final_norm` and ``normed_contract``.
    """
    opened = [_open(place, final_norm) for place in inputs]
    target = _open(out, None) if exists(out) else None
    if target is None:
        check_new(out)
    every = [*([target] if target is not None else []), *opened]
    base = every[0].meaning
    if errors := [p for i in every[1:] for p in _differences(i, base, every[0].backend.location)]:
        raise StoreError(errors)
    contract, notes = _contract(every, base, new=target is None)
    plan = Plan(out=backend_for(out), contract=contract, new=target is None, problems=notes)
    _segments(plan, every, target)
    duplicates = _duplicates(plan, target)
    if duplicates and not dedupe:
        raise StoreError(duplicates)
    return plan


def _open(place: Place, final_norm: str | os.PathLike[str] | None) -> Input:
    backend = backend_for(place)
    contract, _ = load_contract(backend)
    segments = load_segments(backend)
    errors = [
        p
        for name, (_, problems) in segments.found.items()
        for p in problems
        if p.severity is Severity.ERROR and name not in segments.owners
    ]
    if errors:
        raise StoreError(errors)
    normed = None if final_norm is None else normed_contract(contract)
    norm = None
    if final_norm is not None and normed is not None:
        norm = load_final_norm(contract, final_norm, where=backend.location)
    return Input(backend=backend, contract=contract, meaning=normed or contract, norm=norm, segments=segments)


def _differences(one: Input, base: Contract, where: str) -> Iterator[Problem]:
    """Yield HS507 for each clause in which a store means something else."""
    theirs, ours = compatibility_view(one.meaning.to_json()), compatibility_view(base.to_json())
    norms = {frozenset(c.depth for c in x.captures) for x in (one.meaning, base)}
    fix = "these stores are not of one meaning: keep them apart"
    if len(norms) == 1 and one.meaning.keys != base.keys:
        fix = "--apply-final-norm --target MODEL takes states before the final norm through it; never the other way"
    for path, got, expected in differing_fields(theirs, ours):
        shown, wanted = str(got)[:200], f"{str(expected)[:200]}, as in {where}"
        yield problem("HS507", where=f"{one.backend.location}: {path}", got=shown, expected=wanted, fix=fix)


def _contract(every: list[Input], base: Contract, *, new: bool) -> tuple[Contract, list[Problem]]:
    """Return the contract of the result, and notes of what is kept and left out.

    Raises
    ------
    StoreError
        HS507: the result exists and declares a field that an input has not.
    """
    fields = [f for f in base.fields if all(f in one.meaning.fields for one in every)]
    notes, missing = [], [f for f in base.fields if f not in fields]
    for f in missing:
        owners = [one.backend.location for one in every if f not in one.meaning.fields]
        notes.append(
            problem(
                "HS507",
                where=f"fields.{f.name}",
                got=f"not in {', '.join(owners)}, or defined otherwise",
                expected="the same field in every store",
                severity=Severity.NOTE if new else Severity.ERROR,
                fix="it is left out of the new contract; arrays that are copied stay, as files that readers ignore"
                if new
                else "merge into a new store: the field is then left out of its contract",
            )
        )
    if missing and not new:
        raise StoreError(notes)
    kept = every[0].backend.location
    for one in every[1:]:
        notes += [
            _note(p, one.backend.location, kept)
            for p in compare(one.meaning, base)
            if p.where == "fields" or not p.where.startswith("fields")
        ]
    data = base.to_json()
    data["fields"] = [f.model_dump(mode="json") for f in fields]
    return Contract.model_validate(data), notes


def _note(p: Problem, where: str, kept: str) -> Problem:
    fix = f"nothing: the result has what {kept} says"
    return problem(p.code, where=f"{where}: {p.where}", got=p.got, expected=p.expected, severity=Severity.NOTE, fix=fix)


def _segments(plan: Plan, every: list[Input], target: Input | None) -> None:
    """Choose the segments: each name once, and none that another one has replaced, in whichever store that was.

    Raises
    ------
    StoreError
        HS507: two different segments have one name. HS506 (error): a segment is in use in one store and replaced in
        another, and has records that nothing in the result has.
    """
    owners: dict[str, tuple[str, Input]] = {}
    for one in every:
        for old, new in one.segments.owners.items():
            owners.setdefault(one.name_of(old), (one.name_of(new), one))
    chosen: dict[str, Step] = {}
    left_out: dict[str, Step] = {}
    problems: list[Problem] = []
    for one in every:
        for commit in one.commits():
            step = Step(source=one, commit=commit, name=one.name_of(commit.name))
            if step.name in owners:
                left_out.setdefault(step.name, step)
            elif step.name not in chosen:
                chosen[step.name] = step
            elif not _same(chosen[step.name], step):
                problems.append(_clash(chosen[step.name], step))
    ids = {i for step in chosen.values() for i in step.commit.ids}
    for name, step in left_out.items():
        if gone := [i for i in step.commit.ids if i not in ids]:
            problems.append(_would_lose(step, gone, *owners[name]))
    if problems:
        raise StoreError(problems)
    plan.steps = [step for step in chosen.values() if step.source is not target]
    plan.present = [name for name, step in chosen.items() if step.source is target]
    plan.replaced = sorted(left_out)
    plan.records = sum(step.commit.records for step in chosen.values())


def _same(a: Step, b: Step) -> bool:
    """Whether two segments of one name are the same: byte for byte, unless one was converted, whose name says it."""
    if a.commit.ids != b.commit.ids:
        return False
    if a.commit.name != b.commit.name:
        return True
    key = f"{SEGMENTS}/{a.commit.name}/zarr.json"
    return a.source.backend.read(key) == b.source.backend.read(key)


def _clash(a: Step, b: Step) -> Problem:
    where = f"{b.source.backend.location}/{SEGMENTS}/{b.name}"
    got, expected = "another segment of the same name", f"the same as in {a.source.backend.location}"
    return problem("HS507", where=where, got=got, expected=expected, fix="find out which of the two was changed")


def _would_lose(step: Step, gone: list[str], owner: str, one: Input) -> Problem:
    shown = ", ".join(map(repr, gone[:5])) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
    return problem(
        "HS506",
        where=f"{step.source.backend.location}/{SEGMENTS}/{step.name}",
        severity=Severity.ERROR,
        got=f"a segment that {owner} of {one.backend.location} has replaced without record {shown}",
        expected="segments that are in use everywhere, or whose records are",
        fix=f"extract these records again into {one.backend.location} first, or leave that store out",
    )


def _duplicates(plan: Plan, target: Input | None) -> list[Problem]:
    """Return HS107, one problem a pair of segments that have ids in common."""
    steps = [(s.name, s.source.backend.location, s.commit) for s in plan.steps]
    present = set(plan.present)
    there = [] if target is None else [(c.name, target.backend.location, c) for c in target.commits()]
    seen: dict[str, str] = {}
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, where, commit in [*(s for s in there if s[0] in present), *steps]:
        for i in commit.ids:
            if (owner := seen.setdefault(i, name)) != name:
                found.setdefault((owner, name, where), []).append(i)
    return [
        problem(
            "HS107",
            where=f"{where}/{SEGMENTS}/{name}",
            got=f"{len(ids)} id(s) that segment {owner} has, too: {ids[0]!r}{', ...' if len(ids) > 1 else ''}",
            expected="one record of each id in all stores",
            fix="--dedupe keeps the records of the older segment",
            record=ids[0] if len(ids) == 1 else None,
        )
        for (owner, name, where), ids in found.items()
    ]
