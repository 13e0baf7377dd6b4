"""What steps take: wall time, of it the time in which the loader was waited for, and tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Spent", "Timer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What some steps took.

    Attributes
    ----------
    seconds, waited
        Wall time, and how much of it the loader was waited for.
    tokens
        Of all processes.
    """

    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            seconds=self.seconds - other.seconds,
            waited=self.waited - other.waited,
            tokens=self.tokens - other.tokens,
        )

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time in which the loader was waited for."""
        return self.waited / self.seconds if self.seconds else 0.0


class Timer:
    """Adds up steps: :meth:`begin`, :meth:`loaded`, :meth:`end` each. What is between two steps does not count."""

    def __init__(self) -> None:
        self.whole = Spent()
        self._last = Spent()
        self._begun = self._loaded = 0.0

    def begin(self) -> None:
        """Begin a step by waiting for the loader."""
        self._begun = self._loaded = time.monotonic()

    def loaded(self) -> None:
        """Note that the batches are there."""
        self._loaded = time.monotonic()

    def end(self, tokens: int) -> None:
        """End a step of so many tokens."""
        now = time.monotonic()
        self.whole = Spent(
            seconds=self.whole.seconds + now - self._begun,
            waited=self.whole.waited + self._loaded - self._begun,
            tokens=self.whole.tokens + tokens,
        )

    @property
    def speed(self) -> float:
        """Tokens a second of all steps."""
        return self.whole.speed

    @property
    def wait_share(self) -> float:
        """Share of the time of all steps in which the loader was waited for."""
        return self.whole.wait_share

    def since_last(self) -> Spent:
        """Return what the steps since the last call took."""
        out, self._last = self.whole - self._last, self.whole
        return out
