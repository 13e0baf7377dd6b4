"""Norms of whole records against those of the others (HS203): what :mod:`hsformat.validate.levels` finds, in words.

May import ``contract``, ``problems`` and ``validate.levels``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hsformat.contract import Contract
from hsformat.problems import Problem, problem
from hsformat.validate.levels import (
    FEWEST_RECORDS,
    RECORD_FACTOR,
    Away,
    Profile,
    SegmentNorms,
    Table,
    off_groups,
    off_records,
    profile_of,
    writer_of,
)

__all__ = ["norm_problems"]

EMBEDDING_FACTOR = 8.0
"""A capture so far below all others before depth N looks like the embedding (1.04 against 37 in a public report)."""
SAME_FACTOR = 1.1
"""Captures whose factors differ by less were scaled by one."""
_SHOWN = 3

Levels = Mapping[str, Profile]
"""By capture key."""


def norm_problems(contract: Contract, segments: Sequence[SegmentNorms], *, where: str) -> Iterator[Problem]:
    """Yield HS203 for captures, groups and records whose norms are far from the others; ``where`` is the store."""
    if not segments:
        return
    table = Table(segments)
    profiles = [profile_of(table, k) for k in range(len(contract.captures))]
    levels = {c.key: p for c, p in zip(contract.captures, profiles, strict=True) if p is not None}
    yield from _like_embedding(contract, levels, where=where)
    if levels and len(table.states) >= FEWEST_RECORDS:
        yield from _groups(table, levels, where=where)
        yield from _records(table, levels, where=where)


def _like_embedding(contract: Contract, levels: Levels, *, where: str) -> Iterator[Problem]:
    """Yield captures above depth 0 that are far below the others and have no large number."""
    depths = range(1, contract.target.num_layers)
    inner = {c.key: levels[c.key] for c in contract.captures if c.depth in depths and c.key in levels}
    norms = {key: math.exp(p.typical) for key, p in inner.items()}
    shown = ", ".join(f"{key} {norm:.3g}" for key, norm in norms.items())
    for key, p in inner.items():
        others = [norm for other, norm in norms.items() if other != key]
        if others and norms[key] * EMBEDDING_FACTOR <= min(others) and p.max_abs < norms[key]:
            yield problem(
                "HS203",
                where=f"{where}: hidden/{key}",
                got=f"typical norms {shown}: {key} looks like the embedding",
                expected=f"the residual stream at the depth of {key}",
                fix="see which state the extractor's first number stands for (0 is the embedding output in most); "
                "validate with --target MODEL, which compares the states with the embedding's rows",
            )


def _groups(table: Table, levels: Levels, *, where: str) -> Iterator[Problem]:
    """Yield one finding a writer: it has written the groups that are off, and often nothing else."""
    off = {key: off_groups(p, table) for key, p in levels.items()}
    wrong = np.any(list(off.values()), axis=0)
    by_writer: dict[str, list[int]] = {}
    for g, name in enumerate(table.group_names):
        by_writer.setdefault(writer_of(name), []).append(g)
    for writer, groups in by_writer.items():
        told = [g for g in groups if wrong[g]]
        if not told:
            continue
        names = [table.group_names[g] for g in told]
        members = np.concatenate([table.members[g] for g in told])
        found = {k: float(np.nanmedian(levels[k].level[members])) for k, off_G in off.items() if off_G[told].any()}
        away = {k: level - levels[k].typical for k, level in found.items()}
        states = float(np.median(table.states[members]))
        means = {k: math.exp(level) * (1 + levels[k].sink / states) for k, level in found.items()}
        whole = f", all that writer {writer} has written" if len(told) == len(groups) else ""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(f"{k} {math.exp(x):.4g} ({_times(away[k])})" for k, x in found.items())
        yield problem(
            "HS203",
            where=f"{where}/segments/{', '.join(names[:_SHOWN])}{more}: hidden/{', '.join(found)}",
            got=f"typical norms of {shown} in {len(members):,} records{whole}",
            expected=", ".join(f"{k} {math.exp(levels[k].typical):.4g}" for k in found) + ", as in the other segments",
            fix=f"{_advice(away, _resembled(means, states, levels), captures=len(levels))}; two extractors, versions "
            "or options in one store look so (hsformat info --format json shows the producers)",
        )


def _records(table: Table, levels: Levels, *, where: str) -> Iterator[Problem]:
    """Yield one finding a record, with all captures that are off."""
    told: dict[int, list[Away]] = {}
    for key, p in levels.items():
        for record, away in off_records(key, p, table):
            told.setdefault(record, []).append(away)
    for record, found in sorted(told.items()):
        segment, rid = table.place(record)
        states = int(table.states[record])
        like = _resembled({a.key: a.mean_l2 for a in found}, states, levels)
        yield problem(
            "HS203",
            where=f"{where}/segments/{segment}: record {rid!r}: hidden/{', '.join(a.key for a in found)}",
            got=f"mean norms over {states} states of "
            + ", ".join(f"{a.key} {a.mean_l2:.4g} ({_times(a.away)})" for a in found),
            expected=", ".join(f"{a.key} {a.least:.4g} to {a.most:.4g}" for a in found) + ", as others of that length",
            fix=_advice({a.key: a.away for a in found}, like, captures=len(levels)),
            record=rid,
        )


def _times(away: float) -> str:
    return f"{math.exp(away):.3g} times the usual"


def _resembled(means: Mapping[str, float], states: float, levels: Levels) -> dict[str, list[str]]:
    """Return for each of these captures those whose usual norm it has, the nearest first."""
    out = {}
    for key, mean in means.items():
        away = {k: abs(math.log(mean) - math.log1p(q.sink / states) - q.typical) for k, q in levels.items() if k != key}
        if near := sorted((k for k, x in away.items() if x < math.log(RECORD_FACTOR)), key=away.__getitem__):
            out[key] = near
    return out


def _advice(away: Mapping[str, float], resembled: Mapping[str, Sequence[str]], *, captures: int) -> str:
    """Return what to look for; ``away`` has the captures that are off, of so many, as logarithms of factors."""
    for a, others in resembled.items():
        for b in others:
            if a in resembled.get(b, ()):
                return f"{a} and {b} have each other's usual norm: see whether these captures were exchanged"
    factors = np.exp(list(away.values()))
    if len(away) == captures > 1 and factors.max() < SAME_FACTOR * factors.min():
        times = f"{np.median(factors):.3g} times"
        return f"all captures are about {times} what is usual: see whether a scale was lost or applied twice"
    if len(away) == 1 and resembled:
        ((a, (b, *_)),) = resembled.items()
        return f"{a} has about the usual norm of {b}: see whether it holds that depth"
    return (
        "see whether it is another depth, before or after the final norm, or a scale was lost; text that repeats "
        "itself has such norms, too"
    )
