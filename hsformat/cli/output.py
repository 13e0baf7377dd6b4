"""What all commands share: printing problems, and turning errors into exit codes.

May import ``problems`` and ``printable``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from hsformat.printable import accept_all_text
from hsformat.problems import ExitCode, HsError, NothingToOpen, Problem, Severity, exit_code

__all__ = ["echo_problems", "guarded", "human_bytes", "json_errors"]


def guarded(run: Callable[[], Any]) -> int:
    """Run a command and return its exit code; errors of hsformat and of the system are printed, not raised."""
    accept_all_text()
    try:
        run()
    except SystemExit as e:  # typer ends every command so
        if (stopped := _interrupt(e)) is not None:
            return _code_of_interrupt(stopped)
        return e.code if isinstance(e.code, int) else ExitCode.UNABLE
    except HsError as e:
        echo_problems(e.problems, err=True)
        return _code_of(e)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PROBLEMS
    except KeyboardInterrupt as e:
        return _code_of_interrupt(e)
    except (OSError, MemoryError) as e:
        typer.echo(f"hsformat: {type(e).__name__}: {e}", err=True)
        return ExitCode.UNABLE
    return ExitCode.CLEAN


def _interrupt(e: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt among the causes."""
    while e is not None:
        if isinstance(e, KeyboardInterrupt):
            return e
        e = e.__cause__ or e.__context__
    return None


def _code_of_interrupt(e: KeyboardInterrupt) -> int:
    """Say what stopped the command, and return 128 + its number: the signal that the interrupt holds, or SIGINT."""
    number = next((s for s in e.args if isinstance(s, signal.Signals)), signal.SIGINT)
    typer.echo(f"hsformat: stopped by {number.name}", err=True)
    return 128 + int(number)


@contextmanager
def json_errors(*, wanted: bool) -> Iterator[None]:
    """With JSON asked for, what stops a command is printed as JSON on stdout as well: ``{"problems", "exit_code"}``."""
    try:
        yield
    except HsError as e:
        if not wanted:
            raise
        code = _code_of(e)
        report = {"problems": [p.to_dict() for p in e.problems], "exit_code": code}
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
        raise typer.Exit(code) from e


def _code_of(e: HsError) -> int:
    return ExitCode.UNABLE if isinstance(e, NothingToOpen) else max(exit_code(e.problems), ExitCode.PROBLEMS)


def echo_problems(problems: Iterable[Problem], *, err: bool = False) -> None:
    """Print problems, worst first, otherwise in the order found."""
    order = {s: i for i, s in enumerate(Severity)}
    for p in sorted(problems, key=lambda p: order[p.severity]):
        typer.echo(str(p), err=err)


def human_bytes(n: float, *, digits: int = 1) -> str:
    """Return a number of bytes in decimal units: ``27.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.{digits}f} {unit}"
        n /= 1000
    return f"{n:,.{digits}f} TB"
