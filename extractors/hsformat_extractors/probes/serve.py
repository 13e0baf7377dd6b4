"""The child process that runs an engine: ``python -m hsformat_extractors.probes.serve MODULE:CLASS``.

One job a line on stdin, as JSON; the answer is a file, renamed into place, since an engine may print whatever it likes
and be killed at any time. It ends with its stdin.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hsformat_extractors.processes import how_ended

__all__ = ["ANSWER", "FEATURES", "LOGITS", "Driver", "Forking", "Job", "job_of", "write_array"]

ANSWER, FEATURES, LOGITS = "answer.json", "features.npy", "logits-{}.npy"
"""Files of a job's folder: the answer, written last; the input of ``fc``, [T, K * H]; logits, [n, V], by number.

The answer is JSON: ``error``, what the engine raised, ``died``, how the process ended that served the job (null: it did
not), and ``forked``, whether that was one of its own, so that this one is as it was.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One draft to serve.

    Attributes
    ----------
    target, draft
        Model folders.
    out
        Folder for what is seen.
    prompt
        Token ids.
    slots, hidden
        Captures that the draft's ``fc`` takes, and the width of each.
    vocabularies
        Widths of logits that are of interest.
    dtype
        To run in.
    """

    target: str
    draft: str
    out: str
    prompt: tuple[int, ...]
    slots: int
    hidden: int
    vocabularies: tuple[int, ...]
    dtype: str


class Driver(Protocol):
    """How one engine is given a target, a draft and a prompt. Constructed once in the child process."""

    def serve(self, job: Job) -> None:
        """Start the engine with the job's draft, generate a few tokens greedily, stop it.

        What modules do is written to the job's folder (``watch``).
        """
        ...


@runtime_checkable
class Forking(Protocol):
    """A driver whose jobs may each be served by a fork of the child process, so that an engine is imported once."""

    def prepare(self) -> bool:
        """Import what the jobs need; return whether to fork. No thread may be running then."""
        ...


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array so that it is there whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as f:
        np.save(f, array, allow_pickle=False)
    part.replace(path)


def _serve(driver: Driver, job: Job) -> str | None:
    """Serve a job; return what was raised."""
    try:
        driver.serve(job)
    except Exception as e:  # whatever an engine raises is what came of the trial
        traceback.print_exc()
        return f"{type(e).__name__}: {e}"
    return None


def job_of(data: Mapping[str, Any]) -> Job:
    """Return the job of JSON-able data."""
    return Job(**{**data, "prompt": tuple(data["prompt"]), "vocabularies": tuple(data["vocabularies"])})


def _tell(job: Job, *, error: str | None = None, died: str | None = None, forked: bool) -> None:
    _write_json(Path(job.out) / ANSWER, {"error": error, "died": died, "forked": forked})


def _write_json(path: Path, data: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def _answer(driver: Driver, job: Job) -> None:
    _tell(job, error=_serve(driver, job), forked=False)


def _in_a_fork(driver: Driver, job: Job) -> None:
    """Serve a job in a fork, and end what it started: this process is as before, whatever an engine does to its own."""
    sys.stdout.flush()
    raised = Path(job.out) / "raised.json"
    pid = os.fork()
    if pid == 0:
        _write_json(raised, _serve(driver, job))
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    _end_group()
    code = os.waitstatus_to_exitcode(status)
    if code or not raised.exists():  # an engine may leave with code 0 in the middle of a job
        _tell(job, died=how_ended(code), forked=True)
    else:
        _tell(job, error=json.loads(raised.read_text("utf-8")), forked=True)


def _end_group() -> None:
    """Kill all other processes of this one's group, as far as the system lists them."""
    if os.getpgrp() != os.getpid():
        return  # the group is of whoever started this by hand
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone in this moment
            if int(entry.name) != os.getpid() and os.getpgid(int(entry.name)) == os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)


def main() -> None:
    """Serve the jobs of stdin."""
    module, _, name = sys.argv[1].partition(":")
    driver: Driver = getattr(importlib.import_module(module), name)()
    serve = _in_a_fork if isinstance(driver, Forking) and driver.prepare() else _answer
    for line in sys.stdin:
        serve(driver, job_of(json.loads(line)))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads and exit handlers may wait for ever


if __name__ == "__main__":
    main()
