"""From an engine's list of layer ids to depths and back, by the rule of a row. Pure functions.

>>> from hsformat.engines.table import capture_row
>>> kimi = capture_row("sglang", "0.5.23", "KimiK25ForConditionalGeneration")
>>> depths_of(kimi, [1, 14, 26], 61), depths_of(kimi, [2, 15, 27], 61)
([2, 15, 27], [2, 15, 27])
>>> ids_of(kimi, [2, 15, 27], 61)
[1, 14, 26]
>>> ids_of(kimi, [1, 15, 27], 61) is None
True
"""

from __future__ import annotations

from collections.abc import Sequence

from hsformat.engines.rows import CaptureRow, parse_depth

__all__ = ["capturable", "default_depths", "depths_of", "fed", "ids_of"]


def depths_of(row: CaptureRow, ids: Sequence[int], num_layers: int) -> list[int]:
    """Return the depth that each id stands for, in the order of the ids; whether it can be captured is not asked."""
    match row.rule:
        case "shift_if_first_is_one":
            applies = list(ids[:1]) == [1]
        case "shift_unless_max_is_n":
            applies = max(ids, default=0) != num_layers
        case _:
            applies = True
    shift = row.shift if applies else 0
    return [i + shift for i in ids]


def ids_of(row: CaptureRow, depths: Sequence[int], num_layers: int) -> list[int] | None:
    """Return the ids that make the engine feed exactly these depths in this order; None: there are none."""
    if not depths or fed(row, depths) != list(depths) or not all(capturable(row, d, num_layers) for d in depths):
        return None
    for shift in (row.shift, 0):
        ids = [d - shift for d in depths]
        if min(ids) >= 0 and depths_of(row, ids, num_layers) == list(depths):
            return ids
    return None


def fed(row: CaptureRow, depths: Sequence[int]) -> list[int]:
    """Return what the draft is fed when these depths are asked for: in the engine's order, and as often as it does."""
    if row.order == "as_given":
        return list(depths) if row.duplicates == "repeated" else list(dict.fromkeys(depths))
    return sorted(depths) if row.duplicates == "repeated" else sorted(set(depths))


def capturable(row: CaptureRow, depth: int, num_layers: int) -> bool:
    """Return whether the engine captures a depth."""
    return row.lowest <= depth <= parse_depth(row.deepest, num_layers)


def default_depths(row: CaptureRow, num_layers: int) -> list[int]:
    """Return the depths that the engine fills in when a draft names none; empty: it refuses.

    Targets of few layers give depths that coincide or that do not exist; they are returned as they come out.
    """
    return [parse_depth(text, num_layers) for text in row.default]
