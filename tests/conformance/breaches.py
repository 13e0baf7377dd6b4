"""What cases of broken rules are made of: a case is a function marked ``@breaks("R-4")``.

It damages a valid store in the one way that the rule forbids, or returns the problems with which a reader or a writer
refused. ``root_breaches``, ``record_breaches`` and ``segment_breaches`` hold them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.problems import Problem

Case = Callable[[Path], list[Problem] | None]
FIELD = {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": True}


class Breaches:
    """Cases by their rules; called with a rule, it is the decorator that adds one."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, Case]] = []

    def __call__(self, rule: str) -> Callable[[Case], Case]:
        def register(case: Case) -> Case:
            self.cases.append((rule, case))
            return case

        return register


def refused(**changes) -> list[Problem]:
    """Append a record to a new writer and return why it was refused."""
    contract = changes.pop("contract", None) or tiny_contract()
    with tempfile.TemporaryDirectory() as folder, hs.create(Path(folder) / "x", contract) as writer:
        with pytest.raises(hs.InvalidRecord) as e:
            writer.append(tiny_record(contract, **changes))
        return e.value.problems
