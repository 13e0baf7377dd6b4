"""The caller's side of a hosted engine: its process, what is sent to it and what it says, without a wait that can hang.

Nothing here knows what an answer means (``flow``). The engine's process may die, print, fork or hang; a read or a write
that makes no progress for the limit of time ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hsformat.problems import HsError, Severity, problem
from hsformat_extractors.hosted.staging import Staging
from hsformat_extractors.hosted.wire import Ask, Launch
from hsformat_extractors.processes import EngineProcess, one_line, raised

__all__ = ["HostedEngine"]

HOST = "hsformat_extractors.hosted.host"
_TICK_S = 0.2
_CHUNK = 1 << 20
_LAST_LINES = 30
"""A traceback and what was printed before it."""
_PATIENCE_S, _GRACE_S = 20.0, 5.0
"""Seconds for an orderly end of an engine that is idle, and between SIGTERM and SIGKILL."""


class HostedEngine:
    """One engine in a child process.

    Parameters
    ----------
    name
        Of the engine, for messages.
    driver
        ``module:class`` of a :class:`~hsformat_extractors.hosted.wire.Driver`.
    log
        File that takes what it prints; kept where the engine failed.
    environment
        Variables of its process beside those of this one.
    staging
        Whose disk may be full.
    start_seconds, seconds
        How long its start may take, and how long it may say nothing after that.
    """

    def __init__(
        self,
        *,
        name: str,
        driver: str,
        log: Path,
        environment: Mapping[str, str],
        staging: Staging,
        start_seconds: float,
        seconds: float,
    ) -> None:
        self._name, self._log, self._staging = name, log, staging
        self._start_seconds, self._seconds = start_seconds, seconds
        self._to_send, self._received = bytearray(), bytearray()
        self._open, self._failed = True, False
        read, write = os.pipe()
        for descriptor in (read, write):
            with contextlib.suppress(OSError):  # as far as the system allows: it only saves waiting
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _CHUNK)
        try:
            self._process = EngineProcess(HOST, [driver, str(write)], log=log, environment=environment, keep=[write])
        except BaseException:  # raised again: nobody would close it
            os.close(read)
            raise
        finally:
            os.close(write)
        self._answers = read
        stdin = self._process.popen.stdin
        assert stdin is not None  # it was opened as a pipe
        self._asks = stdin.fileno()
        os.set_blocking(self._answers, False)
        os.set_blocking(self._asks, False)

    def start(self, launch: Launch, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Start the engine; return what its driver says of it.

        Raises
        ------
        HsError
            HS410: it died or took longer than allowed, with its last lines.
        """
        self._send({"kind": "start", "launch": asdict(launch)})
        message = self._receive(self._start_seconds, tick)
        if message["kind"] != "started" or not isinstance(message.get("told"), dict):
            raise self._broken(f"an unexpected message: {one_line(json.dumps(message))}")
        told: dict[str, Any] = message["told"]
        return told

    def run(self, window: int, asks: Sequence[Ask]) -> None:
        """Give the engine a window of requests, to be run after those that it has; returns at once."""
        self._send({"kind": "run", "window": window, "asks": [asdict(ask) for ask in asks]})

    def skip(self) -> None:
        """Ask it not to run windows that it has not begun; it answers with a message ``skipped``."""
        self._send({"kind": "skip"})

    def receive(self, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the next message; ``tick`` is called while there is none.

        Raises
        ------
        HsError
            HS410: it died, or said nothing for the limit of time. HS506: its staging folder's disk is full.
        """
        return self._receive(self._seconds, tick)

    def close(self, *, orderly: bool = True) -> None:
        """End the engine's process and all that it started; its log goes if it did not fail. May be called twice.

        ``orderly``: it is idle, and is given time to end by itself.
        """
        if not self._open:
            return
        self._open = False
        self._process.end(patience=_PATIENCE_S if orderly else 0.0, grace=_GRACE_S)
        os.close(self._answers)
        if not self._failed:
            self._log.unlink(missing_ok=True)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._to_send += f"{json.dumps(message)}\n".encode()
        self._pump(0.0)

    def _receive(self, seconds: float, tick: Callable[[], None]) -> dict[str, Any]:
        if not self._open:
            raise RuntimeError("the engine has been ended")
        until = time.monotonic() + seconds
        while True:
            if (message := self._next()) is not None:
                if message.get("kind") == "alive":
                    continue  # that it came has moved the limit of time
                if message.get("kind") == "failed":
                    raise self._of_driver(message)
                return message
            ended = self._process.ended()  # before the pipe is read: what it said last is in there
            if self._pump(0.0 if ended else _TICK_S):
                until = time.monotonic() + seconds
            elif ended:
                raise self._broken(f"the engine died ({ended})")
            elif time.monotonic() > until:
                raise self._broken(f"no progress for {seconds:g} s")
            else:
                tick()

    def _next(self) -> dict[str, Any] | None:
        end = self._received.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or "kind" not in message:
            raise self._broken(f"an unexpected message: {one_line(line.decode('utf-8', 'replace'))}")
        return message

    def _pump(self, seconds: float) -> bool:
        """Read and write what can be; return whether anything was."""
        sending = [self._asks] if self._to_send else []
        readable, writable, _ = select.select([self._answers], sending, [], seconds)
        moved = False
        if writable:
            try:
                sent = os.write(self._asks, bytes(self._to_send[:_CHUNK]))
                del self._to_send[:sent]
                moved = sent > 0
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._to_send.clear()  # that it died is seen by the caller
        if readable:
            with contextlib.suppress(BlockingIOError):
                got = os.read(self._answers, _CHUNK)
                self._received += got
                moved = moved or bool(got)
            if not moved:
                time.sleep(min(seconds, _TICK_S))  # the pipe has ended, and the process is about to
        return moved

    def _of_driver(self, message: Mapping[str, Any]) -> HsError:
        """Return what a driver raised: its problems, where it is one of ours."""
        if found := message.get("problems"):
            self.close(orderly=False)
            names = ("where", "got", "expected", "fix", "record")
            return HsError(
                [problem(p["code"], severity=Severity(p["severity"]), **{n: p[n] for n in names}) for p in found]
            )
        return self._broken(str(message.get("error")), no_space=message.get("no_space") is True)

    def _broken(self, what: str, *, no_space: bool = False) -> HsError:
        """End the engine and return the error that says why; its log stays."""
        self._failed = True
        self.close(orderly=False)
        lines = self._process.last_lines(count=_LAST_LINES)
        cause = raised(lines)
        if cause is not None and cause not in what and not what.startswith(cause.partition(":")[0]):
            what = f"{what}: {one_line(cause)}"
        printed = "".join(f"\n    {line}" for line in lines)
        if no_space or any("No space left on device" in line for line in lines):
            return HsError(self._staging.full(f"{what}{printed}"))
        return HsError(
            problem(
                "HS410",
                where=f"engine {self._name}",
                got=f"{what}; its last lines, of {self._log}:{printed or ' none'}",
                expected="an engine that runs to the end",
                fix="mend what the engine says, or give --option timeout or start_timeout if it needs longer; what is "
                "committed stays, and the same command goes on from there",
            )
        )  # fmt: skip
