"""Whether a run would train anything at all: asked before any weight is loaded. Brings no torch; reads no states."""

from __future__ import annotations

from collections.abc import Sequence

from hsformat.align import MaskRule, supervised
from hsformat.problems import Problem, problem
from hsformat_trainer.admitted import Source

__all__ = ["nothing_supervised"]


def nothing_supervised(sources: Sequence[Source], rule: MaskRule) -> list[Problem]:
    """Return HS103 if no row of any training record carries loss.

    Records are read up to the first that does, which in sound data is one of the first. A mask that gives step 0 of
    training-time test no row gives none to a later step.
    """
    count = 0
    for s in sources:
        for row in s.train:
            record = s.source.read(int(row), captures=())
            if supervised(record.loss_mask, 0, rule=rule).any():
                return []
            count += 1
    if not count:
        return []  # HS102 has said it
    got = f"{count} training record(s), and no row of them carries loss (--mask-rule {rule})"
    expected = "assistant spans of at least two tokens" if rule == "serving" else "rows that carry loss"
    fix = "check the masks (hsformat validate, hsformat inspect) and extract again"
    return [problem("HS103", where="stores", got=got, expected=expected, fix=fix)]
