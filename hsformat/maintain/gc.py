"""Garbage: segments that were never committed, segments that were replaced, leftovers of writers that were killed.

Nothing here changes what a reader sees, by the order of the removals: the ``zarr.json`` of a replaced segment goes
first, and before that of the segment that names it (rule S-9). A writer that is at work is told from one that was
killed by the age of its newest object alone, since writers hold no locks. Links are never followed, and a segment
that is one is left alone: what it leads to is not the store's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hsformat.maintain.removing import refuse_link, removing
from hsformat.store.backend import Backend, Entry, HasFolders, Place
from hsformat.store.commit import load_segments
from hsformat.store.metadata import SEGMENTS, load_contract
from hsformat.store.places import backend_for

__all__ = ["OLDER_THAN", "GcReport", "Removed", "gc_store"]

OLDER_THAN = 24 * 3600.0
"""Default age in seconds."""

_LEFTOVERS = (".partial", ".guard")
"""Ends of names of what a writer leaves that was killed while it published a ``zarr.json``."""


_Kind = Literal["orphan", "replaced", "leftover", "link"]


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What was removed, would be (dry run) or is kept: ``kind``, its key in the store, its objects and their bytes.

    Attributes
    ----------
    kind
        ``link``: a segment that is not in use and a link to another place; it is always kept.
    age
        Seconds since the newest object was written, or an empty folder made; of a replaced segment, since it was
        replaced.
    """

    kind: _Kind
    key: str
    objects: int
    nbytes: int
    age: float


@dataclass(kw_only=True)
class GcReport:
    """What was removed, and what is not old enough."""

    store: str
    dry_run: bool
    older_than: float
    removed: list[Removed] = field(default_factory=list)
    kept: list[Removed] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of what was removed."""
        return sum(r.nbytes for r in self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {
            "store": self.store,
            "dry_run": self.dry_run,
            "older_than": self.older_than,
            "bytes": self.nbytes,
            "removed": [dict(r.__dict__) for r in self.removed],
            "kept": [dict(r.__dict__) for r in self.kept],
        }


def gc_store(path: Place, *, older_than: float = OLDER_THAN, dry_run: bool = False) -> GcReport:
    """Remove what no reader uses and no writer has touched for some time.

    Parameters
    ----------
    older_than
        Seconds. A segment that is not committed is removed if nothing of it was written for so long: it must be
        longer than the longest pause of a writer (one commits within ten minutes of work by default, but a model or a
        machine may stand still), and than what the clocks of writers, of the disk and of this machine differ by. A
        replaced segment is removed if it was replaced so long ago: readers that opened the store before may still
        read it, and meet HS503 once it is gone.
    dry_run
        Remove nothing.

    Raises
    ------
    ValueError
        ``older_than`` is not above 0: then a segment that a writer is writing would be removed.
    StoreError
        HS501, HS502, HS504: there is no store that could be read. HS506 (error): something cannot be removed, or all
        segments are behind a link; what was removed before that was not in use.
    OSError
        The store cannot be listed.
    """
    if not older_than > 0:
        raise ValueError(f"older_than {older_than} must be above 0: at 0, what a writer is writing would be removed")
    backend = backend_for(path)
    load_contract(backend)
    report = GcReport(store=backend.location, dry_run=dry_run, older_than=older_than)
    _Gc(backend, report).run()
    return report


class _Gc:
    def __init__(self, backend: Backend, report: GcReport) -> None:
        self._backend, self._report = backend, report
        self._entries: dict[str, list[Entry]] = {}
        self._top: list[Entry] = []

    def run(self) -> None:
        found, owners = load_segments(self._backend)
        self._list(found)
        self._replaced({n: () if c is None else c.replaces for n, (c, _) in found.items() if n in owners}, owners)
        for name, (commit, problems) in found.items():
            if name not in owners and commit is None and [p.code for p in problems] == ["HS506"]:
                self._orphan(name)
        committed = [e for n, (c, _) in found.items() if c is not None and n not in owners for e in self._entries[n]]
        self._leftovers([*self._top, *committed])

    def _list(self, names: Iterable[str]) -> None:
        """List the whole store once."""
        self._entries = {name: [] for name in names}
        for entry in self._backend.listing(""):
            parts = entry.key.split("/")
            if parts[0] == SEGMENTS and (len(parts) > 2 or parts[-1] in self._entries):
                self._entries.get(parts[1], []).append(entry)
            elif entry.key == SEGMENTS:
                refuse_link(self._backend, SEGMENTS)
            elif parts[-1] != "zarr.json":
                self._top.append(entry)

    def _orphan(self, name: str) -> None:
        key = f"{SEGMENTS}/{name}"
        entries = self._backend.listing(key)  # anew: its writer may be at work
        if any(e.key == f"{key}/zarr.json" for e in entries):  # it has just been committed
            return
        newest = max((e.modified for e in entries), default=None)
        if newest is None and isinstance(self._backend, HasFolders):  # killed before its first file
            newest = self._backend.touched(key)
        if newest is not None and self._may_go("orphan", name, entries, newest):
            self._discard(name)

    def _replaced(self, replaces: dict[str, tuple[str, ...]], owners: dict[str, str]) -> None:
        """Remove replaced segments, each after those that it names, as far as these are old enough."""
        left = dict(replaces)
        while ready := [n for n, named in left.items() if not any(old in self._entries for old in named if old != n)]:
            for name in ready:
                left.pop(name)
                entries = self._entries[name]
                since = [
                    e.modified for e in self._entries[owners[name]] if e.key.endswith(f"/{owners[name]}/zarr.json")
                ]
                newest = max([*since, *(e.modified for e in entries)], default=time.time())
                if self._may_go("replaced", name, entries, newest):
                    self._remove(f"{SEGMENTS}/{name}/zarr.json")
                    self._discard(name)
                    del self._entries[name]

    def _leftovers(self, entries: Iterable[Entry]) -> None:
        for e in entries:
            name = e.key.rsplit("/", 1)[-1]
            if not (name.startswith(".zarr.json.") and name.endswith(_LEFTOVERS)):
                continue
            if self._is_old("leftover", e.key, [e], e.modified):
                self._remove(e.key)

    def _remove(self, key: str) -> None:
        if not self._report.dry_run:
            with contextlib.suppress(FileNotFoundError), removing(f"{self._backend.location}/{key}"):
                self._backend.remove(key)

    def _discard(self, name: str) -> None:
        if self._report.dry_run:
            return
        key = f"{SEGMENTS}/{name}"
        with removing(where := f"{self._backend.location}/{key}"):
            try:
                self._backend.discard(key)
            except FileExistsError:  # committed between the last look and now
                self._report.removed.pop()
                return
        if self._backend.listing(key):
            with removing(where):
                raise OSError("some of it is still there")

    def _may_go(self, kind: _Kind, name: str, entries: list[Entry], at: float) -> bool:
        """Whether a segment may go: it is old enough, and no link."""
        key = f"{SEGMENTS}/{name}"
        if [e.key for e in entries] == [key]:
            self._is_old("link", key, entries, at)
            return False
        return self._is_old(kind, key, entries, at)

    def _is_old(self, kind: _Kind, key: str, entries: list[Entry], at: float) -> bool:
        """Whether something may go, by when it was last written or replaced; the report says so."""
        age = time.time() - at
        one = Removed(kind=kind, key=key, objects=len(entries), nbytes=sum(e.size for e in entries), age=round(age, 1))
        old = age > self._report.older_than and kind != "link"
        (self._report.removed if old else self._report.kept).append(one)
        return old
