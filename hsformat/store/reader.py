"""Reading: :func:`open` and :class:`Store`."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
import numpy.typing as npt

from hsformat.compare import compare
from hsformat.contract import Contract
from hsformat.layout import Layout, ServingLayout
from hsformat.problems import ContractMismatch, Problem, Severity, StoreError, problem
from hsformat.record import Provenance, Record
from hsformat.store.backend import Backend, Place
from hsformat.store.commit import CommitRecord, load_commits
from hsformat.store.metadata import load_contract
from hsformat.store.places import backend_for
from hsformat.store.segment import Decoder, SegmentReader

__all__ = ["Store", "open"]

_CACHED_SEGMENTS = 32
"""Segments of which what is small is kept in memory; how many files are kept open is for ``opened``."""


def open(
    path: Place,
    *,
    expect: Layout | ServingLayout | Contract | None = None,
    understands: Collection[str] = (),
    damaged: Literal["refuse", "skip"] = "refuse",
    verify: bool = True,
    decoder: Decoder = "native",
) -> Store:
    """Open a store for reading: the segments that are committed now.

    Parameters
    ----------
    expect
        What the data will be used for; compared by :func:`hsformat.compare.compare`.
    understands
        Names of declared fields that the caller handles.
    damaged
        What to do about a segment whose commit record is damaged, or of an unknown version: ``refuse`` the store, or
        ``skip`` the segment, so that its records are absent and :attr:`Store.problems` says why.
    verify
        Whether the checksum of each chunk that is read is compared.
    decoder
        Who decodes: ``native``, or ``zarr`` for zarr-python, which is slower, always verifies and gives the same bytes.

    Raises
    ------
    StoreError
        HS501: there is no store. HS502: its version, a field of its contract or a field that must be understood is
        not known. HS503, HS504: a commit record is damaged. HS507: a segment follows another version.
    ContractMismatch
        Everything that ``expect`` and the store's contract disagree on.
    """
    if decoder not in get_args(Decoder):
        raise ValueError(f"decoder {decoder!r} is none of {list(get_args(Decoder))}")
    backend = backend_for(path)
    contract, problems = load_contract(backend)
    unknown = [f.name for f in contract.fields if f.must_understand and f.name not in understands]
    if unknown:
        raise StoreError(
            [
                problem(
                    "HS502",
                    where=f"{backend.location}: fields.{name}",
                    got=f"the field {name!r}, must_understand",
                    expected=f"a reader that understands {name!r}",
                    fix=f"say understands=[{name!r}] if the program handles it",
                )
                for name in unknown
            ]
        )
    if expect is not None:
        disagreements = [p.at(backend.location) for p in compare(contract, expect)]
        if any(p.severity is Severity.ERROR for p in disagreements):
            raise ContractMismatch(disagreements)
        problems += disagreements
    commits, found = load_commits(backend)
    problems += found
    errors = [p for p in problems if p.severity is Severity.ERROR]
    if errors and damaged == "refuse":
        raise StoreError(errors)
    return Store(backend, contract, commits, problems, verify=verify, decoder=decoder)


class Store:
    """The records of a store as they were committed when it was opened. Made by :func:`open`.

    A sequence over (writer, segment number, row), and a :class:`hsformat.source.RecordSource`. It may be pickled, used
    after a fork and read in several threads at once. What it keeps in memory is bounded, and so are the files that all
    stores of a process keep open: 256, or a quarter of those that it may.

    Attributes
    ----------
    contract
        What holds for every record.
    problems
        What is worth knowing and no reason to refuse: segments never committed, or replaced (HS506), stale metadata
        (HS508), and with ``damaged="skip"`` the damage.
    segments
        The commit records, in order.
    """

    def __init__(
        self,
        backend: Backend,
        contract: Contract,
        commits: Sequence[CommitRecord],
        problems: Sequence[Problem],
        *,
        verify: bool = True,
        decoder: Decoder = "native",
    ) -> None:
        self._backend = backend
        self._verify, self._decoder = verify, decoder
        self.contract = contract
        self._keys = contract.keys
        self.problems = list(problems)
        self.segments = tuple(commits)
        self._ends = list(accumulate(c.records for c in commits))
        self._ids = [i for c in commits for i in c.ids]
        self._rows = {i: row for row, i in enumerate(self._ids)}
        # Two writers can break rule R-8: counted once, and not for each record that is looked up.
        twice = len(self._rows) != len(self._ids)
        self._duplicates = frozenset(i for i, n in Counter(self._ids).items() if n > 1) if twice else frozenset()
        self._readers: OrderedDict[int, SegmentReader] = OrderedDict()

    @property
    def path(self) -> str:
        """The path as it was given."""
        return self._backend.location

    @property
    def ids(self) -> Sequence[str]:
        """The ids of all records, in order."""
        return self._ids

    @property
    def tokens(self) -> int:
        """Tokens of all records."""
        return sum(sum(c.tokens) for c in self.segments)

    def token_counts(self) -> npt.NDArray[np.int64]:
        """Return [R]: T of each record."""
        return _joined(c.tokens for c in self.segments)

    def state_counts(self) -> npt.NDArray[np.int64]:
        """Return [R]: S of each record."""
        return _joined(c.states for c in self.segments)

    def segment_counts(self) -> npt.NDArray[np.int64]:
        """Return the number of records of each segment, in order."""
        return np.array([c.records for c in self.segments], np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all committed files on the disk."""
        return sum(c.nbytes for c in self.segments)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, record_id: object) -> bool:
        return record_id in self._rows

    def is_ambiguous(self, record_id: str) -> bool:
        """Whether two records have this id, so that :meth:`read` refuses it (HS107)."""
        return record_id in self._duplicates

    def __iter__(self) -> Iterator[Record]:
        return (self.read(row) for row in range(len(self)))

    def __getitem__(self, key: SupportsIndex | str) -> Record:
        return self.read(key)

    def read(self, key: SupportsIndex | str, *, captures: Collection[str] | None = None) -> Record:
        """Return one record, by number (from the end if negative) or by id.

        Parameters
        ----------
        captures
            Keys of the captures to read, in this order; None: all.

        Raises
        ------
        IndexError, KeyError
            There is no such record.
        TypeError
            ``captures`` is text: one key is given as a list of one.
        ContractMismatch
            HS109: the store has no such capture.
        StoreError
            HS107: two records have this id. HS503, HS504, HS505: what was committed is lost or damaged; ``where``
            has the segment, the array and the record's id.
        """
        if isinstance(captures, str):
            raise TypeError(f"captures is a collection of keys, [{captures!r}], not text")
        keys = self._keys if captures is None else tuple(captures)
        if absent := [k for k in keys if k not in self._keys]:
            raise ContractMismatch(
                [
                    problem(
                        "HS109",
                        where=f"{self.path}: capture {k!r}",
                        got=f"captures {list(self._keys)}",
                        expected=f"{k} among them",
                    )
                    for k in absent
                ]
            )
        segment, row = self._place(key)
        return self._reader(segment).record(row, keys)

    def provenance(self, key: SupportsIndex | str) -> Provenance:
        """Return who wrote a record's supervised tokens, and its template, without reading its states."""
        segment, row = self._place(key)
        commit = self.segments[segment]
        return commit.provenance[commit.provenance_index[row]]

    def _place(self, key: SupportsIndex | str) -> tuple[int, int]:
        if isinstance(key, str):
            if self.is_ambiguous(key):
                owners = [c.name for c in self.segments if key in c.ids]
                raise StoreError(
                    problem(
                        "HS107",
                        where=f"{self.path}: record {key!r}",
                        got=f"one in each of {owners}",
                        expected="one record of this id",
                        record=key,
                        fix="read by number, or hsformat repair --dedupe, which keeps that of the older segment",
                    )
                )
            i = self._rows[key]
        else:
            i = index(key)
            if not -len(self) <= i < len(self):
                raise IndexError(f"record {i} of {len(self)}")
            i %= len(self)
        segment = bisect_right(self._ends, i)
        return segment, i - (self._ends[segment - 1] if segment else 0)

    def _reader(self, segment: int) -> SegmentReader:
        reader = self._readers.get(segment)
        if reader is None:
            reader = self._readers[segment] = SegmentReader(
                self._backend,
                self.contract,
                self.segments[segment],
                verify=self._verify,
                decoder=self._decoder,
            )
            if len(self._readers) > _CACHED_SEGMENTS:
                self._readers.popitem(last=False)
        with suppress(KeyError):  # another thread may just have let it go
            self._readers.move_to_end(segment)
        return reader

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": OrderedDict()}

    def __repr__(self) -> str:
        counts = f"records={len(self)}, segments={len(self.segments)}"
        return f"Store({self.path!r}, {counts}, captures={list(self.contract.keys)})"


def _joined(columns: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.asarray(c, np.int64) for c in columns)])
