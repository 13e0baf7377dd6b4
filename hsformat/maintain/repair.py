"""Repair: a damaged segment is replaced by a new one with those of its records that are whole (rule S-9).

One publish ends the old segment and begins the new one, so that a reader sees either and never both; after a kill
at any point the command is given again. Records that are lost are named, and a later extraction fills them. A segment
of which a file cannot be read now is not damaged as far as anybody can tell, and is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from hsformat.maintain.aside import copy_aside
from hsformat.maintain.outcome import RepairReport, SegmentRepair
from hsformat.maintain.removing import refuse_link, removing
from hsformat.maintain.rewrite import producer_of, write_segment
from hsformat.maintain.unreadable import WatchedSource
from hsformat.problems import Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.backend import Backend, CountedSource, Locks, Place, Source
from hsformat.store.commit import CommitRecord, Segments, load_commit, load_segments
from hsformat.store.metadata import (
    MAX_JSON_BYTES,
    SEGMENTS,
    ensure_segments,
    load_contract,
    new_writer,
    segment_names,
    segments_group_problems,
)
from hsformat.store.places import backend_for
from hsformat.store.remains import known_ids, recovered_commit
from hsformat.store.salvage import Salvage
from hsformat.store.verify import file_problems

__all__ = ["repair_store"]


def repair_store(
    path: Place,
    *,
    dedupe: bool = False,
    dry_run: bool = False,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> RepairReport:
    """Verify every file of every segment, and replace the segments that are damaged by what is left of them.

    A segment of which nothing is left, or whose commit record is damaged, is ended: its ``zarr.json`` is kept under
    another name (:func:`hsformat.maintain.aside.copy_aside`); its files stay until they are collected
    (:func:`hsformat.maintain.gc_store`). Writers may be at work meanwhile. On a disk a second repair of the store is
    refused while one is at work; on an object store, which has no locks, two at once may leave records twice, which
    ``dedupe`` then removes.

    Parameters
    ----------
    dedupe
        Keep one record of an id that several segments have, that of the segment that comes first.
    dry_run
        Change nothing.
    tick
        Called with bytes read, and bytes to read in all as far as that is known.

    Raises
    ------
    StoreError
        HS501, HS502, HS504: there is no root that could be read. HS506 (error): another repair is at work, a segment
        cannot be written, or a file not be removed, as behind a link.
    """
    backend = backend_for(path)
    with contextlib.nullcontext() if dry_run else _alone(backend):
        return _Repair(backend, dedupe=dedupe, dry_run=dry_run, tick=tick).run()


@contextlib.contextmanager
def _alone(backend: Backend) -> Iterator[None]:
    """Keep other repairs out, where the place can: each would write what is whole of a segment under its own name.

    Raises
    ------
    StoreError
        HS506 (error): another repair is at work.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(backend, Locks):
                stack.enter_context(backend.lock("zarr.json"))
        except BlockingIOError as e:
            raise StoreError(
                problem(
                    "HS506",
                    where=backend.location,
                    severity=Severity.ERROR,
                    got="another repair of this store is at work",
                    expected="one repair of a store at a time",
                    fix="wait for its end, then give the command again: it does what is left to do",
                )
            ) from e
        yield


