"""An engine in a child process of its own: it may die, take its caller with it, or hang, and does none of that to us.

SGLang 0.5.23 kills the process that started it when its scheduler fails. The child leads a process group, all of which
is killed with it, so that nothing of an engine stays behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat_extractors.probes.serve import ANSWER, FEATURES, LOGITS, Job
from hsformat_extractors.processes import EngineProcess, one_line, raised

__all__ = ["Answer", "EngineChild"]

_POLL_S = 0.05


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
        self._environment = environment
        self._process: EngineProcess | None = None

    def ask(self, job: Job) -> Answer:
        """Give the child a job and wait for what comes of it."""
        out = Path(job.out)
        out.mkdir(parents=True)
        deadline = time.monotonic() + self._seconds
        began = None if self._process is None else self._process.logged()
        process = self._started()
        try:
            if process.popen.stdin is not None:  # it was opened as a pipe
                process.popen.stdin.write(f"{json.dumps(asdict(job))}\n".encode())
                process.popen.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once: that is seen below
        while not (out / ANSWER).exists():
            if (how := process.ended()) is not None:
                self.close()
                return _nothing(f"the engine died ({how})", process.last_lines(began))
            if time.monotonic() > deadline:
                self.close()
                return _nothing(f"no answer within {self._seconds:g} s", process.last_lines(began))
            time.sleep(_POLL_S)
        told = json.loads((out / ANSWER).read_text("utf-8"))
        if (how := told["died"]) is not None:
            return _nothing(f"the engine died ({how})", process.last_lines(began))
        if (error := told["error"]) is not None:
            if not told["forked"]:
                self.close()  # what an engine that fails leaves in its process is not known: the next has another
            return Answer(features_TW=None, logits=(), outcome=one_line(error), last_lines=process.last_lines(began))
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
        if process is not None:
            process.end()

    def _started(self) -> EngineProcess:
        if self._process is None:
            self._process = EngineProcess(
                "hsformat_extractors.probes.serve", [self._driver], log=self._log, environment=self._environment
            )
        return self._process


def _nothing(what: str, lines: tuple[str, ...]) -> Answer:
    outcome = one_line(": ".join((what, *filter(None, [raised(lines)]))))
    return Answer(features_TW=None, logits=(), outcome=outcome, last_lines=lines)
