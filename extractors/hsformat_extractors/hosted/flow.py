"""Samples to requests, answers to records: windows of requests in flight, bounded by what may be staged at once.

Two windows are with the engine at a time, so that it does not wait for what is read. Answers are matched by request id
alone. What is asked and never answered, answered twice or never asked ends the run: states may then be anybody's.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hsformat.extraction.protocol import ExtractionRequest, Rejected
from hsformat.problems import HsError, Problem, Severity, problem
from hsformat.record import Record, TokenSample
from hsformat_extractors._batching import WINDOW_BATCHES, sample_seed
from hsformat_extractors._fitting import no_answer, no_states, unfit
from hsformat_extractors.hosted.child import HostedEngine
from hsformat_extractors.hosted.reading import Unusable, check, read, record_of
from hsformat_extractors.hosted.wire import Answer, Ask

__all__ = ["Flow", "Limits"]

WINDOWS = 2
TRIES = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds requests.

    Attributes
    ----------
    max_tokens
        Of prompt and answer, as the engine says.
    staged_bytes
        Of the states of all requests in flight.
    token_bytes
        Of the states of one token.
    window
        Requests given to the engine together, at most.
    """

    max_tokens: int
    staged_bytes: int
    token_bytes: int
    window: int


@dataclass(kw_only=True)
class _Pending:
    """A sample with the engine."""

    sample: TokenSample
    nbytes: int
    tries: int = 0
    window: int = -1
    place: int = -1


