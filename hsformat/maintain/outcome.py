"""What a repair found and did, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hsformat.problems import ExitCode, Problem, exit_code

__all__ = ["RepairReport", "SegmentRepair"]


@dataclass(frozen=True, kw_only=True)
class SegmentRepair:
    """What became of one segment, or would of a dry run.

    Attributes
    ----------
    action
        ``replaced`` by another segment, ``ended``: its ``zarr.json`` was set ``aside``, or ``superseded``: another
        process has replaced it meanwhile, and nothing was done.
    successor
        The segment that replaces it; None: none, or a dry run.
    kept
        Records that were kept.
    lost
        Ids that are not in the store any more. Of a damaged commit record: those that its arrays tell.
    duplicates
        Ids that an older segment has, too, and keeps.
    problems
        The damage, and of each lost record why it cannot be kept.
    aside
        Key in the store of the copy of its ``zarr.json``, if it was ended.
    """

    segment: str
    action: Literal["replaced", "ended", "superseded"]
    successor: str | None
    kept: int
    lost: tuple[str, ...]
    duplicates: tuple[str, ...]
    problems: tuple[Problem, ...]
    aside: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {**self.__dict__, "problems": [p.to_dict() for p in self.problems]}


@dataclass(kw_only=True)
class RepairReport:
    """What a repair found and did.

    Attributes
    ----------
    segments
        One entry a segment that was not left as it was.
    problems
        What is still wrong, or worth knowing, after the repair.
    records
        Records in the store afterwards (in a dry run: that would be).
    """

    store: str
    dry_run: bool
    segments: list[SegmentRepair] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    records: int = 0

    @property
    def lost(self) -> list[str]:
        """Ids of all records that are gone."""
        return [i for s in self.segments for i in s.lost]

    @property
    def exit_code(self) -> int:
        """0: the store is whole and nothing was lost; 1: something was, is still wrong, or (dry run) would be done."""
        left = bool(self.segments) if self.dry_run else self._unknown_loss()
        return max(exit_code(self.problems), ExitCode.PROBLEMS if self.lost or left else ExitCode.CLEAN)

    def _unknown_loss(self) -> bool:
        """Whether a segment ended of which nobody knows how many records it had."""
        return any(s.action == "ended" and not s.duplicates for s in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {
            "store": self.store,
            "dry_run": self.dry_run,
            "records": self.records,
            "lost": self.lost,
            "segments": [s.to_dict() for s in self.segments],
            "problems": [p.to_dict() for p in self.problems],
        }
