"""Troubles that others reported in public, and the tests that keep this project from having them.

reported_troubles.json beside this file lists, for each thread, the tests that name it. A test that is listed exists and
names its thread; a thread that a test names is listed. So no such test is lost or renamed unnoticed. After adding one:
``python tests/conformance/test_reported_troubles.py``, which writes the list again; look at what it removes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIST = Path(__file__).with_name("reported_troubles.json")
_THREAD = re.compile(r"(?P<repo>[A-Za-z][\w./-]+(?: Automodel)?)? ?(?P<pull>PR)?#(?P<number>\d{2,})\b")


def threads(text: str) -> Iterator[str]:
    """Yield ``SpecForge#885`` and ``SpecForge PR#895`` of ``SpecForge#885, PR#895``."""
    repo = None
    for m in _THREAD.finditer(text):
        repo = m["repo"] if m["repo"] not in (None, "PR") else repo
        if repo is not None:
            yield f"{repo} PR#{m['number']}" if m["pull"] else f"{repo}#{m['number']}"


@cache
def definitions(path: Path) -> dict[str, frozenset[str]]:
    """Return the threads that each function and class of a module names, in its code, comments or docstring."""
    text = path.read_text("utf-8")
    lines, out = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            out[node.name] = frozenset(threads("\n".join(lines[first - 1 : node.end_lineno])))
    return out


def named() -> dict[str, list[str]]:
    """Return, for each thread that a test names, those tests; for one that a helper of a module names, the module's."""
    out: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        place = path.relative_to(TESTS).as_posix()
        for name, found in definitions(path).items():
            for thread in found:
                own = name.startswith(("test_", "Test"))
                out.setdefault(thread, set()).add(f"{place}::{name}" if own else place)
    return {thread: sorted(out[thread]) for thread in sorted(out, key=str.lower)}


LISTED: dict[str, list[str]] = json.loads(LIST.read_text("utf-8"))


@pytest.mark.parametrize("thread", LISTED)
def test_the_tests_of_a_thread_exist_and_name_it(thread):
    assert LISTED[thread], thread
    for node in LISTED[thread]:
        place, _, name = node.partition("::")
        there = definitions(TESTS / place)
        assert any(n.startswith(("test_", "Test")) for n in there), node
        assert thread in (there[name] if name else frozenset().union(*there.values())), node


def test_every_thread_that_a_test_names_is_listed():
    assert named() == LISTED, "python tests/conformance/test_reported_troubles.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# SpecForge#885, PR#895", ["SpecForge#885", "SpecForge PR#895"]),
        ("NeMo Automodel PR#2256: [1, 1, 1]", ["NeMo Automodel PR#2256"]),
        ("SafeAILab/EAGLE#317, PR#341, #325", ["SafeAILab/EAGLE#317", "SafeAILab/EAGLE PR#341", "SafeAILab/EAGLE#325"]),
        ('ids == ["c#0", "c#1"]', []),
    ],
)
def test_threads_are_found_in_text(text, found):
    assert list(threads(text)) == found


if __name__ == "__main__":
    LIST.write_text(json.dumps(named(), indent=1, ensure_ascii=False) + "\n", "utf-8")
