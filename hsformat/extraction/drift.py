"""Drift: a run that goes on in a store must make what the store holds (HS507).

May import ``contract``, ``record``, ``problems`` and ``store``.
"""

from __future__ import annotations

from hsformat.contract import Contract, differing_fields
from hsformat.problems import Problem, Severity, problem
from hsformat.record import Generation, TokenSample
from hsformat.store import Store, Writer

__all__ = ["contract_drift", "duplicates", "mixed_generation", "record_drift"]


def contract_drift(stored: Contract, asked: Contract, where: str) -> list[Problem]:
    """Return a problem a differing field; a moved or renamed target is a note, since its digests are equal."""
    out = []
    for path, old, new in differing_fields(stored.to_json(), asked.to_json()):
        harmless = path in ("target.name", "target.revision")
        fix = "nothing: it does not decide meaning" if harmless else "write to another store, or ask for the same"
        out.append(
            problem(
                "HS507",
                where=f"{where}: {path}",
                got=f"{new} (this run)",
                expected=f"{old} (the store)",
                severity=Severity.NOTE if harmless else Severity.ERROR,
                fix=fix,
            )
        )
    return out


def mixed_generation(stored: Store, generation: Generation) -> list[Problem]:
    """Return a warning where a store holds records that came about otherwise than this run's will."""
    kinds = {p.generation for s in stored.segments for p in s.provenance} - {generation}
    return [
        problem(
            "HS507",
            where=f"{stored.path}: generation",
            got=f"{generation} (this run)",
            expected=f"{kind} (records of the store)",
            severity=Severity.WARNING,
            fix="nothing, if records of both kinds are wanted in one store; hsformat info counts them",
        )
        for kind in sorted(kinds, key=str)
    ]


def duplicates(stored: Store) -> list[Problem]:
    """Return HS107 a pair of writers that share ids: two runs extracted one data into one store at the same time."""
    first: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for segment in stored.segments:
        for record_id in segment.ids:
            owner = first.setdefault(record_id, segment.writer)
            if owner != segment.writer:
                shared.setdefault((owner, segment.writer), []).append(record_id)
    return [
        problem(
            "HS107",
            where=f"{stored.path}: segments of writers {a} and {b}",
            got=f"{len(ids)} id(s) in both, such as {ids[0]!r}",
            expected="one record of each id; two runs into one store are given different data",
            fix=f"once both runs are at their end: hsformat repair --dedupe {stored.path} keeps one record of each id",
            record=ids[0],
        )
        for (a, b), ids in shared.items()
    ]


def record_drift(sample: TokenSample, generation: Generation, writer: Writer, stored: Store | None) -> list[Problem]:
    """Return why the record that is stored under a sample's id is not the one that this run would make.

    Parameters
    ----------
    generation
        As this run asks for it.
    stored
        What the store held when the run began; None: nothing.
    """
    out = _other_source(sample, writer.source_digest(sample.id))
    if stored is not None and sample.id in stored and not stored.is_ambiguous(sample.id):
        old = stored.provenance(sample.id).generation
        out += [
            problem(
                "HS507",
                where=f"record {sample.id!r}: generation.{path}",
                got=f"{asked} (this run)",
                expected=f"{there} (the store)",
                fix="write to another store, or ask for the same",
                record=sample.id,
            )
            for path, there, asked in differing_fields(old.model_dump(), generation.model_dump())
        ]
    return out


def _other_source(sample: TokenSample, stored: str | None) -> list[Problem]:
    if stored is None or stored == sample.source_digest:
        return []
    return [
        problem(
            "HS507",
            where=f"record {sample.id!r}: source_digest",
            got=f"{sample.source_digest} (this run)",
            expected=f"{stored} (the store)",
            fix="the id is taken by a record of other tokens or mask: give it another id, or write to another store. "
            "If the data is the same, the chat template may print today's date: pin it with --template-kwargs",
            record=sample.id,
        )
    ]
