"""The driver: runs any extractor into a store, with resume, quarantine and an orderly stop.

One loop for all engines. Records are matched to samples by id; what an engine returns is compared with what it was
sent; what fails is quarantined with its codes and the rest goes on; what is committed stays. May import everything
below ``cli``, no engine.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import hsformat.store as hs_store
from hsformat.contract import Contract
from hsformat.extraction.answers import check_answer
from hsformat.extraction.drift import contract_drift, duplicates, mixed_generation, record_drift
from hsformat.extraction.protocol import ExtractionRequest, Extractor, Rejected
from hsformat.extraction.quarantine import Quarantine
from hsformat.extraction.registry import isolated
from hsformat.extraction.space import check_space
from hsformat.problems import (
    ContractMismatch,
    ExitCode,
    InvalidRecord,
    Problem,
    Severity,
    StoreError,
    exit_code,
    problem,
)
from hsformat.record import Record, TokenSample
from hsformat.store import Store, Writer
from hsformat.store.arrays import Dimensions

__all__ = ["ExtractionReport", "Listener", "extract_to_store"]

COMMIT_SECONDS = 120.0
"""A segment is committed at the latest after this time, so that a kill costs minutes whatever the speed."""


@dataclass(kw_only=True)
class ExtractionReport:
    """What a run did.

    Attributes
    ----------
    written, tokens, nbytes
        Records committed by this run, their tokens, bytes of their states.
    skipped
        Samples whose record was in the store already.
    quarantined
        Samples that gave no record, by code of their first error.
    problems
        All problems of the run but those of quarantined records, which are in the quarantine file.
    quarantine_path
        That file; None: nothing is quarantined.
    interrupted
        The signal that ended the run, or None.
    seconds
        Wall time.
    """

    written: int = 0
    tokens: int = 0
    nbytes: int = 0
    skipped: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    quarantine_path: Path | None = None
    interrupted: signal.Signals | None = None
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number after an interruption, otherwise as for its problems and quarantined records."""
        if self.interrupted is not None:
            return 128 + int(self.interrupted)
        return max(exit_code(self.problems), ExitCode.PROBLEMS if self.quarantined else ExitCode.CLEAN)


class Listener(Protocol):
    """Told about progress after each sample, and before the first if there are problems; ``hsformat.cli.progress``."""

    def __call__(self, report: ExtractionReport) -> None:
        """Show the report as it stands."""
        ...


def extract_to_store(
    extractor: Extractor,
    samples: Iterable[TokenSample],
    *,
    request: ExtractionRequest,
    contract: Contract,
    out: str | Path,
    segment_bytes: int | None = None,
    commit_seconds: float = COMMIT_SECONDS,
    ignore_disk_space: bool = False,
    listener: Listener = lambda report: None,
) -> ExtractionReport:
    """Extract samples into a store, new or begun before.

    The extractor is loaded here, after the store was opened, what the missing samples need was compared with the free
    space of the disk, and a first sample was found that is not in it. It is closed at the end. SIGINT or SIGTERM ends
    the run after what the extractor has in hand and commits; a second one, or one while the extractor is loaded, ends
    it at once by KeyboardInterrupt, whose argument is the signal, and what was not committed is lost.

    Parameters
    ----------
    samples
        Consumed as needed. Ids that the store has are skipped. To be compared with the free space they are read once
        more, before; what can be iterated only once (an iterator) is not.
    out
        A new path or address, or a store of the same contract (the target's name and revision may differ).
    segment_bytes
        Bound of a segment in memory; None: the store's default.
    commit_seconds
        A segment is committed after this time at the latest.
    ignore_disk_space
        Go on with a warning where the samples cannot fit by what the file system says is free. It may compress or grow.
    listener
        Told about problems of the beginning, and after each sample.

    Raises
    ------
    ContractMismatch
        HS507, one problem a differing field: the store follows another contract.
    HsError
        The target cannot be loaded, or its states are not what the request says.
    StoreError
        HS506: the disk is too small, and nothing was loaded or written; or it became full. Others: the store cannot be
        opened. What was committed stays.
    """
    options: dict[str, Any] = {} if segment_bytes is None else {"segment_bytes": segment_bytes}
    run = _Run(os.fspath(out), contract, request, options)
    return run(extractor, samples, commit_seconds, listener, ignore_disk_space=ignore_disk_space)


