"""What a draft's config says of layers, and what an engine makes of it: the depths that the draft is fed.

Each reader of an engine looks into its own places. A list that stands where the engine does not look, two lists that
mean different layers, ids that are dropped or doubled: each is a problem. May import ``drafts``, ``ids`` and ``table``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsformat.engines.drafts import ABSENT, Draft, lookup
from hsformat.engines.ids import capturable, default_depths, depths_of, fed, ids_of
from hsformat.engines.rows import CaptureRow, DraftRow, IdKey, IdReader, parse_depth
from hsformat.engines.table import ENGINES, capture_row, known_versions
from hsformat.problems import Problem, ResolveError, Severity, problem

__all__ = ["FedDepths", "fed_depths"]

_TOP, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
_READ_BY = {_TOP: "vllm", _NESTED: "sglang", "eagle_config.layer_ids": "vllm"}
"""Places of EAGLE-3 layer ids, and the engine whose numbers stand there in a folder that is written for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedDepths:
    """The depths that the draft is fed, in order (None: it cannot be told); ``stated``: its config names them."""

    depths: tuple[int, ...] | None
    stated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What one reader finds: ``path`` is None and ``asked`` the default where it finds nothing."""

    reader: IdReader
    path: str | None
    ids: tuple[int, ...]
    asked: tuple[int, ...]


def fed_depths(
    draft: Draft, row: DraftRow, captures: CaptureRow, num_layers: int, engine: str, problems: list[Problem]
) -> FedDepths:
    """Return what the draft is fed; HS304, HS401 (warning), HS402, HS403, HS404 and HS603 are added to ``problems``."""
    title = ENGINES[engine].title if engine in ENGINES else engine
    lists, broken = _stated(draft, row, problems)
    readings = [_read(reader, lists, captures, num_layers) for reader in row.readers]
    first = readings[0]
    if broken:
        return FedDepths(depths=None, stated=True)
    _check_agreement(draft, lists, captures, num_layers, engine, problems)
    if len({_fed(captures, r.asked) for r in readings}) > 1:
        problems.append(_readers_disagree(draft, readings, captures, title))
    if first.path is None:
        problems.append(_undeclared(draft, first, lists, captures, num_layers, title))
        if not first.asked:
            return FedDepths(depths=None, stated=False)
    where = draft.at(first.path) if first.path else f"{title}'s default"
    if not _in_range(where, first, captures, num_layers, title, problems):
        return FedDepths(depths=None, stated=first.path is not None)
    got = fed(captures, first.asked)
    if len(got) < len(first.asked):
        asked = _depths(first.asked)
        fix = "name different layers: a depth that is named twice arrives once, and fc takes the wrong width"
        problems.append(
            problem(
                "HS402", where=where, got=f"depths {asked}, of which {len(got)} arrive", expected="each once", fix=fix
            )
        )
    elif got != list(first.asked):
        fix = f"{title} feeds captures ascending by depth whatever the order of the list: write it ascending"
        listed, expected = _depths(first.asked), f"{_depths(got)}, which is what the draft is fed"
        problems.append(
            problem("HS401", where=where, got=listed, expected=expected, fix=fix, severity=Severity.WARNING)
        )
    return FedDepths(depths=tuple(got), stated=first.path is not None)


def _fed(captures: CaptureRow, asked: Sequence[int]) -> tuple[int, ...]:
    return tuple(fed(captures, asked))


def _stated(draft: Draft, row: DraftRow, problems: list[Problem]) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return the lists that the config has, by path, and whether one is no list of integers from 0 up."""
    paths = dict.fromkeys([key.path for reader in row.readers for key in reader.keys])
    paths |= dict.fromkeys(_READ_BY)
    lists: dict[str, tuple[int, ...]] = {}
    broken = False
    for path in paths:
        value = lookup(draft.config, path)
        if value is ABSENT or value is None:
            continue
        if (wrong := _wrong(value)) is not None:
            code, place, got, expected = wrong
            problems.append(problem(code, where=draft.at(f"{path}{place}"), got=got, expected=expected))
            broken = True
        else:
            lists[path] = tuple(value)
    return lists, broken


def _wrong(value: Any) -> tuple[str, str, str, str] | None:
    if not isinstance(value, list):
        return "HS603", "", repr(value)[:100], "a list of integers"
    for i, x in enumerate(value):
        if type(x) is not int:
            return "HS603", f"[{i}]", repr(x)[:100], "an integer"
        if x < 0:
            return "HS304", f"[{i}]", str(x), "0 or more: a negative id is dropped or counts from the end"
    return None


