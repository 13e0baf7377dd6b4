"""What a probe asks of an engine: one draft folder a trial. Pure data.

A trial states its ids wherever an engine looks for them, so that it asks what a list means, not where it is read.
N is odd in one target and even in another, so that ``N//2`` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DEPTHS", "Trial", "capture_trials", "id_keys", "no_ids"]

DEPTHS = (9, 12)
"""Numbers of layers of the targets: 2, N//2 and N-3 differ in both, and move differently from one to the other."""

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One draft folder that is served once.

    Attributes
    ----------
    name
        Of its folder.
    num_layers
        N of the target.
    ids
        The layer ids of the draft's config; empty: it names none.
    slots
        How many captures the draft's ``fc`` takes.
    keys
        What the ids are written as, merged into the draft's config.
    instead_of
        Name of the trial in whose place this one is run, if that one shows nothing; None: it is always run.
    """

    name: str
    num_layers: int
    ids: tuple[int, ...]
    slots: int
    keys: Mapping[str, Any]
    instead_of: str | None = None

    @property
    def asked(self) -> str:
        """The question in words, as a profile records it."""
        what = f"ids {list(self.ids)}" if self.ids else "no ids"
        return f"{what}, {self.slots} slots, {self.num_layers} layers"


def id_keys(ids: Sequence[int], slots: int) -> dict[str, Any]:
    """Return config keys that name ``ids`` in every place where an engine is known to look."""
    return {_IDS: list(ids), "num_aux_hidden_states": slots, "eagle_config": {_IDS: list(ids)}}


def capture_trials() -> tuple[Trial, ...]:
    """Return the trials that tell all members of a :class:`~hsformat.engines.rows.CaptureRow` apart.

    First ids that every engine can capture, in another order than by depth; all ids but the last two at once; a list
    that begins with 1 and names a depth twice, for an ``fc`` of as many slots as depths, then as ids; the last two ids,
    each among ids that are harmless, since a depth that an engine cannot capture may kill it; no ids.
    """
    n = DEPTHS[0]
    lists: list[tuple[str, tuple[int, ...], int, str | None]] = [
        ("other-order", (6, 1, 3), 3, None),
        ("every-id", tuple(range(n - 1)), n - 1, None),
        ("every-id-but-0", tuple(range(1, n - 1)), n - 2, "every-id"),
        ("one-first-and-one-twice", (1, 4, 4, 6), 3, None),
        ("one-first-and-one-twice-4", (1, 4, 4, 6), 4, "one-first-and-one-twice"),
        ("last-but-one", (2, 5, n - 1), 3, None),
        ("last", (2, 5, n), 3, None),
    ]
    asked = [
        Trial(name=name, num_layers=n, ids=ids, slots=k, keys=id_keys(ids, k), instead_of=other)
        for name, ids, k, other in lists
    ]
    return (*asked, *(no_ids(n) for n in DEPTHS))


def no_ids(num_layers: int) -> Trial:
    """Return the trial of a draft that names no ids: the engine's default, which has three in every engine known."""
    return Trial(name=f"no-ids-{num_layers}", num_layers=num_layers, ids=(), slots=3, keys={})
