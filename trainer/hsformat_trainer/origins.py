"""How the records of a run came about: recorded with each, reported when mixed, never compared silently.

Brings no torch; reads no states.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.record import Provenance
from hsformat.source import RecordSource
from hsformat.store import Store

__all__ = ["origins_of", "templates_of"]

KINDS = ("generation", "chat template", "template arguments", "producer")


def templates_of(source: RecordSource) -> Counter[str | None]:
    """Return the number of records by the digest of their chat template; None: records without one."""
    out: Counter[str | None] = Counter()
    for provenance, _, n in _counted(source, None):
        out[provenance.template_digest] += n
    return out


def origins_of(parts: Sequence[tuple[RecordSource, npt.NDArray[np.int64]]]) -> dict[str, dict[str, int]]:
    """Return for each kind of origin how many records are of which.

    Parameters
    ----------
    parts
        Sources and the numbers of their records that count.
    """
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for source, rows in parts:
        for provenance, producer, n in _counted(source, rows):
            g = provenance.generation
            shown = {k: v for k, v in g.model_dump().items() if k != "mode" and v is not None}
            found["generation"][g.mode + "".join(f", {k} {v}" for k, v in shown.items())] += n
            found["chat template"][provenance.template_digest or "none"] += n
            arguments = json.dumps(provenance.template_kwargs, sort_keys=True)
            found["template arguments"][arguments] += n
            found["producer"][_producer(producer)] += n
    return {kind: dict(counts.most_common()) for kind, counts in found.items()}


def _counted(
    source: RecordSource, rows: npt.NDArray[np.int64] | None
) -> list[tuple[Provenance, Mapping[str, Any] | None, int]]:
    if not isinstance(source, Store):  # another source tells of no producer, and of each record by itself
        numbers = range(len(source)) if rows is None else rows.tolist()
        return [(source.read(row, captures=()).provenance, None, 1) for row in numbers]
    wanted = np.ones(len(source), np.bool_)
    if rows is not None:
        wanted[:] = False
        wanted[rows] = True
    out, start = [], 0
    for segment in source.segments:
        index = np.asarray(segment.provenance_index)[wanted[start : start + segment.records]]
        start += segment.records
        for i, n in zip(*np.unique(index, return_counts=True), strict=True):
            out.append((segment.provenance[int(i)], segment.producer, int(n)))
    return out


def _producer(producer: Mapping[str, Any] | None) -> str:
    """Return name and version, as far as they are said: options of a run are no other producer."""
    if producer is None:
        return "not said"
    named = {k: v for k, v in producer.items() if isinstance(v, (str, int, float))}
    return json.dumps(named, sort_keys=True)
