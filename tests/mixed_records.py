"""Records with fields, some of them generated with positions of their own: what a repair has to keep."""

from __future__ import annotations

from typing import Any

import numpy as np
from factories import digest, tiny_contract, tiny_record

from hsformat.record import Generation, Provenance

FIELDS = [
    {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": False},
    {"name": "label", "axis": "record", "dtype": "int16", "shape": [2], "must_understand": False},
]
CONTRACT = tiny_contract(fields=FIELDS)
GENERATED = Provenance(generation=Generation(mode="greedy", max_new_tokens=3), template_digest=digest("a"))


def record(i: int) -> Any:
    """Return a record; every third one is generated, with T - 1 states and positions of its own."""
    changes: dict[str, Any] = {"source_digest": digest(f"{i % 10}")}
    if i % 3 == 2:
        whole = tiny_record(CONTRACT, tokens=20, seed=i)
        changes |= {
            "provenance": GENERATED,
            "hidden": {k: v[:-1] for k, v in whole.hidden.items()},
            "position_ids": np.arange(20) // 2,
        }
    return tiny_record(CONTRACT, f"r{i}", tokens=20, seed=i, **changes)


RECORDS = [record(i) for i in range(6)]
WANTED = {r.id: r for r in RECORDS}
