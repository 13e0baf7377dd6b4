"""What preparation did with every row: counts by reason, and the problems, bounded in memory.

This module may import ``problems``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hsformat.problems import CODES, Problem, problem
from hsformat.problems import exit_code as exit_code_of

__all__ = ["Summary"]

KEPT = 100
"""So many problems, and names of ignored keys, are kept; all are counted."""

_HINTS = {
    "no-assistant-turn": "give conversations with an assistant turn, or let the target answer (--generate N)",
    "no-user-turn": "give prompts: a user turn for the target to answer",
    "no-supervision": "the masks given are all 0, or the template's generation tags mark nothing here: repair them, "
    "or remove them to have turns found by their boundaries",
    "no-supervision-after-truncation": "raise the maximum length: it cuts before the first assistant token",
    "prompt-too-long": "raise the maximum length or lower the number of new tokens",
}


@dataclass(kw_only=True)
class Summary:
    """Counts of one pass over a file; ``rows + more_turns == samples + sum(dropped.values())``.

    Attributes
    ----------
    for_generation
        Whether the samples are prompts.
    rows, samples
        Rows read, blank lines aside; samples handed out.
    more_turns
        Turns of conversations beyond one a row, where each turn becomes a sample.
    tokens, supervised
        Of the samples.
    truncated
        Samples that were cut to the maximum length.
    answers_replaced
        Samples whose given last answer was taken away, for the target to write it.
    dropped
        Rows, or turns, without a sample by reason: ``duplicate``, ``no-assistant-turn``, ..., or the name of the first
        problem.
    ignored_keys
        Rows by key that means nothing here.
    problems, problem_counts
        The first 100 problems; the number of all by code.
    """

    source: str
    for_generation: bool = False
    rows: int = 0
    samples: int = 0
    more_turns: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    answers_replaced: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ignored_keys: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    problem_counts: Counter[str] = field(default_factory=Counter)

    def reject(self, problems: list[Problem]) -> None:
        """Count a row as dropped for its problems, of which there is at least one."""
        self.dropped[problems[0].name] += 1
        self.problem_counts.update(p.code for p in problems)
        self.problems += problems[: max(0, KEPT - len(self.problems))]

    def ignore(self, keys: Iterable[str]) -> None:
        """Count keys of a row that mean nothing here."""
        for key in keys:
            if key in self.ignored_keys or len(self.ignored_keys) < KEPT:
                self.ignored_keys[key] += 1

    @property
    def rows_dropped(self) -> int:
        """Rows that give no record of their own: those dropped, less the turns that rows gave beyond one."""
        return self.dropped.total() - self.more_turns

    @property
    def all_dropped(self) -> bool:
        """Whether rows were read and none of them gave a sample: exit code 1."""
        return self.rows > 0 and self.samples == 0

    @property
    def all_problems(self) -> list[Problem]:
        """The problems kept and, where every row was dropped, the one that says so (HS103)."""
        if not self.all_dropped:
            return list(self.problems)
        hints = [_HINTS[reason] for reason, _ in self.dropped.most_common() if reason in _HINTS]
        return [
            *self.problems,
            problem("HS103", where=self.source, expected="at least one sample to train on",
                    got=f"{self.dropped.total()} of {self.rows + self.more_turns} rows dropped: "
                        f"{_listed(self.dropped)}",
                    fix="; ".join(hints) or "repair the rows: see the problems above"),
        ]  # fmt: skip

    @property
    def exit_code(self) -> int:
        """1 after a problem of severity error or without a sample, otherwise 0."""
        return exit_code_of(self.all_problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON-able data; problems by code alone."""
        return {
            "source": self.source,
            "rows": self.rows,
            "samples": self.samples,
            "more_turns": self.more_turns,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "truncated": self.truncated,
            "answers_replaced": self.answers_replaced,
            "dropped": dict(self.dropped),
            "ignored_keys": dict(self.ignored_keys),
            "problem_counts": dict(self.problem_counts),
        }

    def lines(self) -> list[str]:
        """Return the counts as lines of text; what did not happen is left out."""
        more = f" with {self.more_turns:,} turns beyond one a row" if self.more_turns else ""
        share = f"{self.supervised / self.tokens:.1%}" if self.tokens else "none"
        out = [
            f"prepare: {self.samples:,} samples of {self.rows:,} rows{more}: {self.source}",
            f"prepare: {self.tokens:,} tokens of prompts"
            if self.for_generation
            else f"prepare: {self.tokens:,} tokens, {self.supervised:,} supervised ({share})",
        ]
        if self.truncated:
            out.append(f"prepare: {self.truncated:,} truncated to the maximum length")
        if self.answers_replaced:
            out.append(f"prepare: {self.answers_replaced:,} with the given answer replaced (answer-replaced)")
        if self.dropped:
            out.append(f"prepare: {self.dropped.total():,} dropped: {_listed(self.dropped)}")
        if self.ignored_keys:
            out.append(f"prepare: keys ignored: {_listed(self.ignored_keys)}")
        if self.problem_counts:
            named = Counter({f"{c} {CODES[c].name}": n for c, n in self.problem_counts.items()})
            out.append(
                f"prepare: {self.problem_counts.total():,} problems ({len(self.problems)} kept): {_listed(named)}"
            )
        return out


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.most_common())
