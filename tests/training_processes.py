"""Runs of the trainer in processes of their own, which share one import of it: a server forks them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tiny_training import run_tiny

pytestmark = pytest.mark.needs("torch")  # nothing imports this module without it


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hsformat_trainer.loop", "matplotlib.backends.backend_agg", "torch._dynamo"])
    return context


CONTEXT = _context()


def _main(path: list[str], environment: Mapping[str, str], errors: str, run: Callable[..., int], args: Any) -> None:
    sys.path[:0] = [p for p in path if p not in sys.path]
    os.environ.update(environment)
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.exit(run(*args))


def start(
    run: Callable[..., int], *args: Any, errors: Path | str = os.devnull, **environment: str
) -> ForkServerProcess:
    """Start a function in a process of its own; what it prints goes to a file, and what it returns is the exit code."""
    process = CONTEXT.Process(target=_main, args=(sys.path, environment, str(errors), run, args))
    process.start()
    return process


def start_run(
    folder: Path, options: Mapping[str, Any], *, resume: bool = False, errors: Path | str = os.devnull
) -> ForkServerProcess:
    """Start a tiny run."""
    return start(run_tiny, folder, dict(options), resume, errors=errors)


def start_ranks(count: int, run: Callable[..., int], *args: Any, folder: Path, **environment: str) -> list[BaseProcess]:
    """Start a function in several processes that know of each other as ``torchrun`` tells them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **environment}
    return [
        start(run, *args, errors=folder / f"rank{r}.txt", RANK=str(r), LOCAL_RANK=str(r), **shared)
        for r in range(count)
    ]


def ended(process: BaseProcess, seconds: float = 120) -> int | None:
    """Wait for a process and return its exit code."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("the process did not end by itself")
    return process.exitcode


def wait_for_lines(path: Path, count: int, process: BaseProcess, seconds: float = 120) -> None:
    """Wait until a log has so many lines; the process that writes it is under way then."""
    until = time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until, "the log does not grow"
        assert process.is_alive(), f"ended with {process.exitcode} before it was to be stopped"
        time.sleep(0.002)
