"""What a validation found, and how far it looked. May import ``problems``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hsformat.problems import Problem, Severity

__all__ = ["Level", "Report", "Tick"]

Tick = Callable[[int, int], None]
"""Called with bytes read and bytes to read in all."""


class Level(StrEnum):
    """How far to look.

    ``metadata`` reads the JSON and the files' sizes; ``sample`` also some records of some segments, with the checksums
    of what it reads, and the recorded norms of up to 256 segments; ``full`` every checksum, every array and every
    number.
    """

    METADATA = "metadata"
    SAMPLE = "sample"
    FULL = "full"


@dataclass(kw_only=True)
class Report:
    """Problems, and counts of what was looked at.

    Attributes
    ----------
    records, segments
        Committed and readable, in the store.
    records_checked
        Whose states were read.
    bytes_checked
        Bytes of files whose checksum was verified (level ``full``), or of arrays read.
    states_compared
        Rows of states that were compared with the target's embedding or head; None: no target was given.
    """

    store: str
    level: Level
    problems: list[Problem] = field(default_factory=list)
    records: int = 0
    segments: int = 0
    records_checked: int = 0
    bytes_checked: int = 0
    states_compared: int | None = None

    def count(self, severity: Severity) -> int:
        """Return the number of problems of a severity."""
        return sum(p.severity is severity for p in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {
            "store": self.store,
            "level": self.level.value,
            "valid": not self.count(Severity.ERROR),
            "records": self.records,
            "segments": self.segments,
            "records_checked": self.records_checked,
            "bytes_checked": self.bytes_checked,
            "states_compared": self.states_compared,
            "counts": {s.value: self.count(s) for s in Severity},
            "problems": [p.to_dict() for p in self.problems],
        }
