"""An engine in a child process of its own: it may die, take its caller with it, or hang, and does none of that to us.

SGLang 0.5.23 kills the process that started it when its scheduler fails. The child leads a process group, all of which
is killed with it, so that nothing of an engine stays behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat_extractors.probes.serve import ANSWER, FEATURES, LOGITS, Job

__all__ = ["Answer", "EngineChild"]

_POLL_S = 0.05
_LAST_LINES = 12
_RAISED = re.compile(r"^(?:.* )?((?:\w+\.)*\w*(?:Error|Exception)\b:?.*)$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one job.

    Attributes
    ----------
    features_TW
        The input of the draft's ``fc``; None: it was not seen.
    logits
        All logits that were seen, [n, V] each.
    outcome
        What went wrong, on one line; None: nothing did.
    last_lines
        The end of what the engine printed during the job.
    """

    features_TW: npt.NDArray[Any] | None
    logits: tuple[npt.NDArray[Any], ...]
    outcome: str | None
    last_lines: tuple[str, ...]


class EngineChild:
    """Runs the driver named ``module:class``; started when it is needed, again after it died.

    Parameters
    ----------
    driver
        A class of :class:`hsformat_extractors.probes.serve.Driver`.
    log
        File that takes what the engine prints.
    seconds
        Time limit of one job, the start of the process included.
    environment
        Variables of the child beside those of this process.
    """

    def __init__(self, driver: str, *, log: Path, seconds: float, environment: Mapping[str, str]) -> None:
        self._driver, self._log, self._seconds = driver, log, seconds
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: Job) -> Answer:
        """Give the child a job and wait for what comes of it."""
        out = Path(job.out)
        out.mkdir(parents=True)
        began, deadline = self._logged(), time.monotonic() + self._seconds
        process = self._started()
        try:
            if process.stdin is not None:  # it was opened as a pipe
                process.stdin.write(json.dumps(asdict(job)) + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once: that is seen below
        while not (out / ANSWER).exists():
            if (code := process.poll()) is not None:
                self.close()
                return self._nothing(f"the engine died ({_ended(code)})", began)
            if time.monotonic() > deadline:
                self.close()
                return self._nothing(f"no answer within {self._seconds:g} s", began)
            time.sleep(_POLL_S)
        error = json.loads((out / ANSWER).read_text("utf-8"))["error"]
        if error is not None:
            self.close()  # what an engine leaves in its process when it fails is not known: the next one has another
            return Answer(features_TW=None, logits=(), outcome=_one_line(error), last_lines=self._last(began))
        features = out / FEATURES
        logits = sorted(out.glob(LOGITS.format("*")), key=lambda p: int(p.stem.rpartition("-")[2]))
        return Answer(
            features_TW=np.load(features, allow_pickle=False) if features.exists() else None,
            logits=tuple(np.load(p, allow_pickle=False) for p in logits),
            outcome=None if features.exists() else "the draft's fc was not run",
            last_lines=(),
        )

    def close(self) -> None:
        """End the child and everything that it started. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "hsformat_extractors.probes.serve", self._driver],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=self._environment, text=True,
                    start_new_session=True,
                )  # fmt: skip
        return self._process

    def _logged(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _last(self, began: int) -> tuple[str, ...]:
        with self._log.open("rb") as f:
            f.seek(began)
            text = f.read().decode("utf-8", errors="replace")
        return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_LAST_LINES:]

    def _nothing(self, what: str, began: int) -> Answer:
        lines = self._last(began)
        raised = [m[1] for line in lines if (m := _RAISED.match(line))]
        outcome = _one_line(": ".join((what, *raised[-1:])))
        return Answer(features_TW=None, logits=(), outcome=outcome, last_lines=lines)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
