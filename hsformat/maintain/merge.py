"""Merging: stores of one meaning become one. Segments are copied as they are, under their names.

Nothing is decoded, unless the last capture is to be taken through the final norm. A merge that was stopped is
given again and copies what is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hsformat.maintain.copying import copy_segment
from hsformat.maintain.finalnorm import FinalNormWeights, converted_records
from hsformat.maintain.outcome import RepairReport
from hsformat.maintain.plan import Plan, Step, plan_merge
from hsformat.maintain.repair import repair_store
from hsformat.maintain.rewrite import producer_of, write_segment
from hsformat.problems import ExitCode, Problem, StoreError, exit_code
from hsformat.store.backend import Place
from hsformat.store.create import create
from hsformat.store.metadata import SEGMENTS, ensure_segments

__all__ = ["MergeReport", "merge_stores"]


@dataclass(kw_only=True)
class MergeReport:
    """What a merge did.

    Attributes
    ----------
    copied, converted, present, replaced
        Names of segments in the result: copied, written again after the final norm, there already; and of those left
        out, since another one has replaced them.
    records, nbytes
        Records of the result, and bytes that were copied or found copied.
    problems
        Notes of what differs and is no matter; errors of segments that are damaged and were left out.
    repair
        Of ``dedupe``.
    """

    store: str
    copied: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    records: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    repair: RepairReport | None = None

    @property
    def exit_code(self) -> int:
        """1 if a segment could not be taken over."""
        repaired = ExitCode.CLEAN if self.repair is None else self.repair.exit_code
        return max(exit_code(self.problems), repaired)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {
            **self.__dict__,
            "problems": [p.to_dict() for p in self.problems],
            "repair": None if self.repair is None else self.repair.to_dict(),
        }


def merge_stores(
    inputs: Sequence[Place],
    out: Place,
    *,
    final_norm: str | os.PathLike[str] | None = None,
    dedupe: bool = False,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """Copy the segments of stores of equal compatibility digest into one store, new or of the same meaning.

    Everything is compared before anything is written. Segments that were replaced are left out: a reader of the result
    sees what readers of the inputs see together.

    Parameters
    ----------
    inputs
        At least one store. Of what does not decide meaning, the result has what the first says.
    out
        A path with nothing, or a store that is added to. One merge into a store at a time.
    final_norm
        Folder of the target: the last capture of stores that have it before the final norm is taken through it.
    dedupe
        Keep one record of an id that occurs twice: the result is repaired (:func:`repair_store`) at the end.
    tick
        Called with bytes done, and bytes in all.

    Raises
    ------
    ValueError
        There are no inputs.
    StoreError, ContractMismatch, ForeignFileError
        As :func:`hsformat.maintain.plan.plan_merge`; HS506 (error): a segment cannot be written.
    """
    if not inputs:
        raise ValueError("nothing to merge")
    plan = plan_merge(inputs, out, final_norm=final_norm, dedupe=dedupe)
    report = MergeReport(
        store=plan.out.location,
        present=plan.present,
        replaced=plan.replaced,
        records=plan.records,
        problems=list(plan.problems),
    )
    if plan.new:
        create(out, plan.contract).close()
    if plan.steps:
        ensure_segments(plan.out)
    total = sum(step.commit.nbytes for step in plan.steps)

    def count(nbytes: int) -> None:
        report.nbytes += nbytes
        tick(report.nbytes, total)

    for step in plan.steps:
        _take(plan, step, report, count)
    if dedupe:
        report.repair = repair_store(out, dedupe=True, tick=tick)
        report.records = report.repair.records
    return report


def _take(plan: Plan, step: Step, report: MergeReport, count: Callable[[int], None]) -> None:
    """Take one segment over; of one that is damaged nothing is left behind, and the report says so."""
    norm = step.source.norm
    try:
        if norm is None:
            copy_segment(step.source.backend, step.commit, plan.out, count)
            report.copied.append(step.name)
        else:
            _convert(plan, step, norm)
            report.converted.append(step.name)
            count(step.commit.nbytes)
    except StoreError as e:
        if any(p.code == "HS506" for p in e.problems):
            raise
        with contextlib.suppress(OSError):
            plan.out.discard(f"{SEGMENTS}/{step.name}")
        report.problems += e.problems
        report.records -= step.commit.records


def _convert(plan: Plan, step: Step, norm: FinalNormWeights) -> None:
    one, commit = step.source, step.commit
    with contextlib.suppress(OSError):
        plan.out.discard(f"{SEGMENTS}/{step.name}")  # of a merge that was stopped
    details = {
        "segment": commit.name,
        "basis_digest": one.contract.target.basis_digest,
        "final_norm": one.contract.target.final_norm.model_dump(mode="json"),
    }
    write_segment(
        plan.out,
        plan.contract,
        converted_records(one.backend, one.contract, commit, plan.contract, norm),
        name=step.name,
        producer=lambda: producer_of("apply_final_norm", details, commit.producer),
        replaces=[one.name_of(old) for old in commit.replaces],
    )
