"""Ids that stand in two segments, found with 8 bytes a record in memory.

A store may hold millions of records, and each id must be known once: as a Python string it takes 150 bytes and more. So
the XXH3-64 of each is kept, in one array of a segment; where a value is there twice, the ids behind it are read again
and compared as text. May import ``store`` and everything below it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from hsformat.problems import Problem, problem
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord, load_commit

__all__ = ["SeenIds"]


class SeenIds:
    """The ids of segments, added in the order of the store."""

    def __init__(self) -> None:
        self._hashes: dict[str, npt.NDArray[np.uint64]] = {}

    def add(self, commit: CommitRecord) -> None:
        """Add the ids of a segment."""
        self._hashes[commit.name] = _hashes(commit)

    def problems(self, source: Source) -> list[Problem]:
        """Return HS107 for each record whose id an earlier segment has, too; the ids in question are read again."""
        twice = self._twice()
        if not twice.size:
            return []
        out, owners = list[Problem](), dict[str, str]()
        for name, hashes in self._hashes.items():
            if not np.isin(hashes, twice).any():
                continue
            commit, _ = load_commit(source, name)
            if commit is None:  # changed since: whoever reads it next says so
                continue
            for rid, met in zip(commit.ids, np.isin(_hashes(commit), twice), strict=True):
                if met and (owner := owners.setdefault(rid, name)) != name:
                    out.append(_problem(source, commit, rid, owner))
        return out

    def _twice(self) -> npt.NDArray[np.uint64]:
        """Return the values that are there more than once, in ascending order."""
        values = np.concatenate([np.empty(0, np.uint64), *self._hashes.values()])
        values.sort()
        return np.unique(values[1:][values[1:] == values[:-1]])


def _hashes(commit: CommitRecord) -> npt.NDArray[np.uint64]:
    return np.fromiter((xxhash.xxh3_64_intdigest(i.encode()) for i in commit.ids), np.uint64, len(commit.ids))


def _problem(source: Source, commit: CommitRecord, rid: str, owner: str) -> Problem:
    place = f"{source.location}/{commit.prefix}: record {rid!r}"
    return problem("HS107", where=place, got=f"an id that segment {owner} has, too", record=rid,
                   expected="one record of each id in a store",
                   fix="hsformat repair --dedupe keeps the record of the older segment")  # fmt: skip
