"""The child process of a hosted engine: ``python -m hsformat_extractors.hosted.host MODULE:CLASS FD``.

Messages are JSON, one a line. Asks come in on stdin; answers go out on the pipe ``FD``, as they come, since an engine
prints whatever it likes to stdout and stderr (which go to a log). What comes in is read by a thread of its own, so that
the caller never waits for an engine that computes, and windows wait here for the engine rather than the reverse. The
process ends with its stdin: at once, with everything that it started, if the engine is at work then.

In: ``{"kind": "start", "launch": {...}}``, ``{"kind": "run", "window": 3, "asks": [...]}``, ``{"kind": "skip"}``: what
is not begun is not run. Out: ``started``, ``answer``, ``fault``, ``done`` (a window), ``skipped`` (windows),
``alive`` (there is progress), ``failed`` (the driver raised; the process ends).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from hsformat.problems import HsError
from hsformat_extractors.hosted.beat import Beating
from hsformat_extractors.hosted.wire import Answer, Ask, Driver, Launch

__all__ = ["main"]

Message = Mapping[str, Any]
_PATIENCE_S = 60.0


class _Answers:
    """The pipe to whoever asks; written to by two threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._writing = descriptor, threading.Lock()

    def tell(self, kind: str, **data: Any) -> None:
        line = f"{json.dumps({'kind': kind, **data})}\n".encode()
        with self._writing:
            while line:
                line = line[os.write(self._descriptor, line) :]


class _Host:
    """Reads messages in a thread, runs the driver in the main one."""

    def __init__(self, driver: Driver, asks: int, answers: _Answers) -> None:
        self._driver, self._asks, self._answers = driver, asks, answers
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._busy = self._gone = False
        if isinstance(driver, Beating):
            driver.beat.passed_to(lambda: answers.tell("alive"))

    def serve(self) -> None:
        """Serve until stdin ends."""
        threading.Thread(target=self._read, daemon=True).start()
        while (message := self._inbox.get()) is not None and not self._gone:
            self._busy = True
            self._obey(message)
        self._driver.stop()

    def _obey(self, message: Message) -> None:
        if message["kind"] == "start":
            told = dict(self._driver.start(_of(Launch, message["launch"])))
            self._busy = False
            self._answers.tell("started", told=told)
            return
        for found in self._driver.run([_of(Ask, ask) for ask in message["asks"]]):
            self._answers.tell("answer" if isinstance(found, Answer) else "fault", **asdict(found))
        self._busy = False
        self._answers.tell("done", window=message["window"])

    def _read(self) -> None:
        with os.fdopen(self._asks, "rb") as lines:
            for line in lines:
                message = json.loads(line)
                if message["kind"] == "skip":
                    self._skip()
                else:
                    self._inbox.put(message)
        self._gone = True
        if not self._busy:
            self._inbox.put(None)
            time.sleep(_PATIENCE_S)  # in which the driver's stop() and the end of this process come
        _end_all(0)  # whoever asked is gone, or has given up

    def _skip(self) -> None:
        windows = []
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            if message is not None:
                windows.append(message["window"])
        self._answers.tell("skipped", windows=windows)


def _of(kind: Any, data: Mapping[str, Any]) -> Any:
    """Return a message's data as a class of ``wire``, whose sequences are tuples."""
    names = {f.name for f in fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names})


def _no_space(e: BaseException | None) -> bool:
    """Return whether a disk that is full is among the reasons."""
    while e is not None:
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        e = e.__cause__ or e.__context__
    return False


def _end_all(code: int) -> None:
    """End this process and all that it started, at once: an engine's threads and exit handlers may wait for ever."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(code)


def _apart() -> tuple[int, int]:
    """Return descriptors of asks and answers that an engine's processes neither inherit nor read from."""
    asks, answers = os.dup(0), int(sys.argv[2])
    os.set_inheritable(answers, False)  # noqa: FBT003 - os takes it by position alone
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return asks, answers


def main() -> None:
    """Serve one driver."""
    asks, descriptor = _apart()
    answers = _Answers(descriptor)
    module, _, name = sys.argv[1].partition(":")
    code = 1
    try:
        driver: Driver = getattr(importlib.import_module(module), name)()
        _Host(driver, asks, answers).serve()
        code = 0
    except BaseException as e:  # SystemExit as well: an engine may leave in any way
        traceback.print_exc()
        problems = [p.to_dict() for p in e.problems] if isinstance(e, HsError) else []
        answers.tell("failed", error=f"{type(e).__name__}: {e}", no_space=_no_space(e), problems=problems)
    finally:
        sys.stdout.flush()
        _end_all(code)


if __name__ == "__main__":
    main()
