"""Whether the disk holds what a run will write, asked before the target is loaded (HS506).

The free space of a file system is what it says of itself, and how far states can be compressed is not known before they
are there. So a run is refused only for what its samples need at least, and warned for what they need likely.
May import ``store``, ``record`` and ``problems``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator

from hsformat.problems import Problem, Severity, problem
from hsformat.record import TokenSample
from hsformat.store.arrays import Dimensions
from hsformat.store.backend import Place
from hsformat.store.places import backend_for, free_bytes
from hsformat.store.size import least_bytes, likely_bytes

__all__ = ["COUNT_SECONDS", "Needs", "check_space", "space_problems"]

COUNT_SECONDS = 30.0
"""Samples are counted for so long: a few million tokens, the states of which are hundreds of gigabytes."""

_BLOCK = 16
"""Tokens that are compared at once to find samples that begin alike."""

_REMEMBERED = 1_000_000
"""Beginnings that are known at once, about 100 MB; what is further apart is not compressed together anyway."""


class Needs:
    """What samples need, added up one by one.

    States follow from the tokens up to them. So ``compact`` may store those of a shared beginning (a system prompt, the
    turns before the last) once where they are close together; at least those of all other tokens are needed.

    Attributes
    ----------
    samples, tokens
        Their number, and that of their own tokens.
    """

    def __init__(self, dimensions: Dimensions, *, max_new_tokens: int) -> None:
        self._dimensions, self._new = dimensions, max_new_tokens
        self._beginnings: set[int] = set()
        self._different = 0
        self.samples = self.tokens = 0

    def add(self, sample: TokenSample) -> None:
        """Count a sample."""
        self.samples += 1
        self.tokens += len(sample)
        if self._dimensions.codec == "fast":
            self._different += len(sample)
            return
        beginning = 0
        for start in range(0, len(sample), _BLOCK):
            block = sample.input_ids[start : start + _BLOCK]
            beginning = hash((beginning, block.tobytes()))
            if beginning not in self._beginnings:
                if len(self._beginnings) >= _REMEMBERED:
                    self._beginnings.clear()
                self._beginnings.add(beginning)
                self._different += len(block)

    def add_numbers(self, *, samples: int, tokens: int) -> None:
        """Count samples of which nothing else is known."""
        self.samples += samples
        self.tokens += tokens
        self._different += tokens

    @property
    def least(self) -> int:
        """Bytes at least: an answer that is to be written has one token, which may have no state."""
        answers = self.samples if self._new else 0
        return least_bytes(self._dimensions, tokens=self.tokens + answers, states=self._different)

    @property
    def likely(self) -> int:
        """Bytes as estimated: an answer that is to be written is as long as it may be."""
        tokens = self.tokens + self.samples * self._new
        return likely_bytes(self._dimensions, tokens=tokens, states=tokens)

    @property
    def generated(self) -> bool:
        """Whether the target writes answers."""
        return bool(self._new)

    @property
    def codec(self) -> str:
        """``compact`` or ``fast``."""
        return self._dimensions.codec


def check_space(
    out: Place,
    dimensions: Dimensions,
    samples: Iterable[TokenSample],
    *,
    known: Container[str],
    max_new_tokens: int,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Problem]:
    """Compare the free space with what samples need; see :func:`space_problems`.

    Samples are counted for at most :data:`COUNT_SECONDS`, also where it is certain before that they do not fit: what is
    asked for is what all of them need. A note says how many were counted, if not all. Nothing is compared where samples
    can be read only once, or where the place does not say how much is free: no local folder, or a file system that
    keeps no count.

    Parameters
    ----------
    known
        Ids that are stored already.
    max_new_tokens
        Bound of each answer that the target writes; 0: it writes none.
    """
    free = None if isinstance(samples, Iterator) else free_bytes(out)
    if free is None:
        return []
    needs, seen, location = Needs(dimensions, max_new_tokens=max_new_tokens), set[str](), backend_for(out).location
    until = time.monotonic() + COUNT_SECONDS
    for sample in samples:
        if stopping():
            return []
        if time.monotonic() > until:
            return [*space_problems(location, free, needs), _not_all(location, needs)]
        if sample.id in known or sample.id in seen:
            continue
        seen.add(sample.id)
        needs.add(sample)
    return space_problems(location, free, needs)


def space_problems(location: str, free: int, needs: Needs) -> list[Problem]:
    """Return HS506 as an error where samples cannot fit, as a warning where they likely do not."""
    if needs.likely <= free:
        return []
    error = needs.least > free
    smaller = "" if needs.codec == "compact" else ", use --codec compact"
    return [
        problem(
            "HS506",
            where=location,
            severity=Severity.ERROR if error else Severity.WARNING,
            got=f"{free:,} bytes free",
            expected=f"at least {needs.least:,} bytes for {needs.samples:,} sample(s) of {needs.tokens:,} tokens"
            if error
            else f"{'up to' if needs.generated else 'about'} {needs.likely:,} bytes for {needs.samples:,} sample(s) of "
            f"{needs.tokens:,} tokens",
            fix=f"write to another disk{smaller}, or store fewer captures; hsformat estimate says what each takes. "
            + (
                "Where the file system compresses or grows: --ignore-disk-space"
                if error
                else "If the disk becomes full, what is committed stays, and the same command goes on"
            ),
        )
    ]


def _not_all(location: str, needs: Needs) -> Problem:
    return problem(
        "HS506",
        where=location,
        severity=Severity.NOTE,
        got=f"{needs.samples:,} missing samples of {needs.tokens:,} tokens counted in {COUNT_SECONDS:.0f} s",
        expected="free space for all samples",
        fix="nothing; hsformat estimate counts all of them",
    )
