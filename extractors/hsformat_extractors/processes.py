"""A child process that runs an engine: it leads a process group, prints into a file, and is ended as a whole.

Used by the probes (``probes.child``) and by the extractors (``hosted.child``). SGLang 0.5.23 kills the process that
started it when its scheduler fails; with the group nothing of an engine stays behind. Private to hsformat_extractors.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["EngineProcess", "how_ended", "one_line", "raised"]

LAST_LINES = 12
_TAIL_BYTES = 64 * 1024
_RAISED = re.compile(r"^(?:.* )?((?:\w+\.)*\w*(?:Error|Exception)\b:?.*)$")
_HARMLESS = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")
"""What a log says before a line, of an exception that ended nothing."""
_POLL_S = 0.02


class EngineProcess:
    """``python -P -m MODULE ARGUMENTS`` as the leader of a process group.

    Parameters
    ----------
    module, arguments
        What is run. ``-P``: a folder of the working directory that is named like an engine does not hide it.
    log
        File that takes what the process and its children print, appended to.
    environment
        Variables beside those of this process.
    keep
        File descriptors that the child inherits.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        keep: Sequence[int] = (),
    ) -> None:
        self._log = log
        self._began = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                pass_fds=tuple(keep), start_new_session=True,
            )  # fmt: skip

    def ended(self) -> str | None:
        """Return how the process ended, ``exit code 3`` or ``SIGKILL``; None: it runs.

        It is not waited for, so that its number, which is that of its group, is not given away before :meth:`end`.
        """
        if self.popen.returncode is not None:
            return how_ended(self.popen.returncode)
        found = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return None
        return how_ended(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def last_lines(self, since: int | None = None, *, count: int = LAST_LINES) -> tuple[str, ...]:
        """Return the end of what was printed since the process was started, or since :meth:`logged` was ``since``."""
        with self._log.open("rb") as f:
            f.seek(max(self._began if since is None else since, self.logged() - _TAIL_BYTES))
            text = f.read().decode("utf-8", errors="replace")
        return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-count:]

    def logged(self) -> int:
        """Return how many bytes the log has."""
        return self._log.stat().st_size if self._log.exists() else 0

    def end(self, *, patience: float = 0.0, grace: float = 0.0) -> None:
        """End the process and all that it started; may be called twice.

        Parameters
        ----------
        patience
            Seconds in which it may end by itself, since its stdin is closed first.
        grace
            Seconds between SIGTERM and SIGKILL, both to the whole group; 0: SIGKILL at once.
        """
        if self.popen.returncode is not None:
            return
        if self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError, OSError):
                self.popen.stdin.close()
        self._wait(patience)
        if grace and self.ended() is None:
            self._signal(signal.SIGTERM)
            self._wait(grace)
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.ended() is None and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)


def raised(lines: Sequence[str]) -> str | None:
    """Return the last line that names an exception, from its name on; none that a log calls less than an error."""
    found = [m[1] for line in lines if (m := _RAISED.match(line)) and not _HARMLESS.search(line[: m.start(1)])]
    return found[-1] if found else None


def one_line(text: str, limit: int = 300) -> str:
    """Return text on one line, cut to a length that fits a message."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def how_ended(code: int) -> str:
    """Return an exit code, or less than 0 the number of a signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
