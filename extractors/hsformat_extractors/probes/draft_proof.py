"""Whether an engine makes of draft folders what a row says: hsformat's reading of each against what was computed.

A row is not searched for but refuted or not: that of the newest version in the tables is the claim. It is proved if the
engine computed, for every folder, the logits that follow from hsformat's reading of it (``draft_math``), and failed on
every folder on which it must fail. Pure: no engine and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from packaging.version import Version
from safetensors.numpy import load_file

from hsformat.engines.drafts import read_draft
from hsformat.engines.inspection import Rules, inspect_draft
from hsformat.engines.options import read_options
from hsformat.engines.profile import Measurement
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.engines.table import engine_of
from hsformat.engines.targets import TargetFacts
from hsformat.problems import HsError, Problem, ResolveError, problem
from hsformat_extractors.probes import tiny
from hsformat_extractors.probes.analysis import row_error
from hsformat_extractors.probes.draft_math import Reading, Target, Unservable, first_two_steps
from hsformat_extractors.probes.draft_trials import DraftTrial

__all__ = ["ARCHITECTURE", "ServedDraft", "claimed_row", "prove_drafts"]

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""The class name that the drafts' configs state."""


@dataclass(frozen=True, kw_only=True)
class ServedDraft:
    """A draft folder that was served.

    Attributes
    ----------
    trial
        What was asked.
    folder
        Of the draft.
    logits
        All logits that the engine computed, [n, V] each; empty: it did not come so far.
    outcome
        What went wrong, in words.
    """

    trial: DraftTrial
    folder: Path
    logits: Sequence[npt.NDArray[Any]]
    outcome: str | None


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """What came of a folder by one row.

    ``error`` is that of the logits that follow from the row (None: none do), ``same`` whether the engine computed them,
    ``agrees`` whether it was to.
    """

    served: ServedDraft
    depths: tuple[int, ...]
    error: float | None
    same: bool
    agrees: bool


def claimed_row(engine: str) -> DraftRow:
    """Return what the tables say of the newest version of an engine that they know.

    Raises
    ------
    ResolveError
        HS410: they have no engine of this name that serves drafts.
    """
    rows = [r for r in engine_of(engine).drafts if r.layout == "plain" and ARCHITECTURE in r.architectures]
    if not rows:
        raise ResolveError(
            problem("HS410", where=f"probe of {engine}: drafts", got="no row that could be proved",
                    expected=f"a row for {ARCHITECTURE}", fix="probe without drafts")
        )  # fmt: skip
    return max(rows, key=lambda r: max(Version(v) for v in r.versions))


def prove_drafts(
    served: Sequence[ServedDraft],
    claim: DraftRow,
    captures: CaptureRow,
    *,
    engine: str,
    facts: TargetFacts,
    target: Target,
    tolerance: float,
    source: str,
) -> tuple[DraftRow, tuple[Measurement, ...]]:
    """Return the row that was proved, and the figures.

    Of several parts of an engine that look for ids (``DraftRow.readers``) the one that ran is kept.

    Raises
    ------
    HsError
        HS410: a folder was served in another way than the row says; all that differ are listed.
    """
    best: list[_Compared] = []
    for reader in claim.readers:
        facts_of_row = {
            "readers": (reader,), "architectures": (ARCHITECTURE,), "versions": captures.versions,
            "evidence": "proved", "source": source,
        }  # fmt: skip
        row = DraftRow.model_validate({**dict(claim), **facts_of_row})
        found = list(_compare(served, row, captures, engine, facts, target, tolerance))
        if all(c.agrees for c in found):
            row = row.model_copy(update={"loading": None})  # what was not tried is not proved
            return row, tuple(_measurement(c) for c in found)
        if not best or sum(c.agrees for c in found) > sum(c.agrees for c in best):
            best = found
    raise HsError([_differs(c, engine) for c in best if not c.agrees])


def _compare(
    served: Sequence[ServedDraft],
    row: DraftRow,
    captures: CaptureRow,
    engine: str,
    facts: TargetFacts,
    target: Target,
    tolerance: float,
) -> Iterator[_Compared]:
    rules = Rules(
        engine=engine, version=row.versions[0], title=engine, captures=captures, draft=row, aux=None, evidence="proved"
    )
    first = int((target.head @ target.states[f"d{facts.num_layers}n"][-1]).argmax())
    for one in served:
        error: float | None = None
        depths: tuple[int, ...] = ()
        reading = _read(one.folder, rules, facts)
        if reading is not None:
            depths = tuple(a.depth for a in reading.layout.aux)
            try:
                wanted = first_two_steps(
                    reading, load_file(one.folder / "model.safetensors"), target, tiny.PROMPT, first
                )
                error = max(_nearest(one.logits, logits_V) for logits_V in wanted)
            except Unservable:
                pass  # there is nothing that could have been computed
        same = error is not None and error <= tolerance
        yield _Compared(served=one, depths=depths, error=error, same=same, agrees=_agrees(one, row, same=same))


def _agrees(served: ServedDraft, row: DraftRow, *, same: bool) -> bool:
    """Return whether the engine did what a row says: computed the logits that follow from it, none, or failed."""
    if served.trial.works(row):
        return same
    if served.trial.silent(row):
        drafted = any(x.shape[-1] == tiny.DRAFT_VOCAB for x in served.logits)
        return served.outcome is None and len(served.logits) > 0 and not drafted
    failed = served.outcome is not None or not served.logits
    return not same and (failed or not served.trial.loud)


def _read(folder: Path, rules: Rules, facts: TargetFacts) -> Reading | None:
    """Return what hsformat reads in a folder; what it finds wrong with it does not matter here."""
    draft, _ = read_draft(folder)
    if draft is None:
        return None
    layout, _ = inspect_draft(draft, facts, rules)
    if layout is None:
        return None
    return Reading(draft=draft, row=rules.draft, layout=layout, options=read_options(draft, rules.draft, "", []))


def _nearest(logits: Sequence[npt.NDArray[Any]], wanted_V: npt.NDArray[Any]) -> float:
    """Return the smallest relative error of any row of logits that the engine computed."""
    rows = [row_error(row[None], wanted_V[None]) for x in logits if x.shape[-1] == len(wanted_V) for row in x]
    return min(rows, default=float("inf"))


def _measurement(c: _Compared) -> Measurement:
    trial = c.served.trial
    outcome = "served as hsformat reads it" if c.same else "served otherwise, as hsformat says of it"
    if c.error == float("inf"):
        outcome = "nothing was drafted"
    return Measurement(
        asked=f"draft: {trial.asked}",
        depths=c.depths if c.same else (),
        relative_error=c.error if c.same else None,
        runner_up=None,
        outcome=c.served.outcome or outcome,
    )


def _differs(c: _Compared, engine: str) -> Problem:
    trial, error = c.served.trial, "nothing to compare" if c.error is None else f"relative error {c.error:.2g}"
    got = f"{error}; {c.served.outcome or 'it was served'}"
    return problem(
        "HS410",
        where=f"probe of {engine}: draft with {trial.asked}",
        got=got,
        expected=f"what the newest row of the tables says ({', '.join(trial.facts)})",
        fix="this version does something else: report it; describe the layout yourself (--engine custom:layout.json)",
    )