def _read(reader: IdReader, lists: Mapping[str, tuple[int, ...]], captures: CaptureRow, num_layers: int) -> _Reading:
    for key in reader.keys:
        if ids := lists.get(key.path):
            return _Reading(reader=reader, path=key.path, ids=ids, asked=_meaning(captures, key, ids, num_layers))
    return _Reading(reader=reader, path=None, ids=(), asked=tuple(default_depths(captures, num_layers)))


def _meaning(captures: CaptureRow, key: IdKey, ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    return tuple(depths_of(captures, [i + key.plus for i in ids], num_layers))


def _check_agreement(
    draft: Draft,
    lists: Mapping[str, tuple[int, ...]],
    captures: CaptureRow,
    num_layers: int,
    engine: str,
    problems: list[Problem],
) -> None:
    """Two lists may differ as numbers if each means the same to the engine that looks there."""
    here = {path: ids for path, ids in lists.items() if path in _READ_BY and ids}
    if len(set(here.values())) < 2:
        return
    meanings: dict[str, tuple[int, ...] | None] = {}
    for path, ids in here.items():
        row = captures if _READ_BY[path] == engine else _newest(_READ_BY[path], captures.architectures)
        meanings[path] = None if row is None else _fed(row, depths_of(row, ids, num_layers))
    if len(set(meanings.values())) == 1 and None not in meanings.values():
        return
    got = "; ".join(f"{path} {list(ids)} ({_said(meanings[path], _READ_BY[path])})" for path, ids in here.items())
    fix = "leave the list that is meant, or write each so that it means the same layers (hsformat.engines.emit does)"
    expected = "lists that mean the same layers"
    problems.append(problem("HS404", where=draft.at("layer ids"), got=got, expected=expected, fix=fix))


def _newest(engine: str, architectures: Sequence[str]) -> CaptureRow | None:
    """Return the row of the newest version that knows one of the architectures."""
    for version in reversed(known_versions(engine)):
        for name in architectures:
            try:
                return capture_row(engine, version, name)
            except ResolveError:
                continue
    return None


def _readers_disagree(draft: Draft, readings: Sequence[_Reading], captures: CaptureRow, title: str) -> Problem:
    got = "; ".join(
        f"{r.reader.name} feeds {_depths(fed(captures, r.asked))} "
        + (f"(from {r.path})" if r.path else "(its default: it finds no ids)")
        for r in readings
    )
    paths = [k.path for k in readings[0].reader.keys if all(k in r.reader.keys for r in readings)]
    fix = (
        f"write the ids to {paths[0]} as well, with num_aux_hidden_states" if paths else "use one place that both read"
    )
    where = draft.at("layer ids")
    return problem("HS404", where=where, got=got, expected=f"one meaning for every part of {title}", fix=fix)


def _undeclared(
    draft: Draft,
    reading: _Reading,
    lists: Mapping[str, tuple[int, ...]],
    captures: CaptureRow,
    num_layers: int,
    title: str,
) -> Problem:
    path = reading.reader.keys[0].path
    elsewhere = [f"{p} {list(ids)}" for p, ids in lists.items() if ids]
    who = f"{title}{f' ({reading.reader.name})' if reading.reader.name else ''}"
    got = "no layer ids" if not elsewhere else f"ids at {', '.join(elsewhere)} alone, where {who} does not look"
    if any(not ids for ids in lists.values()):
        got = f"an empty list of layer ids{f'; {got}' if elsewhere else ''}"
    if reading.asked:
        got += f": it fills in depths {_depths(fed(captures, reading.asked))}"
    own = ids_of(captures, sorted(set(reading.asked)), num_layers)
    fix = f"write the ids that are meant to {path}"
    if own:
        fix += f"; if its default is meant, {own}"
    return problem("HS403", where=draft.at(path), got=got, expected=f"layer ids at {path}", fix=fix)


def _in_range(
    where: str, reading: _Reading, captures: CaptureRow, num_layers: int, title: str, problems: list[Problem]
) -> bool:
    deepest = parse_depth(captures.deepest, num_layers)
    bad = [(i, d) for i, d in enumerate(reading.asked) if not capturable(captures, d, num_layers)]
    for i, depth in bad:
        named = f"id {reading.ids[i]}, depth {depth}" if reading.ids else f"depth {depth}"
        fix = f"name a depth that {title} captures: another one is dropped, repeated or kills it"
        expected = f"depths {captures.lowest} to {deepest} of {num_layers} layers"
        problems.append(problem("HS304", where=f"{where}[{i}]", got=named, expected=expected, fix=fix))
    return not bad


def _said(depths: tuple[int, ...] | None, engine: str) -> str:
    title = ENGINES[engine].title
    return f"unknown to {title}" if depths is None else f"depths {_depths(depths)} to {title}"


def _depths(depths: Sequence[int]) -> str:
    return f"[{', '.join(f'd{d}' for d in depths)}]"
