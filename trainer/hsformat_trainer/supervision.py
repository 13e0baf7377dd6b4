"""Whether a run would train anything at all: asked before any weight is loaded. Brings no torch; reads no states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hsformat.align import MaskRule, supervised
from hsformat.problems import Problem, Severity, problem
from hsformat_trainer.admitted import Source

__all__ = ["nothing_supervised"]

_SPANS = "assistant spans of at least two tokens"


def nothing_supervised(sources: Sequence[Source], rule: MaskRule) -> list[Problem]:
    """Return HS103 if no row of any training record carries loss, and a warning if none of a held-out record counts.

    Records are read up to the first that does, which in sound data is one of the first. A mask that gives step 0 of
    training-time test no row gives none to a later step. Evaluation counts what an engine drafts, whatever the rule.
    """
    fix = "check the masks (hsformat extract --dry-run shows them) and extract again"
    out = []
    if count := _unsupervised(((s, s.train) for s in sources), rule):
        got = f"{count} training record(s), and no row of them carries loss (--mask-rule {rule})"
        expected = _SPANS if rule == "serving" else "rows that carry loss"
        out.append(problem("HS103", where="stores", got=got, expected=expected, fix=fix))
    if count := _unsupervised(((s, s.held_out) for s in sources), "serving"):
        got = f"{count} held-out record(s), and an engine would draft nothing in them: nothing can be evaluated"
        where, severity = "held-out records", Severity.WARNING
        out.append(problem("HS103", where=where, got=got, expected=_SPANS, fix=fix, severity=severity))
    return out


def _unsupervised(parts: Iterable[tuple[Source, npt.NDArray[np.int64]]], rule: MaskRule) -> int:
    """Return the number of records if no row of any carries loss, otherwise 0; of none at all others have told."""
    count = 0
    for s, rows in parts:
        for row in rows:
            record = s.source.read(int(row), captures=())
            if supervised(record.loss_mask, 0, rule=rule).any():
                return 0
            count += 1
    return count
