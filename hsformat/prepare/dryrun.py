"""What preparation would hand to an extractor: lengths, shares and the first samples; no engine, no store.

This module may import ``pipeline`` and ``summary``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from hsformat.prepare.pipeline import Preparation
from hsformat.prepare.summary import Summary
from hsformat.prepare.tokenizer import ChatTokenizer
from hsformat.record import TokenSample

__all__ = ["DryRun", "Shown", "dry_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One sample as text.

    Attributes
    ----------
    id, tokens
        Its id and number of tokens.
    runs
        The text of each run of tokens of one mask value, and whether it is supervised.
    """

    id: str
    tokens: int
    runs: list[tuple[str, bool]]


@dataclass(kw_only=True)
class DryRun:
    """The result; four bytes a sample are kept.

    Attributes
    ----------
    summary
        Counts, drops by reason, problems.
    lengths
        Tokens of each sample.
    shown
        The first samples.
    """

    summary: Summary
    lengths: array[int] = field(default_factory=lambda: array("I"))
    shown: list[Shown] = field(default_factory=list)

    def statistics(self) -> dict[str, Any] | None:
        """Return min, median, p95, max and mean of the lengths, and a histogram over powers of two; None: no sample.

        The histogram's ``edges`` are one more than its ``counts``; a count is of edge <= length < next edge.
        """
        if not self.lengths:
            return None
        lengths = np.frombuffer(self.lengths, dtype=np.uint32)
        first, last = int(lengths.min()).bit_length() - 1, int(lengths.max()).bit_length()
        edges = [1 << k for k in range(first, last + 1)]
        counts = np.histogram(lengths, bins=[*edges[:-1], edges[-1] - 0.5])[0]
        return {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
            "mean": round(float(lengths.mean()), 1),
            "histogram": {"edges": edges, "counts": counts.tolist()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        share = self.summary.supervised / self.summary.tokens if self.summary.tokens else None
        return {
            "dry_run": True,
            "preparation": self.summary.to_dict(),
            "supervised_share": share,
            "lengths": self.statistics(),
            "samples": [
                {"id": s.id, "tokens": s.tokens, "runs": [{"text": t, "supervised": m} for t, m in s.runs]}
                for s in self.shown
            ],
            "problems": [p.to_dict() for p in self.summary.all_problems],
            "exit_code": int(self.summary.exit_code),
        }


def dry_run(
    preparation: Preparation,
    tokenizer: ChatTokenizer,
    *,
    show: int = 2,
    listener: Callable[[Summary], None] = lambda summary: None,
) -> DryRun:
    """Prepare everything and keep nothing but numbers and the first ``show`` samples.

    Parameters
    ----------
    tokenizer
        The one that ``preparation`` uses, to show samples as text.
    listener
        Called after each sample.
    """
    result = DryRun(summary=preparation.summary)
    for sample in preparation:
        result.summary = preparation.summary
        result.lengths.append(len(sample))
        if len(result.shown) < show:
            result.shown.append(_as_text(sample, tokenizer))
        listener(preparation.summary)
    result.summary = preparation.summary
    return result


def _as_text(sample: TokenSample, tokenizer: ChatTokenizer) -> Shown:
    ids, mask = sample.input_ids.tolist(), sample.loss_mask
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    runs = [(tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False), bool(mask[a])) for a, b in pairwise(edges)]
    return Shown(id=sample.id, tokens=len(ids), runs=runs)
