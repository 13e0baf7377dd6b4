"""The writer: validates records, buffers them, commits them as segments."""

from __future__ import annotations

import secrets
import time
from collections import ChainMap
from collections.abc import Iterable, KeysView, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from hsformat.checks import check_record
from hsformat.contract import Contract
from hsformat.digests import canonical_json
from hsformat.dtypes import numpy_dtype
from hsformat.problems import InvalidRecord, Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats, StateScan, to_stored
from hsformat.store.arrays import check_chunk
from hsformat.store.backend import Backend
from hsformat.store.commit import CommitRecord, load_commit
from hsformat.store.metadata import SEGMENTS
from hsformat.store.pending import Pending, make_row, write_segment

__all__ = ["SEGMENT_BYTES", "Writer"]

SEGMENT_BYTES = 256 * 1024 * 1024
"""Default bound of the records that wait in memory for the next segment."""


class _Done(NamedTuple):
    """What a writer has committed up to its last segment; -1: none."""

    segment: int = -1
    records: int = 0
    segments: int = 0
    nbytes: int = 0


class Writer:
    """Validates records, buffers them and commits them as segments. Made by :func:`create` and :func:`append`.

    A context manager: leaving the block commits what is buffered, after an exception as well, since what was appended
    is whole. Not for use by several threads.

    Attributes
    ----------
    contract
        What the store promises.
    """

    def __init__(
        self,
        backend: Backend,
        contract: Contract,
        commits: Iterable[CommitRecord],
        *,
        segment_bytes: int,
        chunk_tokens: int,
        producer: Mapping[str, Any] | None,
    ) -> None:
        if segment_bytes <= 0 or chunk_tokens <= 0:
            raise ValueError(f"segment_bytes {segment_bytes} and chunk_tokens {chunk_tokens} must be above 0")
        for c in contract.captures:
            check_chunk(
                chunk_tokens * contract.target.hidden_size * numpy_dtype(c.dtype).itemsize,
                where=f"{backend.location}: chunk of hidden/{c.key}",
                fix="lower chunk_tokens",
            )
        self._backend = backend
        self.contract = contract
        self.producer = producer
        self._chunk_tokens = chunk_tokens
        # Sorts by time of opening; the random half keeps writers apart that open in the same millisecond.
        self._name = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"
        self._n = 0
        self._in_flight: int | None = None
        self._done = _Done()
        self._pending = Pending(contract, segment_bytes=segment_bytes, chunk_tokens=chunk_tokens)
        self._sources = {i: s for c in commits for i, s in zip(c.ids, c.source_digests, strict=True)}
        self._closed: str | None = None

    @property
    def producer(self) -> Mapping[str, Any] | None:
        """Recorded in the segments committed from now on. Setting what is no JSON is a ValueError."""
        return self._producer

    @producer.setter
    def producer(self, value: Mapping[str, Any] | None) -> None:
        canonical_json(value)
        self._producer = value

    @property
    def path(self) -> str:
        """The store's path."""
        return self._backend.location

    @property
    def records_committed(self) -> int:
        """Records that this writer has committed so far."""
        return self._done.records

    @property
    def segments_committed(self) -> int:
        """Segments that this writer has committed so far."""
        return self._done.segments

    @property
    def bytes_written(self) -> int:
        """Bytes on the disk of what this writer has committed so far."""
        return self._done.nbytes

    @property
    def ids(self) -> KeysView[str]:
        """Ids committed when the writer was opened, and those appended to it."""
        return ChainMap[str, Any](self._pending.rows, self._sources).keys()

    def source_digest(self, record_id: str) -> str | None:
        """Return the digest of the sample that a known record was made from; None: not recorded.

        Raises
        ------
        KeyError
            The id is not among :attr:`ids`.
        """
        row = self._pending.rows.get(record_id)
        return self._sources[record_id] if row is None else row.source_digest

    def append(self, record: Record) -> list[Problem]:
        """Validate a record and buffer a copy of it; commit first if it would not fit.

        Returns
        -------
        Problems that do not refuse the record: warnings and notes.

        Raises
        ------
        InvalidRecord
            All problems of the record, HS107 if its id is known. The writer goes on working.
        StoreError
            The segment before it could not be written (HS506), or the record is beyond a limit of the codec (HS501).
        """
        if not isinstance(record, Record):
            raise TypeError(f"what is appended is a Record, not {type(record).__name__}")
        self._ready()
        problems, stats = check_record(self.contract, record)
        if isinstance(record.id, str) and record.id in self.ids:
            problems.append(
                problem(
                    "HS107",
                    where=f"record {record.id!r}: id",
                    got="an id that the store has",
                    expected="an id of its own",
                    record=record.id,
                )
            )
        if not _errors(problems):
            problems += self._rescan(record, stats, problems)
        if _errors(problems):
            raise InvalidRecord(problems)
        row = make_row(self.contract, record, stats)
        for name, array in row.arrays.items():
            check_chunk(array.nbytes, where=f"record {record.id!r}: {name}", fix="store shorter records")
        if not self._pending.has_room(row):
            self.flush()
        self._pending.add(row, record.hidden)
        return problems

    def _rescan(self, record: Record, stats: dict[str, CaptureStats], known: list[Problem]) -> list[Problem]:
        """Scan, as they will be stored, the states that lose precision: rounding can make rows of zeros."""
        out: list[Problem] = []
        for capture in self.contract.captures:
            array = record.hidden[capture.key]
            if not np.can_cast(array.dtype, numpy_dtype(capture.dtype), "safe"):
                scan = StateScan(capture, record.id)
                scan.add(to_stored(capture, array))
                stats[capture.key] = scan.stats
                out += [p for p in scan.problems() if p not in known]
        return out

    def flush(self) -> None:
        """Commit what is buffered as a segment; nothing happens if nothing is.

        Raises
        ------
        StoreError
            HS506 (error): it could not be written, or nobody can tell whether it was. What was committed before stays,
            what was buffered is gone from memory, and the writer is closed.
        """
        self._ready()
        if not self._pending:
            return
        n = self._in_flight = self._n
        self._n = n + 1
        prefix = f"{SEGMENTS}/{self._name}-{n}"
        try:
            nbytes = write_segment(
                self._backend,
                self.contract,
                self._pending,
                writer=self._name,
                n=n,
                producer=self.producer,
                chunk_tokens=self._chunk_tokens,
            )
        except FileExistsError as e:  # a segment of this name: whosever it is, it is left alone
            self._in_flight = None
            raise self._failed(e, prefix, committed=False) from e
        except BaseException as e:
            committed = self._settle(n)
            if isinstance(e, OSError):
                raise self._failed(e, prefix, committed=committed) from e
            raise
        self._count(n, nbytes)

    def _settle(self, n: int) -> bool | None:
        """Find out whether a segment in flight is committed: count it then, remove what is there of it otherwise.

        Returns
        -------
        None if the disk does not say: nothing is counted and nothing removed. May be called again.
        """
        commit, problems = load_commit(self._backend, f"{self._name}-{n}")
        if commit is not None:
            self._count(n, commit.nbytes)
            return True
        if any(p.code != "HS506" for p in problems):
            return None
        try:
            self._backend.discard(f"{SEGMENTS}/{self._name}-{n}")
        except OSError:
            return None
        self._in_flight = None
        return False

    def _count(self, n: int, nbytes: int) -> None:
        """Take the buffered records for committed. A second call makes a signal between two statements good."""
        done = self._done
        if done.segment != n:
            records = done.records + len(self._pending)
            self._done = _Done(segment=n, records=records, segments=done.segments + 1, nbytes=done.nbytes + nbytes)
        self._sources.update((i, row.source_digest) for i, row in self._pending.rows.items())
        self._pending.clear()
        self._in_flight = None

    def close(self) -> None:
        """Commit what is buffered and refuse further records. May be called twice."""
        if self._closed is None:
            try:
                self.flush()
            finally:
                self._closed = self._closed or "closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> None:
        """Refuse a closed writer; settle a segment in flight: the signal may have come after its commit."""
        if self._closed is not None:
            raise StoreError(
                problem(
                    "HS506",
                    where=self.path,
                    got=f"a writer that is {self._closed}",
                    expected="an open writer",
                    fix="open another with hs.append",
                    severity=Severity.ERROR,
                )
            )
        if self._in_flight is not None and self._settle(self._in_flight) is None:
            e = OSError("the commit was interrupted, and its segment cannot be read")
            raise self._failed(e, f"{SEGMENTS}/{self._name}-{self._in_flight}", committed=None)

    def _failed(self, e: OSError, prefix: str, *, committed: bool | None) -> StoreError:
        """Close the writer and say what is lost, what is kept and how to go on; ``committed`` None: not known."""
        self._closed = "closed after a failed write"
        lost = list(self._pending.rows)
        self._pending.clear()
        fate = "of unknown state, committed or not" if committed is None else "not committed"
        shown = ", ".join(map(repr, lost[:3])) + (", ..." if len(lost) > 3 else "")
        return StoreError(
            problem(
                "HS506",
                where=f"{self.path}/{prefix}",
                severity=Severity.ERROR,
                got=f"{e.strerror or e}; {len(lost)} record(s) {fate}{': ' if lost else ''}{shown}",
                expected="a segment written whole; this writer committed "
                f"{self.records_committed} record(s), which stay",
                fix="free space or restore access, then open the store with hs.append and write the records whose ids "
                "are not in writer.ids",
            )
        )


def _errors(problems: Iterable[Problem]) -> bool:
    return any(p.severity is Severity.ERROR for p in problems)
