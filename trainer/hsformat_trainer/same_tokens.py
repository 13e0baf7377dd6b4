"""Held-out records whose tokens are trained on under another id. Brings no torch; reads no states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hsformat.digests import digest_bytes
from hsformat.problems import Problem, Severity, problem
from hsformat_trainer.admitted import Source

__all__ = ["MOST_READ", "same_tokens"]

MOST_READ = 20_000
"""Records that are read to find out, at most: 3 s at 0.15 ms for each of 300 tokens (measured on a local disk)."""

_SHOWN = 5


def same_tokens(parts: Sequence[Source], *, most_read: int = MOST_READ) -> list[Problem]:
    """Return HS107 (warning) for held-out records that have the ``input_ids`` of a record that is trained on.

    Only records of equal length are read. If these are more than ``most_read``, none is, and HS107 (note) says so.
    """
    train, held_out = (_together(parts, held_out=h) for h in (False, True))
    common = np.intersect1d(train, held_out)
    reads = int(np.isin(train, common).sum() + np.isin(held_out, common).sum())
    if reads > most_read:
        got, expected = f"compared by id alone: {reads:,} records have a length in common", f"at most {most_read:,}"
        fix = "look for equal texts under other ids where the data is made"
        where = "held-out records"
        return [problem("HS107", where=where, got=got, expected=expected, fix=fix, severity=Severity.NOTE)]
    trained = dict(_digests(parts, common, held_out=False))
    both = [(i, trained[tokens]) for tokens, i in _digests(parts, common, held_out=True) if tokens in trained]
    if not both:
        return []
    shown = ", ".join(f"{a!r} has those of {b!r}" for a, b in both[:_SHOWN]) + (", ..." if len(both) > _SHOWN else "")
    got = f"{len(both)} record(s) with the input_ids of a record that is trained on: {shown}"
    expected = "texts that are not trained on"
    fix = "leave them out of one of the two; the acceptance of a text that was trained on is too high"
    return [problem("HS107", where="held-out records", got=got, expected=expected, fix=fix, severity=Severity.WARNING)]


def _together(parts: Sequence[Source], *, held_out: bool) -> npt.NDArray[np.int64]:
    """Return T of all records that are held out, or trained on."""
    found = [s.held_out_tokens if held_out else s.train_tokens for s in parts]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _digests(parts: Sequence[Source], lengths: npt.NDArray[np.int64], *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield the digest of its tokens and the id of each record that has one of some lengths."""
    for s in parts:
        rows, tokens = (s.held_out, s.held_out_tokens) if held_out else (s.train, s.train_tokens)
        for row in rows[np.isin(tokens, lengths)].tolist():
            record = s.source.read(row, captures=())
            yield digest_bytes([record.input_ids.astype("<i8").tobytes()]), record.id
