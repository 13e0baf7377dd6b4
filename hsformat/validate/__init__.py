"""Validation: every rule of docs/spec/1.0.md, checked on what is on the disk.

Nothing that is read is trusted, and everything that is wrong is reported. May import ``store`` and everything below it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hsformat.contract import Contract
from hsformat.problems import ForeignFileError, HsError, NothingToOpen, Problem
from hsformat.store.backend import CountedSource, Place, Source
from hsformat.store.commit import load_commit, replaced_note
from hsformat.store.metadata import load_contract, other_folder_notes, segment_names, segments_group_problems
from hsformat.store.places import backend_for
from hsformat.target.describe import TargetDescription
from hsformat.validate.draft import DraftCheck, check_draft
from hsformat.validate.excerpt import is_greedy, spread
from hsformat.validate.ids import SeenIds
from hsformat.validate.levels import SegmentNorms
from hsformat.validate.norms import norm_problems
from hsformat.validate.report import Level, Report, Tick
from hsformat.validate.segment import SAMPLE_RECORDS, SegmentCheck
from hsformat.validate.target import check_target, describe_target
from hsformat.validate.tokens import Counted, TokenCheck

__all__ = ["DraftCheck", "Level", "Report", "run", "validate_store"]

SAMPLE_SEGMENTS = 16
NORM_SEGMENTS = 256
"""Segments whose recorded norms are read at level ``sample``."""


def validate_store(
    path: Place,
    *,
    level: Level | Literal["metadata", "sample", "full"] = Level.SAMPLE,
    target: str | os.PathLike[str] | None = None,
    draft: DraftCheck | None = None,
) -> list[Problem]:
    """Return every problem of a store; an empty list, or notes and warnings alone, mean that it is valid.

    Parameters
    ----------
    level
        ``metadata``: structure, sizes of files, ids. ``sample``: also some records of some segments, recorded norms.
        ``full``: every checksum, every array, every number.
    target
        Folder of the model that the data has to be of; a folder that is no model is a problem (HS6xx), too. From level
        ``sample`` on, some states are also compared with its embedding and its head.
    draft
        A draft that the data has to fit as an engine serves it.

    Notes
    -----
    Nothing is raised for what is wrong with the store: a path that is no store is a problem (HS501), too. Segments are
    read one by one and states in blocks: what memory grows with are 8 bytes an id, of which each must be known once.
    """
    try:
        return run(path, level=Level(level), target=target, draft=draft).problems
    except HsError as e:
        return e.problems


def run(
    path: Place,
    *,
    level: Level,
    target: str | os.PathLike[str] | None = None,
    draft: DraftCheck | None = None,
    tick: Tick = lambda done, total: None,
) -> Report:
    """Validate and return the problems with counts of what was looked at.

    Parameters
    ----------
    target
        Folder of the model that the data has to be of (:func:`hsformat.validate.target.check_target`,
        :class:`hsformat.validate.tokens.TokenCheck`).
    draft
        A draft that the data has to fit as an engine serves it (:func:`hsformat.validate.draft.check_draft`).
    tick
        Called with bytes read and bytes to read in all, an estimate until the end, at levels ``sample`` and ``full``.

    Raises
    ------
    StoreError
        HS501, HS502, HS504: there is no root that could be read, so that nothing can be checked.
    NothingToOpen
        There is no folder of the target or of the draft.
    """
    place = backend_for(path)
    if draft is not None:
        from hsformat.engines.inspection import require_paths

        require_paths(draft.engine, draft=draft.draft, target=target, profile=draft.profile_path)
    contract, problems = load_contract(place)
    report = Report(store=place.location, level=level, problems=problems)
    report.problems += [*segments_group_problems(place), *other_folder_notes(place)]
    replaced: dict[str, str] = {}
    seen = _look(place, contract, replaced, level=level)
    if replaced:  # by segments that come later: those were looked at for nothing
        seen = _look(place, contract, replaced, level=level)
    report.problems += seen.problems
    report.segments, report.records = len(seen.found), seen.records
    found = seen.found
    described = None if target is None else _compare_target(contract, seen.templates, target, report)
    if draft is not None:
        report.problems += check_draft(contract, draft, target=target, longest=seen.longest, where=place.location)
    if level is not Level.METADATA:
        done = _content(place, contract, found, report, tick)
        if target is not None and described is not None:
            _tokens(place, contract, found, report, target, described, lambda n, rest: tick(done + n, done + rest))
    return report


class _Found(NamedTuple):
    """A segment as the first pass leaves it: its commit record is read again when its turn comes."""

    counted: Counted
    unreadable: frozenset[str]
    planned: int


@dataclass(slots=True)
class _Seen:
    """What the first pass over all commit records found."""

    problems: list[Problem] = field(default_factory=list)
    found: list[_Found] = field(default_factory=list)
    templates: Counter[str | None] = field(default_factory=Counter)
    records: int = 0
    longest: int = 0


def _look(place: Source, contract: Contract, replaced: dict[str, str], *, level: Level) -> _Seen:
    """Check each segment's commit record and files; names of replaced segments are left out, and added to."""
    seen, ids = _Seen(), SeenIds()
    known = dict(replaced)
    for name in segment_names(place):
        if name in known:
            seen.problems.append(replaced_note(place, name, known[name]))
            continue
        commit, problems = load_commit(place, name)
        seen.problems += problems
        if commit is None:
            continue
        replaced.update(dict.fromkeys(commit.replaces, name))
        check = SegmentCheck(place, contract, commit)
        seen.problems += check.structure()
        ids.add(commit)
        seen.records += commit.records
        seen.longest = max(seen.longest, *commit.tokens)
        seen.templates.update(commit.provenance[i].template_digest for i in commit.provenance_index)
        rows = range(commit.records) if level is Level.FULL else spread(commit.records, SAMPLE_RECORDS)
        planned = check.planned(rows, full=level is Level.FULL)
        counted = Counted(name, commit.records, sum(is_greedy(commit, row) for row in range(commit.records)))
        seen.found.append(_Found(counted, frozenset(check.unreadable), planned))
    seen.problems += ids.problems(place)
    return seen


