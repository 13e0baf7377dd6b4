"""One segment under validation: its commit record, files, offsets, tokens and states.

States are read in blocks of rows that cross records, so that each chunk is decoded once and memory stays bounded. What
cannot be read is reported once, with the records that it touches, and what depends on it is left out. May import
``store``, ``checks`` and ``validate.levels``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.checks import check_tokens
from hsformat.contract import Contract
from hsformat.digests import Checksum
from hsformat.problems import Problem, StoreError, problem
from hsformat.scan import CaptureStats, StateScan
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord
from hsformat.store.segment import SegmentReader
from hsformat.store.verify import INDEX_ARRAYS, file_problems, index_problems
from hsformat.validate.excerpt import runs, spread
from hsformat.validate.levels import SegmentNorms

__all__ = ["SAMPLE_RECORDS", "SegmentCheck"]

READ_BYTES = 32 * 1024 * 1024
"""States are decoded in blocks of about this size."""
SAMPLE_RECORDS = 4
"""Of each segment: those that are read at level ``sample``, and whose mean norm is computed at any."""
NORM_ROUNDING = 1e-3
"""Relative difference of a mean norm that was summed in another order or in float32."""


class SegmentCheck:
    """The checks of one committed segment; call them in the order in which they stand.

    Attributes
    ----------
    unreadable
        Arrays about which a problem was reported, so that they are left out; those of an earlier pass may be given.
    """

    def __init__(
        self, source: Source, contract: Contract, commit: CommitRecord, unreadable: Collection[str] = ()
    ) -> None:
        self.commit = commit
        self._source, self._contract = source, contract
        self._reader = SegmentReader(source, contract, commit)
        self._names = self._reader.array_names
        self._where = f"{source.location}/{commit.prefix}"
        self.unreadable = set(unreadable)
        self._whole = False

    def structure(self) -> Iterator[Problem]:
        """Check the commit record against the contract, and each file's presence and size."""
        commit = self.commit
        for name in self._names:
            if f"{name}/zarr.json" not in commit.files:
                self.unreadable.add(name)
                code = "HS109" if name.startswith(("hidden/", "fields/")) else "HS503"
                got, expected = "not in the commit record", "every array of the contract"
                yield problem(code, where=f"{self._where}/{name}", got=got, expected=expected)
        if too_large := self._reader.size_problems():
            yield from too_large
            self.unreadable.update(name for name in self._names if not name.startswith("hidden/"))
        for rid, t, s, p in zip(commit.ids, commit.tokens, commit.states, commit.provenance_index, strict=True):
            generated = commit.provenance[p].generation.mode != "none"
            if s != t and not (generated and s == t - 1):
                expected = f"{t}, the number of tokens" + (f", or {t - 1}" if generated else "")
                place = f"{self._where}: record {rid!r}"
                yield problem("HS101", where=place, got=f"{s} states", expected=expected, record=rid)
        yield from self._files(content=False)

    def planned(self, rows: Sequence[int], *, full: bool) -> int:
        """Return about how many bytes the checks will read: of states those of the given records."""
        share = sum(self.commit.states[row] for row in rows) / sum(self.commit.states)
        states = sum(f.size for k, f in self.commit.files.items() if k.startswith("hidden/"))
        rest = sum(f.size for k, f in self.commit.files.items() if not k.startswith("hidden/") and k.endswith("/0"))
        return rest + (self.commit.nbytes if full else round(share * states))

    def checksums(self) -> Iterator[Problem]:
        """Check every byte of every file that :meth:`structure` found to be there, but shards of states.

        :meth:`arrays` reads those once, for their numbers and their checksums, if all records are asked for after this.
        """
        self._whole = True
        yield from self._files(content=True, but=[self._shard(key) for key in self._contract.keys])

    @property
    def shards(self) -> list[int]:
        """Bytes of each shard of states that can be read."""
        keys = [key for key in self._contract.keys if f"hidden/{key}" not in self.unreadable]
        return [self.commit.files[self._shard(key)].size for key in keys]

    def _shard(self, key: str) -> str:
        return f"hidden/{key}/c/0/0"

    def arrays(self, rows: Sequence[int]) -> Iterator[Problem]:
        """Read and check offsets and ids of the segment, and tokens and states of the given records."""
        index = {}
        for name in self._names:
            if name.startswith("hidden/") or name in self.unreadable:
                continue
            array, problems = self._reader.try_read(name)
            if array is None:
                self.unreadable.add(name)
            elif name in INDEX_ARRAYS:
                index[name] = array
            yield from problems
        yield from index_problems(self.commit, index, where=self._where)
        yield from self._tokens(rows)
        for key in self._contract.keys:
            if f"hidden/{key}" not in self.unreadable:
                yield from self._all_states(key) if self._whole else self._states(key, rows)

    def norms(self) -> tuple[SegmentNorms, list[Problem]]:
        """Return the recorded statistics of all records, and why some could not be read (NaN)."""
        shape = (self.commit.records, len(self._contract.keys))
        mean_l2, max_abs = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        problems: list[Problem] = []
        for k, key in enumerate(self._contract.keys):
            if (name := f"stats/{key}") not in self.unreadable:
                stats, found = self._reader.try_read(name)
                problems += found
                if stats is None:
                    self.unreadable.add(name)
                else:
                    mean_l2[:, k], max_abs[:, k] = stats[:, 0], stats[:, 1]
        states = np.array(self.commit.states, np.int64)
        name, ids = self.commit.name, self.commit.ids
        return SegmentNorms(name=name, ids=ids, states=states, mean_l2=mean_l2, max_abs=max_abs), problems

    def _files(self, *, content: bool, but: Collection[str] = ()) -> Iterator[Problem]:
        for key in self.commit.files:
            name = _array_of(key)
            if name in self.unreadable or key in but:
                continue
            for p in file_problems(self._source, self.commit, keys=[key], content=content):
                yield self._touching(p, name)
                self.unreadable.add(name)

    def _touching(self, p: Problem, name: str) -> Problem:
        """Name the records that a damaged file touches: those that cannot be read, or all of the segment.

        A group's metadata, or a file that this version does not know, touches none.
        """
        if name not in self._names:
            return p
        ids: Sequence[str] = self.commit.ids
        if p.code == "HS504" and name.startswith("hidden/"):
            ids = [i for row, i in enumerate(ids) if not self._readable(name, row)] or ids
        more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
        shown = ", ".join(repr(i) for i in ids[:5]) + more
        return replace(p, got=f"{p.got}; touches record {shown}", record=ids[0] if len(ids) == 1 else p.record)

    def _readable(self, name: str, row: int) -> bool:
        start = self.commit.state_starts[row]
        try:
            self._reader.rows(name, slice(start, start + self.commit.states[row]))
        except StoreError:
            return False
        return True

    def _tokens(self, rows: Sequence[int]) -> Iterator[Problem]:
        if any(not name.startswith(("hidden/", "stats/")) for name in self.unreadable):
            return  # reported already
        for row in rows:
            record = self._reader.record(row, captures=())
            yield from (p.at(self._where) for p in check_tokens(self._contract, record))

    def _all_states(self, key: str) -> Iterator[Problem]:
        """Check the states of all records and the checksum of their file, read once if its chunks are in order."""
        name, total = f"hidden/{key}", Checksum()
        try:
            blocks = self._reader.stream(name, total.update)
            if blocks is None:
                yield from self._damage(key)
                yield from () if name in self.unreadable else self._states(key, range(self.commit.records))
                return
            yield from self._scanned(key, 0, self.commit.records - 1, blocks)
        except StoreError as e:
            found = list(self._damage(key)) or [self._touching(p, name) for p in e.problems]
            self.unreadable.add(name)
            yield from found
            return
        if str(total) != self.commit.files[self._shard(key)].checksum:
            yield from self._damage(key)

    def _damage(self, key: str) -> Iterator[Problem]:
        """Compare a shard of states with its entry, byte by byte."""
        name = f"hidden/{key}"
        for p in file_problems(self._source, self.commit, keys=[self._shard(key)], content=True):
            yield self._touching(p, name)
            self.unreadable.add(name)

    def _states(self, key: str, rows: Sequence[int]) -> Iterator[Problem]:
        """Check the states of some records."""
        name = f"hidden/{key}"
        for first, last in runs(rows):
            try:
                yield from self._scanned(key, first, last, self._blocks(name, first, last))
            except StoreError as e:  # damage that sizes do not show
                self.unreadable.add(name)
                yield from (self._touching(p, name) for p in e.problems)
                return

    def _blocks(self, name: str, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows of some records in a row, in blocks."""
        starts, chunk = self.commit.state_starts, max(1, READ_BYTES // (self._contract.target.hidden_size * 4))
        chunk -= chunk % 256 if chunk > 256 else 0  # whole chunks, of the sizes that writers use
        for at in range(starts[first], starts[last + 1], chunk):
            yield self._reader.rows(name, slice(at, min(at + chunk, starts[last + 1])))

    def _scanned(self, key: str, first: int, last: int, blocks: Iterable[npt.NDArray[Any]]) -> Iterator[Problem]:
        """Check the numbers of some records in a row."""
        commit, capture = self.commit, self._contract.capture(key)
        ends = commit.state_starts[1:]
        normed = set(spread(commit.records, SAMPLE_RECORDS))  # norms take most of the time of a scan
        row, at, scan = first, commit.state_starts[first], StateScan(capture, commit.ids[first], norms=first in normed)
        for block in blocks:
            start = 0
            while start < len(block):
                take = min(len(block) - start, ends[row] - at)
                scan.add(block[start : start + take])
                start, at = start + take, at + take
                if at == ends[row]:
                    yield from (p.at(self._where) for p in scan.problems())
                    yield from self._stats(key, row, scan.stats, normed=row in normed)
                    row += 1
                    if row <= last:
                        scan = StateScan(capture, commit.ids[row], norms=row in normed)

    def _stats(self, key: str, row: int, stats: CaptureStats, *, normed: bool) -> Iterator[Problem]:
        """Compare with the statistics recorded at write time: states of another capture or segment are found so."""
        if f"stats/{key}" in self.unreadable:
            return
        mean_l2, max_abs = map(float, self._reader.rows(f"stats/{key}", slice(row, row + 1))[0])
        with np.errstate(over="ignore"):
            found = float(np.float32(stats.max_abs))
        rid = self.commit.ids[row]
        where = f"{self._where}/hidden/{key}: record {rid!r}"
        expected = "as recorded when they were written"
        if found != max_abs:
            got = f"states with a largest absolute value of {found:g}"
            yield problem("HS504", where=where, got=got, expected=f"{max_abs:g}, {expected}", record=rid)
        elif (
            normed and math.isfinite(stats.mean_l2) and not math.isclose(stats.mean_l2, mean_l2, rel_tol=NORM_ROUNDING)
        ):
            got = f"states with a mean L2 norm of {stats.mean_l2:g}"
            yield problem("HS504", where=where, got=got, expected=f"{mean_l2:g}, {expected}", record=rid)


def _array_of(key: str) -> str:
    """Return the array that a file of a segment belongs to: ``hidden/d2/c/0/0`` to ``hidden/d2``."""
    parts = key.split("/")
    return "/".join(parts[:2] if parts[0] in ("hidden", "stats", "fields") else parts[:1])