@dataclass(kw_only=True)
class Flow:
    """All that goes to one engine and comes back; it lives as long as the engine."""

    name: str
    engine: HostedEngine
    request: ExtractionRequest
    staging: Path
    limits: Limits
    stop_token_ids: Sequence[int]
    _run: str = field(default_factory=lambda: secrets.token_hex(4))
    _asked: int = 0
    _windows: dict[int, int] = field(default_factory=dict)
    _next_window: int = 0
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)
    _retries: deque[_Pending] = field(default_factory=deque)
    _skip_sent: bool = False

    # Everything that is asked.

    def extract(self, samples: Iterable[TokenSample], stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each sample, in the order in which answers come.

        Raises
        ------
        HsError
            HS410, HS506: the engine died, hung, or has no space. HS102, HS206: it leaves requests unanswered, or
            answers what it was not asked.
        """
        self._drain()
        source = iter(samples)
        ready: list[_Pending] = []
        left: list[_Pending] = []
        try:
            while True:
                while not stopping() and len(self._windows) < WINDOWS:
                    if not ready:
                        yield from self._collect(source, left, ready)
                    if stopping() or not ready or not self._fits(ready):
                        break
                    self._submit(ready)
                    ready = []
                if not self._windows:
                    return
                yield from self._receive(stopping)
        finally:
            self._retries.clear()

    def ask(
        self, windows: Sequence[Sequence[TokenSample]], *, max_new_tokens: int
    ) -> list[tuple[Answer, dict[str, Any]]]:
        """Run samples, window by window, and return the checked answers in their order with what was staged for each.

        Raises
        ------
        HsError
            As :meth:`extract`; besides whatever is wrong with an answer.
        """
        places = itertools.count()
        out: dict[int, tuple[Answer, dict[str, Any]]] = {}
        problems: list[Problem] = []
        for window in windows:
            pending = [_Pending(sample=s, nbytes=0, place=next(places)) for s in window]
            self._submit(pending, max_new_tokens=max_new_tokens)
        while self._windows:
            message = self.engine.receive()
            if (found := self._take(message)) is None:
                continue
            asked, answer = found
            if isinstance(answer, str):
                if message["again"] is True and asked.tries < TRIES:
                    self._submit([asked], max_new_tokens=max_new_tokens)
                else:
                    problems += no_states(asked.sample, answer, _SEE).problems
                continue
            arrays = self._read(answer, asked, max_new_tokens)
            if isinstance(arrays, Unusable):
                problems += arrays.problems
            else:
                out[asked.place] = answer, arrays
        if problems:
            raise HsError(problems)
        return [out[i] for i in sorted(out)]

    # Windows.

    def _collect(
        self, source: Iterator[TokenSample], left: list[_Pending], ready: list[_Pending]
    ) -> Iterator[Rejected]:
        """Fill a window from retries, what the last one left, and samples; those that cannot be run are yielded."""
        tokens = nbytes = 0
        bound = self.limits.staged_bytes // WINDOWS
        while len(ready) < self.limits.window and tokens < WINDOW_BATCHES * self.request.batch_tokens:
            if self._retries:
                pending = self._retries.popleft()
            elif left:
                pending = left.pop()
            elif (sample := next(source, None)) is None:
                return
            else:
                pending = _Pending(sample=sample, nbytes=self._nbytes(sample))
                if problems := self._unfit(pending):
                    yield Rejected(sample=sample, problems=problems)
                    continue
            if ready and nbytes + pending.nbytes > bound:
                left.append(pending)
                return
            ready.append(pending)
            tokens += len(pending.sample)
            nbytes += pending.nbytes

    def _fits(self, ready: Sequence[_Pending]) -> bool:
        staged = sum(p.nbytes for p in self._pending.values())
        return not self._windows or staged + sum(p.nbytes for p in ready) <= self.limits.staged_bytes

    def _submit(self, window: Sequence[_Pending], *, max_new_tokens: int | None = None) -> None:
        number, self._next_window = self._next_window, self._next_window + 1
        asks = []
        for pending in window:
            request = f"hs{self._run}-{self._asked}"
            self._asked += 1
            pending.tries, pending.window = pending.tries + 1, number
            self._pending[request] = pending
            prompt = tuple(int(i) for i in pending.sample.input_ids)
            seed = self._seed(pending.sample)
            asks.append(Ask(request=request, prompt=prompt, max_new_tokens=max_new_tokens, seed=seed))
        self._windows[number] = len(window)
        self.engine.run(number, asks)

    def _seed(self, sample: TokenSample) -> int | None:
        generation = self.request.generation
        return sample_seed(generation.seed or 0, sample.id) if generation.mode == "sampled" else None

    def _nbytes(self, sample: TokenSample) -> int:
        return (len(sample) + self._new) * self.limits.token_bytes

    @property
    def _new(self) -> int:
        return self.request.generation.max_new_tokens or 0 if self.request.generation.mode != "none" else 0

    def _unfit(self, pending: _Pending) -> list[Problem]:
        sample = pending.sample
        problems = unfit(
            sample,
            vocab_size=self.request.target.vocab_size,
            max_tokens=self.limits.max_tokens,
            max_new_tokens=self._new,
            limit="which the engine takes",
        )
        if not problems and pending.nbytes > self.limits.staged_bytes:
            problems = [
                problem("HS506", where=f"record {sample.id!r}", severity=Severity.ERROR,
                        got=f"states of up to {pending.nbytes:,} bytes",
                        expected=f"at most {self.limits.staged_bytes:,} bytes, which may be staged at once",
                        fix=f"--option staging_mib={-(-pending.nbytes // 2**20)}", record=sample.id)
            ]  # fmt: skip
        return problems

    # Messages.

    def _receive(self, stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
        def tick() -> None:
            if stopping() and not self._skip_sent and len(self._windows) > 1:
                self._skip_sent = True
                self.engine.skip()

        tick()
        message = self.engine.receive(tick)
        if (found := self._take(message)) is None:
            return
        pending, answer = found
        sample = pending.sample
        if isinstance(answer, str):
            failed = Unusable(problems=no_states(sample, answer, _SEE).problems, again=message["again"] is True)
        else:
            arrays = self._read(answer, pending, self._new)
            if not isinstance(arrays, Unusable):
                new = answer.tokens[len(sample) :]
                if len(new) == 1 and new[0] in self.stop_token_ids:
                    yield no_answer(sample)
                else:
                    yield record_of(answer, arrays, sample, self.request)
                return
            failed = arrays
        if failed.again and pending.tries < TRIES:
            self._retries.append(pending)  # not begun once stopping: the next run asks for it
        else:
            yield Rejected(sample=sample, problems=failed.problems)

    def _read(self, answer: Answer, pending: _Pending, max_new_tokens: int) -> dict[str, npt.NDArray[Any]] | Unusable:
        sample = pending.sample
        arrays = read(answer, self.staging, f"record {sample.id!r}")
        if isinstance(arrays, Unusable):
            return arrays
        wrong = check(
            answer,
            arrays,
            sample,
            self.request,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )
        return arrays if wrong is None else wrong

    def _take(self, message: dict[str, Any]) -> tuple[_Pending, Answer | str] | None:
        """Return whose answer a message is, and the answer or the reason why there is none; None: it is no answer."""
        kind = message["kind"]
        if kind == "done":
            self._done(message.get("window"))
        elif kind == "skipped":
            self._skipped(message.get("windows"))
        elif kind in ("answer", "fault"):
            request = message.get("request")
            pending = self._pending.pop(request, None) if isinstance(request, str) else None
            if pending is None:
                raise self._unasked(request)
            self._answered.add(str(request))
            return pending, _answer(message) if kind == "answer" else str(message.get("message"))
        else:
            raise self._strange(f"a message of kind {kind!r}")
        return None

    def _done(self, window: object) -> None:
        if window not in list(self._windows)[:1]:
            raise self._strange(f"the end of window {window}")
        asked = self._windows.pop(next(iter(self._windows)))
        self._answered.clear()
        if missing := [p.sample.id for p in self._pending.values() if p.window == window]:
            raise HsError(
                problem(
                    "HS102",
                    where=f"engine {self.name}",
                    got=f"missing {len(missing):,} of {asked:,} answers, the first for record {missing[0]!r}",
                    expected="an answer for every request",
                    fix="what is committed stays, and the same command asks for the rest; if it returns, report it to "
                    "the engine",
                )
            )

    def _skipped(self, windows: object) -> None:
        self._skip_sent = False
        if not isinstance(windows, list) or not set(windows) <= set(self._windows):
            raise self._strange(f"windows {windows} that were not run")
        for window in windows:
            del self._windows[window]
        self._pending = {r: p for r, p in self._pending.items() if p.window not in windows}

    def _drain(self) -> None:
        """Let go what a caller that went away has left with the engine."""
        if self._windows and not self._skip_sent:
            self._skip_sent = True
            self.engine.skip()
        while self._windows or self._skip_sent:
            found = self._take(self.engine.receive())
            if found is not None and isinstance(found[1], Answer):
                read(found[1], self.staging, "")

    def _unasked(self, request: object) -> HsError:
        twice = request in self._answered
        return HsError(
            problem(
                "HS206",
                where=f"engine {self.name}: request {request!r}",
                got="a second answer" if twice else "an answer to a request that was not made",
                expected="one answer for each request, under its id",
                fix="a defect of the extractor or the engine: whose states these are is not known, so nothing more is "
                "taken from it",
            )
        )

    def _strange(self, got: str) -> HsError:
        return HsError(
            problem("HS410", where=f"engine {self.name}", got=got, expected="messages of hosted.wire",
                    fix="a defect of the extractor's driver")
        )  # fmt: skip


_SEE = "see what the engine says of it; the other records are not touched"


def _answer(message: dict[str, Any]) -> Answer:
    token = message.get("next_token")
    return Answer(
        request=message["request"],
        tokens=tuple(message["tokens"]),
        file=str(message["file"]),
        next_token=token if type(token) is int else None,
    )
