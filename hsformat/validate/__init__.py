"""Validation: every rule of docs/spec/1.0.md, checked on what is on the disk.

Nothing that is read is trusted, and everything that is wrong is reported. May import ``store`` and everything below it.
"""

from __future__ import annotations

from typing import Literal

from hsformat.problems import Problem, StoreError, problem
from hsformat.store.backend import Backend, Place, backend_for
from hsformat.store.metadata import load_commit, load_contract, segment_names
from hsformat.validate.report import Level, Report, Tick
from hsformat.validate.segment import SegmentCheck

__all__ = ["Level", "Report", "run", "validate_store"]

SAMPLE_SEGMENTS = 16
SAMPLE_RECORDS = 4
"""Of each segment in the sample."""


def validate_store(
    path: Place, *, level: Level | Literal["metadata", "sample", "full"] = Level.SAMPLE
) -> list[Problem]:
    """Return every problem of a store; an empty list, or notes and warnings alone, mean that it is valid.

    Parameters
    ----------
    level
        ``metadata``: structure, sizes of files, ids. ``sample``: also some records of some segments.
        ``full``: every checksum, every array, every number.

    Notes
    -----
    Nothing is raised for what is wrong with the store: a path that is no store is a problem (HS501), too. States are
    read in blocks, so that memory does not grow with the store.
    """
    try:
        return run(path, level=Level(level)).problems
    except StoreError as e:
        return e.problems


def run(path: Place, *, level: Level, tick: Tick = lambda done, total: None) -> Report:
    """Validate and return the problems with counts of what was looked at.

    Parameters
    ----------
    tick
        Called with bytes read and bytes to read, at levels ``sample`` and ``full``.

    Raises
    ------
    StoreError
        HS501, HS502, HS504: there is no root that could be read, so that nothing can be checked.
    """
    backend = backend_for(path)
    contract, problems = load_contract(backend)
    report = Report(store=backend.location, level=level, problems=problems)
    checks = []
    owners: dict[str, str] = {}
    for name in segment_names(backend):
        commit, found = load_commit(backend, name)
        report.problems += found
        if commit is None:
            continue
        check = SegmentCheck(backend, contract, commit)
        report.problems += check.structure()
        report.problems += _duplicates(backend, check, owners)
        report.segments += 1
        report.records += commit.records
        checks.append(check)
    if level is not Level.METADATA:
        _content(checks, report, tick)
    return report


def _duplicates(backend: Backend, check: SegmentCheck, owners: dict[str, str]) -> list[Problem]:
    out = []
    for rid in check.commit.ids:
        if rid in owners:
            place = f"{backend.location}/{check.commit.prefix}: record {rid!r}"
            got, expected = f"an id that segment {owners[rid]} has, too", "one record of each id in a store"
            out.append(problem("HS107", where=place, got=got, expected=expected, record=rid))
        owners.setdefault(rid, check.commit.name)
    return out


def _content(checks: list[SegmentCheck], report: Report, tick: Tick) -> None:
    """Full: all records of all segments. Sample: evenly spaced ones, both ends among them."""
    full = report.level is Level.FULL
    picked = checks if full else [checks[i] for i in _spread(len(checks), SAMPLE_SEGMENTS)]
    total = sum(c.commit.nbytes for c in picked)
    for check in picked:
        rows = range(check.commit.records) if full else _spread(check.commit.records, SAMPLE_RECORDS)
        if full:
            report.problems += check.checksums()
        report.problems += check.arrays(rows)
        report.records_checked += len(rows)
        report.bytes_checked += check.commit.nbytes if full else 0
        tick(report.bytes_checked, total)


def _spread(n: int, k: int) -> list[int]:
    """Return up to k different indexes of n, evenly spaced."""
    return sorted({round(i * (n - 1) / max(1, min(n, k) - 1)) for i in range(min(n, k))})
