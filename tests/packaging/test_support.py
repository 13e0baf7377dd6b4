"""docs/support.md, tests/matrix.py and pyproject.toml tell of one set of versions; tests run without torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import matrix
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from hsformat.engines import ENGINES, known_versions

ROOT = Path(__file__).parents[2]
SUPPORT = (ROOT / "docs/support.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
    if not text.startswith("hsformat[")
]
PYTHONS = [
    m[1] for c in PROJECT["classifiers"] if (m := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c))
]


UNRECORDED = "No run of all rows is recorded for this code yet."
"""What stands in place of the table until then: nothing is claimed that was not run."""


def bound(requirement: Requirement, operator: str) -> str | None:
    return next((s.version for s in requirement.specifier if s.operator == operator), None)


def recorded() -> list[dict[str, str]]:
    """Return the rows of the table in docs/support.md."""
    block = SUPPORT.split(matrix.BEGIN)[1].split(matrix.END)[0]
    lines = [x for x in block.splitlines() if x.startswith("| ")]
    if block.strip() == UNRECORDED:
        return []
    head, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_lowest_constraints_are_the_lower_bounds():
    pins = dict(line.split("==") for line in matrix.LOWEST.read_text("utf-8").splitlines() if not line.startswith("#"))
    assert {canonicalize_name(k): v for k, v in pins.items()} == {
        canonicalize_name(r.name): bound(r, ">=") for r in REQUIREMENTS
    }


def test_one_package_has_one_range():
    ranges: dict[str, set[str]] = {}
    for r in REQUIREMENTS:
        ranges.setdefault(canonicalize_name(r.name), set()).add(str(r.specifier))
    assert {name: found for name, found in ranges.items() if len(found) > 1} == {}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    assert {str(Requirement(b).specifier) for b in build} <= ranges["hatchling"]


def test_upper_bounds_are_those_that_are_explained():
    bounded = {f"{r.name}<{bound(r, '<')}" for r in REQUIREMENTS if bound(r, "<")}
    assert bounded == set(re.findall(r"^ +- `(\w+<\S+)`:", SUPPORT, re.M))
    assert {s.operator for r in REQUIREMENTS for s in r.specifier} <= {">=", "<"}


def test_rows_follow_from_the_pythons_that_are_found():
    rows = {r.name: r for r in matrix.rows(["3.13", "3.11", "3.12"])}
    assert list(rows) == ["3.11", "3.12", "3.13", "lowest"]
    assert rows["lowest"].constraints == matrix.LOWEST
    assert [name for name, r in rows.items() if not r.without] == ["3.11"]
    assert "lowest" not in {r.name for r in matrix.rows(["3.12"])}  # the bounds are those of the oldest Python
    assert not [r for r in matrix.requirements(rows["3.12"]) if "torch" in r or "accelerate" in r]


def test_the_recorded_table_is_of_the_pythons_that_are_claimed():
    table = {row["row"]: row for row in recorded()}
    if not table:
        return
    assert list(table) == [r.name for r in matrix.rows(PYTHONS)]
    assert {row["result"] for row in table.values()} == {"passed"}
    ranges = {canonicalize_name(r.name): r.specifier for r in REQUIREMENTS}
    for name, row in table.items():
        assert row["Python"].startswith(PYTHONS[0] if name == "lowest" else f"{name}.")
        for package in matrix.SHOWN:
            if row[package] != "-":
                assert Version(row[package]) in ranges[package], (name, package)
    for package in matrix.SHOWN:
        lowest = next(r for r in REQUIREMENTS if r.name == package)
        if table["lowest"][package] != "-":
            assert Version(table["lowest"][package]) == Version(bound(lowest, ">=") or "")
    assert table[PYTHONS[0]]["torch"] != "-"


def test_what_the_text_says_of_versions_is_true():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"every Python from {PYTHONS[0]} on" in " ".join(SUPPORT.split())
    torch = next(r for r in REQUIREMENTS if r.name == "torch")
    assert f"its lower bound ({bound(torch, '>=')})" in " ".join(SUPPORT.split())
    for engine in ENGINES:
        assert f"{engine} {known_versions(engine)[-1]}" in " ".join(SUPPORT.split()).lower()
    zarrs = [row["zarr"] for row in recorded()]
    if zarrs:
        assert any(v in SpecifierSet("<3.4") for v in zarrs)
        assert any(v in SpecifierSet(">=3.4") for v in zarrs)


def test_tests_are_collected_without_torch():
    """What needs torch is marked, or it would be an error in the rows of the matrix that do not have it."""
    block = "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", block, "--collect-only", "-q", "-n", "0", "--without", "torch", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "deselected" in done.stdout
    assert "test_extractor_transformers.py" not in done.stdout
    assert "test_store.py" in done.stdout
