"""Which records are evaluated on and not trained on. Brings no torch; reads no states."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsformat.problems import ForeignFileError, NothingToOpen, Problem, Severity, problem
from hsformat.source import RecordSource, SegmentedSource
from hsformat_trainer.admitted import Source
from hsformat_trainer.config import HeldOut

__all__ = ["is_held_out", "lengths_of", "read_ids", "split"]

_SHOWN = 5


def is_held_out(record_id: str, *, share: float, seed: int) -> bool:
    """Return whether a share of the records holds this one: by a hash of id and seed alone.

    A record stays where it is when stores grow, are merged or are given in another order.
    """
    drawn = hashlib.sha256(f"{seed}\0{record_id}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2.0**64


def read_ids(path: str) -> list[str]:
    """Return the ids of a file, one a line; empty lines are left out.

    Raises
    ------
    NothingToOpen, ForeignFileError
        HS602: there is no such file, or it is no UTF-8 text.
    """
    file = Path(path)
    if not file.is_file():
        raise NothingToOpen(
            problem(
                "HS602",
                where=path,
                got="no such file",
                expected="a file of record ids, one a line",
                fix="check the path of --held-out ids:FILE",
            )
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except ValueError as e:
        raise ForeignFileError(problem("HS602", where=path, got=e, expected="record ids as UTF-8, one a line")) from e
    return [line.strip() for line in lines if line.strip()]


def lengths_of(source: RecordSource) -> npt.NDArray[np.int64]:
    """Return [R]: T of each record. A source that does not tell is read once, without its states."""
    if isinstance(source, SegmentedSource):
        return source.token_counts()
    counts = (source.read(row, captures=()).num_tokens for row in range(len(source)))
    return np.fromiter(counts, np.int64, len(source))


def split(
    training: Sequence[tuple[str, RecordSource, float]],
    apart: tuple[str, RecordSource] | None,
    held_out: HeldOut,
    *,
    seed: int,
    most_tokens: int,
    problems: list[Problem],
) -> tuple[Source, ...]:
    """Divide the records into those that are trained on and those that are held out.

    Parameters
    ----------
    training
        Name, records and weight of each source that is trained on.
    apart
        A source of held-out records alone, for ``held_out.store``.
    most_tokens
        Longer records are left out and counted.
    problems
        HS107 (error) is added for a held-out record that is trained on as well, HS107 (warning) for an id that two
        training sources have, HS602 for an id that no source has, HS102 where nothing is left to train on, and where
        nothing is held out: an error of a file or a store that was named for it, a warning of a share. HS102
        also where weights are so small that no epoch has a record: of all stores an error, of one a warning.
    """
    named = read_ids(held_out.ids) if held_out.ids is not None else []
    chosen = frozenset(named)
    owners: dict[str, str] = {}
    twice: Counter[tuple[str, str]] = Counter()
    out = []
    for name, source, weight in training:
        for i in source.ids:
            if (owner := owners.setdefault(i, name)) != name:
                twice[owner, name] += 1
        if held_out.share is not None:
            held = [is_held_out(i, share=held_out.share, seed=seed) for i in source.ids]
        else:
            held = [i in chosen for i in source.ids]
        out.append(_divide(name, source, weight, np.array(held, np.bool_), most_tokens))
    problems += [_same_ids(*pair, n) for pair, n in twice.items()]
    if unknown := [i for i in dict.fromkeys(named) if i not in owners]:
        got = f"{len(unknown)} of {len(chosen)} ids: {_listed(unknown)}"
        where = f"held-out records: {held_out.ids}"
        fix = "name records that the stores have"
        problems.append(problem("HS602", where=where, got=got, expected="ids of records in the stores", fix=fix))
    if apart is not None:
        name, source = apart
        out.append(_divide(name, source, 0.0, np.ones(len(source), np.bool_), most_tokens))
        if both := [i for i in source.ids if i in owners]:
            expected = "records that are trained on, or evaluated on, not both"
            fix = "leave them out of one of the two stores"
            got = f"{len(both)} record(s) of {owners[both[0]]} as well: {_listed(both)}"
            where = f"held-out records: {name}"
            record = both[0] if len(both) == 1 else None
            problems.append(problem("HS107", where=where, got=got, expected=expected, fix=fix, record=record))
    if held_out.share != 0 and not sum(len(s.held_out) for s in out):
        problems.append(_nothing_held_out(held_out, out, named, apart, most_tokens))
    if not sum(len(s.train) for s in out):
        got = f"{sum(len(s.source) for s in out)} records, {sum(len(s.held_out) for s in out)} of them held out, " + (
            f"{sum(s.too_long for s in out)} longer than {most_tokens} tokens"
        )
        fix = "give more records, hold out fewer, or raise --batch-tokens"
        problems.append(problem("HS102", where="stores", got=got, expected="records to train on", fix=fix))
    elif not sum(s.per_epoch for s in out):
        got = f"weights {', '.join(f'{s.weight:g}' for s in out if len(s.train))}: no record in any epoch"
        expected, fix = "at least one record an epoch", "raise --weights"
        problems.append(problem("HS102", where="stores", got=got, expected=expected, fix=fix))
    else:
        problems += [_never_trained(s) for s in out if len(s.train) and not s.per_epoch and s.weight]
    return tuple(out)


def _divide(name: str, source: RecordSource, weight: float, held: npt.NDArray[np.bool_], most_tokens: int) -> Source:
    tokens = lengths_of(source)
    fits = tokens <= most_tokens
    train, evaluated = (np.flatnonzero(rows & fits).astype(np.int64) for rows in (~held, held))
    return Source(
        name=name, source=source, weight=weight, train=train, held_out=evaluated, train_tokens=tokens[train],
        held_out_tokens=tokens[evaluated], too_long=int((~fits).sum()),
    )  # fmt: skip


def _nothing_held_out(
    held_out: HeldOut,
    sources: Sequence[Source],
    named: Sequence[str],
    apart: tuple[str, RecordSource] | None,
    most_tokens: int,
) -> Problem:
    expected = "records to evaluate on: without any the run has no evaluation and no best checkpoint"
    where, severity = "held-out records", Severity.ERROR
    fix = "name others, or say --held-out none if nothing is to be evaluated"
    if held_out.share is not None:
        got = f"none of {sum(len(s.source) for s in sources)} records, by a share of {held_out.share:g}"
        fix = "raise the share, give another --seed, or name records with ids:FILE or store:PATH"
        severity = Severity.WARNING
    elif held_out.ids is not None:
        where += f": {held_out.ids}"
        got = f"{len(named)} ids, of which none is of a record of at most {most_tokens} tokens" if named else "no id"
    else:
        where += f": {held_out.store}"
        count = 0 if apart is None else len(apart[1])
        got = f"{count} records, of which none has at most {most_tokens} tokens" if count else "no record"
    if severity is Severity.ERROR and (named or (apart is not None and len(apart[1]))):
        fix = f"raise --batch-tokens, or {fix}"
    return problem("HS102", where=where, got=got, expected=expected, fix=fix, severity=severity)


def _never_trained(s: Source) -> Problem:
    got = f"weight {s.weight:g} of {len(s.train)} records: none in any epoch"
    fix, severity = "raise its weight, or leave the store out", Severity.WARNING
    return problem("HS102", where=s.name, got=got, expected="a record an epoch", fix=fix, severity=severity)


def _same_ids(a: str, b: str, n: int) -> Problem:
    fix = "nothing, if the ids are of different records; otherwise leave them out of one store"
    got = f"{n} id(s) that {a} has, too"
    expected = "ids of its own"
    return problem("HS107", where=b, got=got, expected=expected, fix=fix, severity=Severity.WARNING)


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:_SHOWN])) + (", ..." if len(ids) > _SHOWN else "")
