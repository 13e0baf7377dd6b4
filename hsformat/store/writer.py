"""The writer: validates records, hands them to a thread that writes segments, commits those.

The caller's thread validates; everything that changes the store and what is known of it happens in one thread of the
writer's own. A signal reaches the caller's thread alone (Python delivers it nowhere else), so that it can end the wait
for a record or a commit but never cut one in half; whatever is asked next waits until that has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from hsformat.checks import check_record
from hsformat.contract import Contract
from hsformat.digests import canonical_json
from hsformat.dtypes import numpy_dtype
from hsformat.problems import InvalidRecord, Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats, StateScan, to_stored
from hsformat.store.arrays import array_specs, check_chunk, chunk_rows
from hsformat.store.backend import Backend
from hsformat.store.building import Building
from hsformat.store.commit import CommitRecord, load_commit
from hsformat.store.encoder import Encoder, default_threads
from hsformat.store.ended import failed_write, no_thread, no_writer, warn_if_never_closed
from hsformat.store.metadata import SEGMENTS, new_writer
from hsformat.store.pending import MAX_PRODUCER_BYTES, Pending, Row, make_row

__all__ = ["COMMIT_SECONDS", "SEGMENT_BYTES", "Writer"]

SEGMENT_BYTES = 4 * 1024**3
"""Default bound of a segment, in bytes before they are encoded: 10 TB are then about 100,000 files."""

COMMIT_SECONDS = 600.0
"""Default bound of the work that a kill can lose, in seconds from the first record of a segment to its commit."""

_T = TypeVar("_T")


class _Done(NamedTuple):
    """What a writer has committed up to its last segment."""

    records: int = 0
    segments: int = 0
    nbytes: int = 0


class Writer:
    """Validates records and commits them as segments. Made by :func:`create` and :func:`append`.

    A context manager: leaving the block commits what was appended, after an exception as well, since each record is
    whole. One that is never closed loses what it has not committed, and a RuntimeWarning says how much. Not for use by
    several threads, nor after a fork.

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
        chunk_tokens: int | None,
        producer: Mapping[str, Any] | None,
        threads: int | None = None,
        commit_seconds: float = COMMIT_SECONDS,
    ) -> None:
        threads = default_threads() if threads is None else threads
        counts = (segment_bytes, threads, *([] if chunk_tokens is None else [chunk_tokens]))
        if any(type(n) is not int or n <= 0 for n in counts) or not commit_seconds > 0:
            given = f"segment_bytes {segment_bytes}, chunk_tokens {chunk_tokens}, threads {threads}"
            raise ValueError(f"{given} must be integers above 0, and commit_seconds {commit_seconds} above 0")
        for spec in array_specs(contract, tokens=1, states=1, records=1, id_bytes=1, positions=True).values():
            check_chunk(
                chunk_rows(spec, contract.codec, chunk_tokens) * spec.row_bytes,
                where=f"{backend.location}: chunk of {spec.name}",
                fix="lower chunk_tokens" if spec.axis == "state" else "declare a smaller shape",
            )
        self._backend = backend
        self.contract = contract
        self.producer = producer
        self._chunk_tokens, self._threads, self._commit_seconds = chunk_tokens, threads, commit_seconds
        self._name = new_writer()
        self._n = 0
        self._done = _Done()
        self._pending = Pending(contract, segment_bytes=segment_bytes, chunk_tokens=chunk_tokens)
        self._building: Building | None = None
        self._began = 0.0
        self._sources = {i: s for c in commits for i, s in zip(c.ids, c.source_digests, strict=True)}
        self._closed: str | None = None
        self._pid = os.getpid()
        self._encoder: Encoder | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._interrupted = False
        self._never_closed = warn_if_never_closed(self, self._pending, backend.location)

    # What the caller's thread does.

    @property
    def producer(self) -> Mapping[str, Any] | None:
        """Recorded in the segments committed from now on. Setting what is no JSON, or over 1 MiB, is a ValueError."""
        return self._producer

    @producer.setter
    def producer(self, value: Mapping[str, Any] | None) -> None:
        canonical_json(value)
        if (size := len(json.dumps(value))) > MAX_PRODUCER_BYTES:
            raise ValueError(f"a producer of {size} bytes as JSON; at most {MAX_PRODUCER_BYTES}")
        self._producer = value

    @property
    def path(self) -> str:
        """The store's path."""
        return self._backend.location

    @property
    def records_committed(self) -> int:
        """Records that this writer has committed so far."""
        return self._settled()._done.records

    @property
    def segments_committed(self) -> int:
        """Segments that this writer has committed so far."""
        return self._settled()._done.segments

    @property
    def bytes_written(self) -> int:
        """Bytes on the disk of what this writer has committed so far."""
        return self._settled()._done.nbytes

    @property
    def ids(self) -> KeysView[str]:
        """Ids committed when the writer was opened, and those appended to it."""
        self._settled()
        return ChainMap[str, Any](self._pending.rows, self._sources).keys()

    def source_digest(self, record_id: str) -> str | None:
        """Return the digest of the sample that a known record was made from; None: not recorded.

        Raises
        ------
        KeyError
            The id is not among :attr:`ids`.
        """
        row = self._settled()._pending.rows.get(record_id)
        return self._sources[record_id] if row is None else row.source_digest

    def append(self, record: Record) -> list[Problem]:
        """Validate a record and take a copy of it; commit first if it would not fit.

        Returns
        -------
        Problems that do not refuse the record: warnings and notes.

        Raises
        ------
        InvalidRecord
            All problems of the record, HS107 if its id is known. The writer goes on working.
        StoreError
            HS506 (error): the segment could not be written. HS501: the record is more than a segment may hold.
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
        if excess := self._pending.excess(row):
            where, expected = f"record {record.id!r}", "what one segment may hold (docs/spec/1.0.md, rules G-1 and G-7)"
            raise StoreError(
                problem("HS501", where=where, got=excess, expected=expected, fix="store shorter records", record=row.id)
            )
        self._do(lambda: self._add(row, record.hidden))
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
        """Commit what was appended as a segment; nothing happens if nothing was.

        Raises
        ------
        StoreError
            HS506 (error): it could not be written, or nobody can tell whether it was. What was committed before stays,
            what was not is gone, and the writer is closed.
        """
        self._ready()
        if self._pending:
            self._do(self._commit)

    def close(self) -> None:
        """Commit what was appended and refuse further records. May be called twice."""
        if self._pid != os.getpid():  # of a process that was forked: the segment is the parent's
            return
        try:
            if self._settled()._closed is None:
                self.flush()
        finally:
            self._settled()._closed = self._closed or "closed"
            self._stop()

    def abandon(self) -> None:
        """Give up what was appended and not committed, remove what is there of it, and refuse further records."""
        if self._pid == os.getpid() and self._settled()._closed is None:
            self._closed = "abandoned"
            try:
                self._do(self._discard)
            finally:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> None:
        """Refuse a closed writer, and one in a process that was forked, where its threads are not."""
        forked = self._pid != os.getpid()
        if forked or self._settled()._closed is not None:
            got = "a writer of another process" if forked else f"a writer that is {self._closed}"
            raise no_writer(self.path, got)

    def _settled(self) -> Self:
        """Wait for what an interrupt has left under way."""
        if self._interrupted and self._thread is not None and self._pid == os.getpid():
            self._thread.submit(int).result()
            self._interrupted = False
        return self

    def _do(self, change: Callable[[], _T]) -> _T:
        """Make a change in the writer's thread and wait for its end, after an interrupt as well."""
        if self._thread is None:
            self._thread = self._start()
        self._interrupted = True
        try:
            result = self._thread.submit(change).result()
        except BaseException:  # Ctrl-C as well: the change goes on, and is waited for
            self._settled()
            raise
        self._interrupted = False
        return result

    def _start(self) -> ThreadPoolExecutor:
        """Start the writer's thread before it is given anything: a pool keeps what it cannot begin for later."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="hsformat-writer")
        try:
            pool.submit(int).result()
        except RuntimeError as e:
            raise no_thread(self.path, e) from e
        return pool

    def _stop(self) -> None:
        self._never_closed.detach()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._encoder is not None:
            self._encoder.close()

    # What the writer's own thread does.

    def _add(self, row: Row, hidden: Mapping[str, npt.NDArray[Any]]) -> None:
        if self._pending and not self._pending.has_room(row):
            self._commit()
        if self._building is None:
            self._encoder = self._encoder or Encoder(self._threads)
            n, self._n, self._began = self._n, self._n + 1, time.monotonic()
            self._building = Building(
                self._backend,
                self.contract,
                self._pending,
                self._encoder,
                writer=self._name,
                n=n,
                chunk_tokens=self._chunk_tokens,
            )
        with self._failing(self._building, adding=row.id):
            self._building.add(row, hidden)
        if time.monotonic() - self._began > self._commit_seconds:
            self._commit()

    def _commit(self) -> None:
        building = self._building
        if building is None:
            return
        with self._failing(building):
            self._count(building.commit(self.producer))

    def _discard(self) -> None:
        if self._building is not None:
            self._building.abort()
            with contextlib.suppress(OSError):
                self._backend.discard(self._building.prefix)
        self._pending.clear()
        self._building = None

    def _count(self, nbytes: int) -> None:
        d = self._done
        self._done = _Done(d.records + len(self._pending), d.segments + 1, d.nbytes + nbytes)
        self._sources.update((i, row.source_digest) for i, row in self._pending.rows.items())
        self._pending.clear()
        self._building = None

    @contextlib.contextmanager
    def _failing(self, building: Building, *, adding: str | None = None) -> Iterator[None]:
        """Close the writer if what is done fails, and turn an OSError into a StoreError."""
        try:
            yield
        except BaseException as e:  # whatever it is, files are let go of and what is lost is told
            building.abort()
            # A segment of this name, whosever it is, is left alone.
            committed = False if isinstance(e, FileExistsError) else self._fate(building)
            failure = self._failed(e, building.prefix, committed=committed, adding=adding)
            self._pending.clear()
            self._building = None
            if isinstance(e, (OSError, RuntimeError, MemoryError)):  # the disk; no thread; Blosc; no memory
                raise failure from e
            raise

    def _fate(self, building: Building) -> bool | None:
        """Find out whether a segment is committed: count it then, remove what is there of it otherwise.

        Returns
        -------
        None if the place does not say: nothing is counted and nothing removed.
        """
        commit, problems = load_commit(self._backend, building.prefix.removeprefix(f"{SEGMENTS}/"))
        if commit is not None:
            self._count(commit.nbytes)
            return True
        if any(p.code != "HS506" for p in problems):
            return None
        with contextlib.suppress(OSError):
            self._backend.discard(building.prefix)
        return False

    def _failed(self, e: BaseException, prefix: str, *, committed: bool | None, adding: str | None) -> StoreError:
        """Close the writer and return what it says."""
        self._closed = "closed after a failed write"
        lost = [*self._pending.rows, *([] if adding is None else [adding])]
        done = self._done.records
        return failed_write(f"{self.path}/{prefix}", e, lost=lost, committed=committed, records_committed=done)


def _errors(problems: Iterable[Problem]) -> bool:
    return any(p.severity is Severity.ERROR for p in problems)