class _Run:
    """The state of one run: what is pending, what is reported, the writer once there is one."""

    def __init__(self, out: str, contract: Contract, request: ExtractionRequest, options: Mapping[str, Any]) -> None:
        self.out, self.contract, self.request, self.options = out, contract, request, options
        self.report = ExtractionReport()
        self.quarantine = Quarantine(out)
        self.pending: dict[str, TokenSample] = {}
        self.writer: Writer | None = None
        self.stored: Store | None = None
        if hs_store.exists(out):
            self._append()
        else:
            hs_store.check_new(out)  # a model is loaded for minutes before the store is made

    def _append(self) -> Writer:
        self.writer = writer = hs_store.append(self.out, **self.options)
        self.report.problems += contract_drift(writer.contract, self.contract, self.out)
        errors = [p for p in self.report.problems if p.severity is Severity.ERROR]
        if errors:
            raise ContractMismatch(errors)
        self.stored = self._open(writer)
        self.report.problems += mixed_generation(self.stored, self.request.generation)
        return writer

    def _open(self, writer: Writer) -> Store:
        return hs_store.open(self.out, understands=[f.name for f in writer.contract.fields])

    def __call__(
        self,
        extractor: Extractor,
        samples: Iterable[TokenSample],
        commit_seconds: float,
        listener: Listener,
        *,
        ignore_disk_space: bool,
    ) -> ExtractionReport:
        started = time.monotonic()

        def tell() -> None:
            self.report.seconds = time.monotonic() - started
            listener(self.report)

        with _Stop() as stop:
            self._check_space(samples, stop, ignore=ignore_disk_space)
            if self.report.problems:
                tell()  # before hours go by
            todo = self._not_yet_stored(samples, stop)
            first = next(todo, None)
            if first is not None:
                try:
                    self._extract(extractor, itertools.chain((first,), todo), stop, commit_seconds, tell)
                except Exception:  # an engine may die of anything
                    if self.writer is not None:
                        self.writer.close()  # what is whole is kept; one that failed is closed already
                    raise
                except BaseException:  # the second Ctrl-C
                    if self.writer is not None:
                        self.writer.abandon()
                    raise
                finally:
                    extractor.close()
            if self.writer is not None:
                self.writer.close()
                self.report.problems += duplicates(self._open(self.writer))
            self.report.interrupted = stop.signal
        if self.report.interrupted is None:
            for sample in self.pending.values():  # asked for and never answered (speculators PR#365)
                self._reject(sample.id, [_unanswered(sample.id)])
        self.report.quarantine_path = self.quarantine.close()
        tell()
        return self.report

    def _check_space(self, samples: Iterable[TokenSample], stop: _Stop, *, ignore: bool) -> None:
        problems = check_space(
            self.out,
            Dimensions.of(self.contract),
            samples,
            known=() if self.writer is None else self.writer.ids,
            max_new_tokens=self.request.generation.max_new_tokens or 0,
            stopping=stop.asked,
        )
        errors = [p for p in problems if p.severity is Severity.ERROR]
        if errors and not ignore:
            raise StoreError(errors)
        self.report.problems += [replace(p, severity=Severity.WARNING) if p in errors else p for p in problems]

    def _extract(
        self,
        extractor: Extractor,
        samples: Iterator[TokenSample],
        stop: _Stop,
        commit_seconds: float,
        tell: Callable[[], None],
    ) -> None:
        with isolated(extractor):
            stop.loading = stop.signal is None
            try:
                extractor.load(self.request)
            finally:
                stop.loading = False
            producer = extractor.producer()
            results = extractor.extract(samples, stopping=stop.asked)
        writer = self._writer(producer)
        committed = time.monotonic()
        while True:
            with isolated(extractor):
                result = next(results, None)
            if result is None:
                return
            self._take(result, writer)
            if time.monotonic() - committed > commit_seconds:
                writer.flush()
                committed = time.monotonic()
            tell()

    def _writer(self, producer: dict[str, Any]) -> Writer:
        writer = self.writer
        if writer is None:
            try:
                self.writer = writer = hs_store.create(self.out, self.contract, **self.options)
            except StoreError:
                if not hs_store.exists(self.out):
                    raise
                writer = self._append()  # another process has made the store since
        writer.producer = producer
        return writer

    def _not_yet_stored(self, samples: Iterable[TokenSample], stop: _Stop) -> Iterator[TokenSample]:
        """Yield samples that have no record yet; those handed out and not answered are pending."""
        for sample in samples:
            if stop.asked():
                return
            if sample.id in self.pending:
                self._reject(sample.id, [_twice(sample.id)])
            elif self.writer is None or sample.id not in self.writer.ids:
                self.pending[sample.id] = sample
                yield sample
            elif drift := record_drift(sample, self.request.generation, self.writer, self.stored):
                self._reject(sample.id, drift)
            else:
                self.report.skipped += 1

    def _take(self, result: Record | Rejected, writer: Writer) -> None:
        if isinstance(result, Rejected):
            self.pending.pop(result.sample.id, None)
            self._reject(result.sample.id, result.problems)
            return
        sample = self.pending.pop(result.id, None)
        if sample is None:
            self._reject(result.id, [_unasked(result.id)])
            return
        if problems := check_answer(self.request, sample, result):
            self._reject(result.id, problems)
            return
        result.source_digest = sample.source_digest
        try:
            self.report.problems += writer.append(result)
        except InvalidRecord as e:
            self._reject(result.id, e.problems)
            return
        self.report.written += 1
        self.report.tokens += result.num_tokens
        self.report.nbytes += sum(h.nbytes for h in result.hidden.values())

    def _reject(self, record_id: str, problems: list[Problem]) -> None:
        errors = [p for p in problems if p.severity is Severity.ERROR] or problems
        self.report.quarantined[errors[0].code] += 1
        self.quarantine.add(record_id, problems)


