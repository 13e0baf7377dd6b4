"""Samples that cannot be run, and answers that are none: what every extractor rejects, in the same words. No torch."""

from __future__ import annotations

from hsformat.checks import token_range_problem
from hsformat.extraction.protocol import Rejected
from hsformat.problems import Problem, problem
from hsformat.record import TokenSample

__all__ = ["no_answer", "no_states", "unfit"]


def unfit(
    sample: TokenSample, *, vocab_size: int, max_tokens: int | None, max_new_tokens: int, limit: str
) -> list[Problem]:
    """Return why a sample cannot be run: no token, ids beyond the vocabulary, more tokens than can be run.

    Parameters
    ----------
    max_tokens
        Of prompt and answer together; None: no limit is known.
    max_new_tokens
        Of the answer; 0: none is written.
    limit
        What sets ``max_tokens``, for the message.
    """
    out: list[Problem] = []
    where, ids = f"record {sample.id!r}: input_ids", sample.input_ids
    if not len(ids):
        out.append(problem("HS102", where=where, got="0 tokens", expected="at least 1", record=sample.id))
    if found := token_range_problem(ids, vocab_size, where=where, record=sample.id):
        out.append(found)
    if max_tokens is not None and len(ids) + max_new_tokens > max_tokens:
        # HS106, not HS101: nothing disagrees in length; a token would stand at a position that the target has not.
        asked = f" and up to {max_new_tokens} new ones" if max_new_tokens else ""
        out.append(problem("HS106", where=where, got=f"{len(ids)} tokens{asked}",
                           expected=f"at most {max_tokens}, {limit}",
                           fix=f"prepare it shorter (--max-length {max(1, max_tokens - max_new_tokens)}), or ask for "
                           "fewer new tokens; nothing is cut here",
                           record=sample.id))  # fmt: skip
    return out


def no_states(sample: TokenSample, got: str, fix: str) -> Rejected:
    """Reject a sample that gave no states: HS102."""
    found = problem("HS102", where=f"record {sample.id!r}", got=f"no states: {got}", expected="one state a token",
                    fix=fix, record=sample.id)  # fmt: skip
    return Rejected(sample=sample, problems=[found])


def no_answer(sample: TokenSample) -> Rejected:
    """Reject a sample to which the target answered with nothing but the end of its turn: HS103."""
    found = problem("HS103", where=f"record {sample.id!r}", got="the target ended its turn at once",
                    expected="an answer of at least one token before the end of the turn",
                    fix="check that the prompt ends where the assistant's turn begins", record=sample.id)  # fmt: skip
    return Rejected(sample=sample, problems=[found])
