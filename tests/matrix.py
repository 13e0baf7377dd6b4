"""The tests on every Python that is found, and with the lowest versions: python tests/matrix.py (make test-matrix).

Each row has a virtual environment of its own under build/matrix, which pip makes once and brings up to date later. What
a row is follows from pyproject.toml: every Python from ``requires-python`` on that this machine has (one a minor
version; from pyenv and the PATH) with the newest versions that pip finds, and the oldest of them with the lower bounds
of the ranges (tests/constraints-lowest.txt).

torch is in the row of the oldest Python alone, by the build that constraints.txt names: what a registry offers by
default for the others brings gigabytes of libraries for GPUs. The other rows leave out the tests marked
``needs("torch")``.

    python tests/matrix.py               all rows
    python tests/matrix.py 3.13 lowest   these rows
    python tests/matrix.py --record      the table of all rows into docs/support.md, if all have passed with this code
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "matrix"
LOWEST = ROOT / "tests" / "constraints-lowest.txt"
SUPPORT = ROOT / "docs" / "support.md"
SHOWN = ("zarr", "numpy", "pydantic", "transformers", "torch")
"""Packages whose versions stand in the table."""
BEGIN, END = "<!-- tests/matrix.py writes what stands between these lines -->", "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One environment: its name, its Python's minor version, and what it leaves out."""

    name: str
    python: str
    constraints: Path | None
    without: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a row."""

    row: Row
    python: str
    versions: dict[str, str]
    passed: int
    result: str
    seconds: float
    code: str

    @property
    def good(self) -> bool:
        """Whether every test that ran has passed, and some did."""
        return self.result == "passed"


def project() -> dict[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def oldest() -> str:
    """Return the oldest minor version of Python that is supported."""
    return str(project()["requires-python"]).removeprefix(">=")


def minor(version: str) -> tuple[int, ...]:
    """Return ``3.12.1`` as (3, 12)."""
    return tuple(int(n) for n in version.split(".")[:2])


def rows(found: list[str]) -> list[Row]:
    """Return the rows for the minor versions of Python that were found."""
    first = oldest()
    out = []
    for version in sorted(found, key=minor):
        own = version == first
        constraints = ROOT / "constraints.txt" if own else None
        out.append(Row(name=version, python=version, constraints=constraints, without=() if own else ("torch",)))
    if first in found:
        out.append(Row(name="lowest", python=first, constraints=LOWEST, without=("torch",)))
    return out


def pythons() -> dict[str, Path]:
    """Return an interpreter for each minor version from the oldest supported one on: the newest of those found."""
    candidates = [Path(sys.executable)]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(root.glob("versions/*/bin/python"))
    candidates += [Path(p) for n in range(11, 30) if (p := shutil.which(f"python3.{n}"))]
    best: dict[str, tuple[tuple[int, ...], Path]] = {}
    for candidate in candidates:
        version = _version(candidate)
        if version is None or version[:2] < minor(oldest()):
            continue
        name = f"{version[0]}.{version[1]}"
        if name not in best or version > best[name][0]:
            best[name] = version, candidate
    return {name: path for name, (_, path) in best.items()}


def _version(python: Path) -> tuple[int, ...] | None:
    code = "import sys, venv, ensurepip; print(*sys.version_info[:3] * (sys.version_info[3] == 'final'))"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    parts = run.stdout.split()
    return tuple(map(int, parts)) if run.returncode == 0 and len(parts) == 3 else None


def requirements(row: Row) -> list[str]:
    """Return what pip installs: the package with what the tests need, less what the row leaves out."""
    extras = project()["optional-dependencies"]
    if not row.without:
        trackers = [r for r in extras["dev"] if r.startswith("tensorboard")]
        return ["--editable", ".[test,transformers,train]", *trackers]
    left = [r for r in extras["transformers"] if not r.startswith(("torch", "accelerate"))]  # accelerate brings torch
    return ["--editable", ".[test]", *left]


def prepare(row: Row, python: Path) -> Path:
    """Make the environment of a row, or bring it up to date; return its interpreter."""
    folder = BUILD / row.name
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    constraints = [] if row.constraints is None else ["--constraint", str(row.constraints)]
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--upgrade", "--upgrade-strategy", "eager", *constraints]
    if not row.without:  # first, and by its exact version: see the Makefile
        (torch,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
        subprocess.run([*pip, torch], check=True, cwd=ROOT)
    subprocess.run([*pip, *requirements(row)], check=True, cwd=ROOT)
    return inside


def run(row: Row, python: Path, arguments: list[str]) -> Outcome:
    """Run the tests of a row."""
    inside = prepare(row, python)
    code = (
        "import sys, json, importlib.metadata as m;"
        "v = {d.metadata['Name'].lower(): d.version for d in m.distributions()};"
        "print(json.dumps(['.'.join(map(str, sys.version_info[:3])), v]))"
    )
    told = subprocess.run([inside, "-c", code], check=True, capture_output=True, text=True, cwd=BUILD).stdout
    version, installed = json.loads(told)
    report = BUILD / f"{row.name}.json"
    report.unlink(missing_ok=True)
    left = [word for package in row.without for word in ("--without", package)]
    left += ["--ignore", "tests/packaging/test_support.py"]  # about the table, which is not written yet
    command = [str(inside), "-m", "pytest", "-q", "-n", "2", *left, "--counts", str(report), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    seconds = time.monotonic() - began
    counts = json.loads(report.read_text("utf-8")) if report.exists() else {}
    bad = {k: n for k, n in counts.items() if k != "passed" and n}
    if done.returncode == 0 and counts.get("passed") and not bad:
        result = "passed"
    else:
        result = ", ".join(f"{n} {k}" for k, n in bad.items()) or f"pytest ended with {done.returncode}"
    outcome = Outcome(
        row=row,
        python=version,
        versions={name: installed[name] for name in SHOWN if name in installed},
        passed=counts.get("passed", 0),
        result=result,
        seconds=seconds,
        code=code_digest(),
    )
    (BUILD / f"{row.name}.outcome.json").write_text(json.dumps(dataclasses.asdict(outcome), default=str), "utf-8")
    return outcome


def code_digest() -> str:
    """Return a digest of the code that is tested and of its ranges."""
    h = hashlib.sha256()
    for path in sorted([*ROOT.glob("hsformat/**/*.py"), *ROOT.glob("extractors/**/*.py"), ROOT / "pyproject.toml"]):
        h.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return h.hexdigest()


def outcomes_of(known: list[Row]) -> list[Outcome] | str:
    """Return the last outcomes of all rows, or why they make no table."""
    out = []
    for row in known:
        path = BUILD / f"{row.name}.outcome.json"
        if not path.exists():
            return f"row {row.name} has not been run"
        outcome = Outcome(**{**json.loads(path.read_text("utf-8")), "row": row})
        if not outcome.good:
            return f"row {row.name}: {outcome.result}"
        if outcome.code != code_digest():
            return f"row {row.name} was run of other code"
        out.append(outcome)
    return out


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines of the table, as Markdown."""
    head = ("row", "Python", *SHOWN, "tests", "result", "seconds")
    cells = [head]
    for o in outcomes:
        versions = (o.versions.get(name, "-") for name in SHOWN)
        cells.append((o.row.name, o.python, *versions, f"{o.passed:,}", o.result, f"{o.seconds:.0f}"))
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for n, row in enumerate(cells):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if n == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def record(lines: list[str]) -> None:
    """Write the table into docs/support.md."""
    text = SUPPORT.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    SUPPORT.write_text(before + "\n".join([BEGIN, "", *lines, "", END]) + after, "utf-8")


def main() -> int:
    """Run the rows that are asked for, print one table, and return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="names of rows, such as 3.12 or lowest; none: all")
    parser.add_argument("--record", action="store_true", help="write the table into docs/support.md")
    parser.add_argument("--prepare", action="store_true", help="make the environments alone")
    options, arguments = parser.parse_known_args()
    found = pythons()
    known = rows(list(found))
    if unknown := set(options.rows) - {r.name for r in known}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in known)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.record:
        recorded = outcomes_of(known)
        if isinstance(recorded, str):
            parser.error(recorded)
        record(list(table(recorded)))
        return 0
    wanted = [r for r in known if not options.rows or r.name in options.rows]
    if options.prepare:
        for row in wanted:
            prepare(row, found[row.python])
        return 0
    outcomes = []
    for row in wanted:
        print(f"== {row.name}: {found[row.python]}", flush=True)
        outcomes.append(run(row, found[row.python], arguments))
    print("\n".join(table(outcomes)))
    return 0 if all(o.good for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