def _unanswered(record_id: str) -> Problem:
    got, expected = "no answer from the engine", "a record or a reason for every sample"
    return problem("HS102", where=f"record {record_id!r}", got=got, expected=expected, record=record_id)


def _twice(record_id: str) -> Problem:
    got, expected = "two samples of this id", "an id of its own for each sample"
    return problem("HS107", where=f"record {record_id!r}", got=got, expected=expected, record=record_id)


def _unasked(record_id: str) -> Problem:
    got, expected = "a record that was not asked for, or twice", "one record for each sample"
    return problem("HS206", where=f"record {record_id!r}", got=got, expected=expected, record=record_id)


class _Stop:
    """Turns the first SIGINT or SIGTERM into a request to stop, and a second one into KeyboardInterrupt of that signal.

    While ``loading``, when nothing is in hand that could be finished, the first one is a KeyboardInterrupt as well.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.loading = False
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for s in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(s) is not signal.SIG_IGN:  # nohup, or a shell's background job: its choice stands
                    self._old[s] = signal.signal(s, self._handle)
        return self

    def asked(self) -> bool:
        """Return whether to stop."""
        return self.signal is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None or self.loading:
            raise KeyboardInterrupt(signal.Signals(number))
        self.signal = signal.Signals(number)
        with suppress(OSError):  # not print: a signal may come in the middle of one
            os.write(2, b"\nhsformat: stopping after what is in hand; once more: at once\n")

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for s, handler in self._old.items():
            signal.signal(s, handler)
