"""Wall time, CPU time and memory around optimizer steps, the same for every trainer that is measured. Stdlib alone.

Imported by the processes of ``trainer_peers.py``; one of them runs in an environment that has no hsformat.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path


def peak_mb() -> float:
    """Return the most resident memory that this process had, in MB of 10**6.

    VmHWM and not getrusage: on Linux ru_maxrss of a process that was just started is that of its parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


class Marks:
    """Notes the end of each optimizer step; after the last one it writes what was found and ends the process.

    Ended at once, so that no checkpoint, evaluation or report of either trainer counts.

    Parameters
    ----------
    out
        JSON file to write.
    warmup, steps
        Steps that are left out, and steps that count: time runs from the end of the last left out to the end of the
        last, so that loading, logging and all else between two steps counts.
    """

    def __init__(self, out: Path, *, warmup: int, steps: int) -> None:
        self._out, self._warmup, self._steps = out, warmup, steps
        self._ends: list[tuple[float, float]] = []
        self._tokens: list[int] = []
        self._supervised: list[list[int]] = []
        self.facts: dict[str, object] = {}

    def step(self, *, tokens: int, supervised: Sequence[int]) -> None:
        """Note that a step of so many tokens, with so many supervised rows a step of training-time test, is done."""
        self._ends.append((time.perf_counter(), time.process_time()))
        self._tokens.append(tokens)
        self._supervised.append(list(supervised))
        if len(self._ends) < self._warmup + self._steps:
            return
        first, last = self._ends[self._warmup - 1], self._ends[-1]
        counted = self._supervised[self._warmup :]
        found = {
            "seconds": last[0] - first[0],
            "cpu_seconds": last[1] - first[1],
            "tokens": sum(self._tokens[self._warmup :]),
            "supervised": [sum(column) for column in zip(*counted, strict=True)],
            "peak_mb": peak_mb(),
            **self.facts,
        }
        self._out.write_text(json.dumps(found))
        os._exit(0)
