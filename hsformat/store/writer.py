"""The writer: validates records, buffers them, commits them as segments."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, KeysView, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from hsformat.checks import CaptureStats, StateScan, check_record, to_stored
from hsformat.contract import Contract
from hsformat.digests import canonical_json
from hsformat.dtypes import numpy_dtype
from hsformat.problems import InvalidRecord, Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.store.arrays import check_chunk
from hsformat.store.backend import Backend
from hsformat.store.metadata import SEGMENTS, CommitRecord
from hsformat.store.pending import Pending, make_row, write_segment

__all__ = ["SEGMENT_BYTES", "Writer"]

SEGMENT_BYTES = 256 * 1024 * 1024
"""Default bound of the records that wait in memory for the next segment."""


class Writer:
    """Validates records, buffers them and commits them as segments. Made by :func:`create` and :func:`append`.

    A context manager: leaving the block commits what is buffered, after an exception as well, since what was appended
    is whole. Not for use by several threads.

    Attributes
    ----------
    contract
        What the store promises.
    records_committed, segments_committed, bytes_written
        By this writer so far; bytes on the disk.
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
        self._pending = Pending(contract, segment_bytes=segment_bytes, chunk_tokens=chunk_tokens)
        self._sources = {i: s for c in commits for i, s in zip(c.ids, c.source_digests, strict=True)}
        self._closed: str | None = None
        self.records_committed = self.segments_committed = self.bytes_written = 0

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
    def ids(self) -> KeysView[str]:
        """Ids committed when the writer was opened, and those appended to it."""
        return self._sources.keys()

    def source_digest(self, record_id: str) -> str | None:
        """Return the digest of the sample that a known record was made from; None: not recorded.

        Raises
        ------
        KeyError
            The id is not among :attr:`ids`.
        """
        return self._sources[record_id]

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
        self._check_open()
        problems, stats = check_record(self.contract, record)
        if isinstance(record.id, str) and record.id in self._sources:
            problems.append(
                problem(
                    "HS107",
                    where=f"record {record.id!r}: id",
                    got="an id that the store has",
                    expected="an id of its own",
                    record=record.id,
                )
            )
        problems += _json_problems(record)
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
        self._sources[row.id] = row.source_digest
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
            HS506 (error): it could not be written. What was committed before stays; what was buffered is gone, and the
            writer is closed.
        """
        self._check_open()
        if not self._pending:
            return
        n, self._n = self._n, self._n + 1
        prefix = f"{SEGMENTS}/{self._name}-{n}"
        committed = False
        try:
            self.bytes_written += write_segment(
                self._backend,
                self.contract,
                self._pending,
                writer=self._name,
                n=n,
                producer=self.producer,
                chunk_tokens=self._chunk_tokens,
            )
            committed = True
        except FileExistsError as e:  # a segment of this name: whosever it is, it is left alone
            raise self._failed(e, prefix) from e
        except BaseException as e:
            # A signal may have come after the commit: then the records must not be written again.
            committed = _is_there(self._backend, f"{prefix}/zarr.json")
            if not committed:
                self._backend.discard(prefix)
            if isinstance(e, OSError):
                raise self._failed(e, prefix, committed=committed) from e
            raise
        finally:
            if committed:
                self.records_committed += len(self._pending)
                self.segments_committed += 1
                self._pending.clear()

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

    def _check_open(self) -> None:
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

    def _failed(self, e: OSError, prefix: str, *, committed: bool = False) -> StoreError:
        """Close the writer and say what is lost, what is kept and how to go on."""
        self._closed = "closed after a failed write"
        lost = [] if committed else [r.id for r in self._pending.rows]
        kept = self.records_committed + (len(self._pending) if committed else 0)
        if not committed:
            self._pending.clear()
        for i in lost:
            del self._sources[i]
        shown = ", ".join(map(repr, lost[:3])) + (", ..." if len(lost) > 3 else "")
        return StoreError(
            problem(
                "HS506",
                where=f"{self.path}/{prefix}",
                severity=Severity.ERROR,
                got=f"{e.strerror or e}; {len(lost)} record(s) not committed{': ' if lost else ''}{shown}",
                expected=f"a segment written whole; this writer committed {kept} record(s), which stay",
                fix="free space or restore access, then open the store with hs.append and write the records whose ids "
                "are not in writer.ids",
            )
        )


def _errors(problems: Iterable[Problem]) -> bool:
    return any(p.severity is Severity.ERROR for p in problems)


def _is_there(backend: Backend, key: str) -> bool:
    try:
        return backend.size(key) is not None
    except OSError:
        return False


def _json_problems(record: Record) -> list[Problem]:
    """HS604 where the provenance holds what JSON cannot say exactly, such as an integer beyond 2**53."""
    digest: Any = record.source_digest
    where = f"record {record.id!r}: provenance"
    try:
        canonical_json([record.provenance.model_dump(mode="json"), digest])
        if digest is None or isinstance(digest, str):
            return []
        got, where = repr(digest), f"record {record.id!r}: source_digest"
    except ValueError as e:
        got = str(e)
    fix = "give the value as text"
    return [problem("HS604", where=where, got=got, expected="values that JSON keeps", fix=fix, record=record.id)]
