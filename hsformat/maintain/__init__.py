"""Maintenance of stores: what is damaged is replaced, what nobody uses removed, what belongs together joined.

``repair``     damaged segments replaced by what is left of them; duplicate ids
``gc``         orphans, replaced segments and leftovers removed
``merge``      stores of one meaning joined, their segments copied as they are
``plan``       what a merge would do, before anything is written
``copying``    one segment copied, byte for byte
``finalnorm``  the last capture taken through the target's final norm
``rewrite``    one segment written from records that were stored before

Every change of what readers see is one publish or one removal of a ``zarr.json``. May import ``store``, ``target`` and
everything below them.
"""

from __future__ import annotations

from hsformat.maintain.gc import GcReport, Removed, gc_store
from hsformat.maintain.merge import MergeReport, merge_stores
from hsformat.maintain.outcome import RepairReport, SegmentRepair
from hsformat.maintain.repair import repair_store

__all__ = [
    "GcReport",
    "MergeReport",
    "Removed",
    "RepairReport",
    "SegmentRepair",
    "gc_store",
    "merge_stores",
    "repair_store",
]