class _Repair:
    def __init__(self, backend: Backend, *, dedupe: bool, dry_run: bool, tick: Callable[[int, int], None]) -> None:
        self._backend, self._dedupe, self._dry_run = backend, dedupe, dry_run
        self._contract, notes = load_contract(backend)
        self._report = RepairReport(store=backend.location, dry_run=dry_run, problems=notes)
        self._segments: Segments = load_segments(backend)
        self._writer, self._n = new_writer(), 0
        self._owners: dict[str, tuple[str, str | None]] = {}  # the segment that keeps an id, and what it was made from
        self._left: set[str] = set()  # ids of segments that cannot be read now, and are neither kept nor lost
        self._total = sum(c.nbytes for c, _ in self._segments.found.values() if c is not None)
        self._watched = WatchedSource(backend)
        self._source: Source = CountedSource(self._watched, lambda done: tick(done, max(done, self._total)))

    def run(self) -> RepairReport:
        self._group()
        recovered = self._recovered = self._recover()
        for name, (commit, problems) in self._segments.found.items():
            if name in self._segments.owners:
                continue
            if commit is not None:
                self._segment(commit)
            elif name in recovered:
                self._segment(recovered[name], problems)
            elif any(p.code == "HS504" for p in problems):
                self._end_damaged(name, problems)
            else:  # not committed; of another version, or not readable now: that is no damage
                self._report.problems += [p for p in problems if p.severity is Severity.ERROR]
        there = self._left.union(self._owners)
        self._report.records = len(there)
        self._report.segments = [
            replace(s, lost=tuple(i for i in s.lost if i not in there)) for s in self._report.segments
        ]
        return self._report

    def _group(self) -> None:
        """Make ``segments/zarr.json`` again if it is damaged; no reader of ours needs it."""
        problems = segments_group_problems(self._watched)
        if self._is_unread():
            return
        if problems and not self._dry_run:
            self._remove(f"{SEGMENTS}/zarr.json")
            ensure_segments(self._backend)
            problems = segments_group_problems(self._backend)
        self._report.problems += problems

    def _recover(self) -> dict[str, CommitRecord]:
        """Return commit records that are whole inside of a damaged ``zarr.json``; what they replace stays so."""
        damaged = [n for n, (_, found) in self._segments.found.items() if any(p.code == "HS504" for p in found)]
        out = {name: c for name in damaged if (c := recovered_commit(self._watched, name)) is not None}
        self._segments.owners.update({old: c.name for c in out.values() for old in c.replaces})
        return out

    def _is_unread(self, ids: Collection[str] = ()) -> bool:
        """Whether something could not be read since the last question; the report says so, and what stays with it."""
        problems = self._watched.problems()
        self._watched.failed.clear()
        self._report.problems += problems
        if problems:
            self._left.update(ids)
        return bool(problems)

    def _segment(self, commit: CommitRecord, about: Sequence[Problem] = ()) -> None:
        """Keep a segment if it is whole, and replace it by what is; ``about``: what is wrong with its ``zarr.json``."""
        damaged = {
            key: found
            for key in commit.files
            if (found := list(file_problems(self._source, commit, keys=[key], content=True)))
        }
        if self._is_unread(commit.ids):
            return
        twice = [i for i in commit.ids if i in self._owners]
        if twice and not self._dedupe:
            self._report.problems += [self._duplicate(commit, i) for i in twice]
        if not damaged and not about and not (twice and self._dedupe):
            self._own(commit, commit.ids, commit.name)
            return
        duplicates = frozenset(twice if self._dedupe else ())
        rows = [row for row, i in enumerate(commit.ids) if i not in duplicates]
        salvage = Salvage(self._source, self._contract, commit, damaged)
        kept: list[str] = []

        def records() -> Iterator[tuple[Record, dict[str, CaptureStats]]]:
            for record, stats in salvage.records(rows):
                kept.append(record.id)
                yield record, stats
                if self._watched.failed:
                    return

        successor, action, aside = self._replace(commit, records, kept, duplicates)
        if action is None:
            return
        self._warn_of_others(commit, duplicates)
        why = [p for found in salvage.lost.values() for p in found]
        self._report.segments.append(
            SegmentRepair(
                segment=commit.name,
                action=action,
                successor=successor,
                kept=len(kept),
                lost=tuple(salvage.lost),
                duplicates=tuple(i for i in commit.ids if i in duplicates),
                problems=tuple(dict.fromkeys([*about, *(p for found in damaged.values() for p in found), *why])),
                aside=aside,
            )
        )
        self._own(commit, kept, successor or commit.name)

    def _replace(
        self,
        commit: CommitRecord,
        records: Callable[[], Iterator[tuple[Record, dict[str, CaptureStats]]]],
        kept: list[str],
        duplicates: frozenset[str],
    ) -> tuple[str | None, Literal["replaced", "ended", "superseded"] | None, str | None]:
        """Write the records that are whole as the successor of a segment; end it if there are none.

        Returns
        -------
        The successor, what was done (None: nothing, since not all of the segment could be read), and the key under
        which the commit record of a segment that was ended is kept.
        """
        if self._dry_run:
            for _ in records():
                pass
            if self._is_unread(commit.ids):
                return None, None, None
            return None, "replaced" if kept else "ended", None
        name, self._n = f"{self._writer}-{self._n}", self._n + 1

        def producer() -> dict[str, Any]:
            lost = commit.records - len(kept) - len(duplicates)
            details = {"segment": commit.name, "kept": len(kept), "lost": lost, "duplicates": len(duplicates)}
            return producer_of("repair", details, commit.producer)

        committed = write_segment(
            self._backend,
            self._contract,
            records(),
            name=name,
            producer=producer,
            replaces={commit.name, *commit.replaces},
            wanted=lambda: not self._watched.failed and not self._superseded(commit.name),
        )
        if committed:
            return name, "replaced", None
        if self._is_unread(commit.ids):
            return None, None, None
        if kept:
            return None, "superseded", None
        done, aside = self._end(commit.name, commit.ids)
        return None, "ended" if done else None, aside

    def _superseded(self, name: str) -> bool:
        """Whether another process has replaced or ended a segment since this one began, or may have."""
        new = [n for n in segment_names(self._watched) if n not in self._segments.found]
        commits = [load_commit(self._watched, n)[0] for n in new if not n.startswith(f"{self._writer}-")]
        ended = self._watched.size(f"{SEGMENTS}/{name}/zarr.json") is None
        replaced = any(c is not None and name in c.replaces for c in commits)
        return ended or replaced or bool(self._watched.failed)

    def _end_damaged(self, name: str, problems: list[Problem]) -> None:
        lost = known_ids(self._source, f"{SEGMENTS}/{name}")
        size = self._watched.size(f"{SEGMENTS}/{name}/zarr.json") or 0
        if self._is_unread():
            return
        if size > MAX_JSON_BYTES:  # no writer's; what it is, and whether it may go, is for its owner to say
            self._report.problems += [replace(p, fix="move this file out of the store; repair again") for p in problems]
            return
        done, aside = (True, None) if self._dry_run else self._end(name)
        if done:
            self._report.segments.append(
                SegmentRepair(
                    segment=name,
                    action="ended",
                    successor=None,
                    kept=0,
                    lost=tuple(lost),
                    duplicates=(),
                    problems=tuple(problems),
                    aside=aside,
                )
            )

    def _end(self, name: str, ids: Collection[str] = ()) -> tuple[bool, str | None]:
        """Set a segment's commit record aside, and before it those of the segments that it replaces: they stay ended.

        Returns
        -------
        Whether that was done: not if one of them cannot be read now, which may name others. And where it is kept.
        """
        ending = self._ending(name, [])
        for each in ending:
            refuse_link(self._backend, f"{SEGMENTS}/{each}")
        copies = [copy_aside(self._watched, self._backend, each) for each in ending]
        if self._is_unread(ids):
            return False, None
        for each in ending:
            self._remove(f"{SEGMENTS}/{each}/zarr.json")
        return True, copies[-1]

    def _remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), removing(f"{self._backend.location}/{key}"):
            self._backend.remove(key)

    def _ending(self, name: str, seen: list[str]) -> list[str]:
        """Return the segments that end with one, each after those that it replaces."""
        seen.append(name)
        commit = self._recovered.get(name) or load_commit(self._watched, name)[0]
        older = [n for old in (commit.replaces if commit else ()) if old not in seen for n in self._ending(old, seen)]
        return [*older, name]

    def _own(self, commit: CommitRecord, ids: Collection[str], name: str) -> None:
        kept = set(ids)
        for i, source in zip(commit.ids, commit.source_digests, strict=True):
            if i in kept:
                self._owners.setdefault(i, (name, source))

    def _warn_of_others(self, commit: CommitRecord, duplicates: Collection[str]) -> None:
        """Say which duplicates were made from another input than the record that is kept: one of the two is lost."""
        sources = zip(commit.ids, commit.source_digests, strict=True)
        others = [i for i, source in sources if i in duplicates and source != self._owners[i][1]]
        if others:
            shown = ", ".join(map(repr, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
            self._report.problems.append(
                problem(
                    "HS107",
                    where=f"{self._backend.location}/{commit.prefix}",
                    severity=Severity.WARNING,
                    got=f"made from another input than the record that is kept: {shown}",
                    expected="one id for one input",
                    fix="give the input an id of its own and extract it again",
                )
            )

    def _duplicate(self, commit: CommitRecord, record_id: str) -> Problem:
        return problem(
            "HS107",
            where=f"{self._backend.location}/{commit.prefix}: record {record_id!r}",
            got=f"an id that segment {self._owners[record_id][0]} has, too",
            expected="one record of each id in a store",
            fix="hsformat repair --dedupe keeps the record of the older segment",
            record=record_id,
        )
