"""Shared set-up: Hypothesis profiles, a contract, and the options of tests/matrix.py.

Nothing is skipped because a package is not there: a test whose imports fail has failed. Where torch cannot be had,
``--without torch`` says so, and the tests marked ``needs("torch")`` are left out; a module that imports it has the
mark as ``pytestmark`` and is not imported at all.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: threads of OpenMP that spin while they wait slow workers that share cores several times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))  # ``from factories import ...`` in any test

from draft_folders import Look
from factories import tiny_contract
from s3_server import environment, request, s3_server

from hsformat.contract import Contract

# A command that a shell starts in the background ignores Ctrl-C, and so do its children: tests send it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Transformers' log keeps the stderr that it began with, which pytest has closed when a later test has it say something.
logging.raiseExceptions = False
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def contract() -> Contract:
    """Return a tiny valid contract."""
    return tiny_contract()


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Return what inspects a draft folder beside a target."""
    return Look(tmp_path)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hsformat")
    group.addoption(
        "--without", action="append", default=[], metavar="PACKAGE", help="leave out tests marked needs(PACKAGE)"
    )
    group.addoption("--counts", metavar="FILE", help="write the numbers of tests that passed, failed, ... as JSON")


@cache
def needs_of_module(path: Path) -> frozenset[str]:
    """Return what a module's ``pytestmark = pytest.mark.needs(...)`` names, without importing the module."""
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=ast.Call(func=ast.Attribute(attr="needs"))):
                return frozenset(str(ast.literal_eval(a)) for a in node.value.args)  # type: ignore[attr-defined]  # a call of the mark
    return frozenset()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    without = set(config.getoption("--without"))
    if without and collection_path.suffix == ".py" and without & needs_of_module(collection_path):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = set(config.getoption("--without"))
    left_out = [i for i in items if any(without & set(m.args) for m in i.iter_markers("needs"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in set(left_out)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if path := config.getoption("--counts"):
        outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in outcomes}
        Path(path).write_text(json.dumps(counts), "utf-8")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Start a server of S3's protocol; return its address."""
    with s3_server() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a new bucket of that server, with the environment set as a user sets it."""
    for name in [k for k in os.environ if k.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(s3_address).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{secrets.token_hex(8)}"
    request(s3_address, "PUT", f"/{bucket}")
    return bucket


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; return (exit code, stdout, stderr)."""
    from hsformat.cli.commands import app
    from hsformat.cli.output import guarded

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hsformat", *map(str, words)])
        capsys.readouterr()
        code = guarded(app)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