def _compare_target(
    contract: Contract, templates: Counter[str | None], target: str | os.PathLike[str], report: Report
) -> TargetDescription | None:
    """Compare with a model folder; one that cannot be read ends no more than the comparison."""
    try:
        described = describe_target(contract, target)
    except NothingToOpen:
        raise
    except ForeignFileError as e:
        report.problems += e.problems
        return None
    report.problems += check_target(contract, templates, described, where=report.store)
    return described


def _content(place: Source, contract: Contract, found: list[_Found], report: Report, tick: Tick) -> int:
    """Check what is in the arrays; return the bytes read.

    Full: all records of all segments. Sample: evenly spaced ones, both ends among them; of more segments, the norms.
    """
    full = report.level is Level.FULL
    picked = set(range(len(found)) if full else spread(len(found), SAMPLE_SEGMENTS))
    normed = picked | set(() if full else spread(len(found), NORM_SEGMENTS))
    norms: list[SegmentNorms] = []
    done, ahead = 0, sum(found[i].planned for i in picked)
    for i in sorted(normed):
        (name, *_), unreadable, planned = found[i]
        planned = planned if i in picked else 0
        ahead -= planned

        def show(n: int, done: int = done, rest: int = ahead, planned: int = planned) -> None:
            tick(done + n, done + max(n, planned) + rest)

        source = CountedSource(place, show)
        commit, problems = load_commit(place, name)
        if commit is None:  # changed since the first pass
            report.problems += problems
            continue
        check = SegmentCheck(source, contract, commit, unreadable)
        if i in picked:
            _read(check, report, source)
        segment_norms, problems = check.norms()
        norms.append(segment_norms)
        report.problems += problems
        report.bytes_checked += 0 if full else source.bytes_read
        done += source.bytes_read
    tick(done, done)
    report.problems += norm_problems(contract, norms, where=place.location)
    return done


def _read(check: SegmentCheck, report: Report, source: CountedSource) -> None:
    rows = range(check.commit.records) if report.level is Level.FULL else spread(check.commit.records, SAMPLE_RECORDS)
    if report.level is Level.FULL:
        report.problems += check.checksums()
        report.bytes_checked += source.bytes_read + sum(check.shards)
    report.problems += check.arrays(rows)
    report.records_checked += len(rows)


def _tokens(
    place: Source,
    contract: Contract,
    found: list[_Found],
    report: Report,
    target: str | os.PathLike[str],
    described: TargetDescription,
    tick: Tick,
) -> None:
    problems: list[Problem] = []
    segments = [f.counted for f in found]
    check = TokenCheck(
        source=place, contract=contract, segments=segments, full=report.level is Level.FULL, problems=problems
    )
    head = contract.target.vocab_size * contract.target.hidden_size
    check.run(target, described, lambda share: tick(round(share * head), head))
    report.problems += [p for p in problems if p not in report.problems]  # what cannot be read is known already
    report.states_compared = check.rows
