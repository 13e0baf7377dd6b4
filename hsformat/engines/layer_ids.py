"""What a draft's config says of layers, and what an engine makes of it: the depths that the draft is fed.

Each reader of an engine looks into its own places. A list that stands where the engine does not look, two lists that
mean different layers, ids that are dropped or doubled: each is a problem. May import ``drafts``, ``ids`` and ``table``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from hsformat.engines.drafts import ABSENT, Draft, lookup
from hsformat.engines.ids import capturable, default_depths, depths_of, fed, ids_of
from hsformat.engines.profile import EngineProfile
from hsformat.engines.rows import CaptureRow, DraftRow, IdKey, IdReader, parse_depth
from hsformat.engines.table import ENGINES, capture_row, known_versions
from hsformat.problems import Problem, ResolveError, Severity, problem

__all__ = ["FedBy", "FedDepths", "fed_depths", "shared_key"]

_TOP, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
_READ_BY = {_TOP: "vllm", _NESTED: "sglang", "eagle_config.layer_ids": "vllm"}
"""Places of EAGLE-3 layer ids, and the engine whose numbers stand there in a folder that is written for both."""


_MOST = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBy:
    """What feeds a draft: an engine by its rows, and a target.

    Attributes
    ----------
    profile
        One of this engine or of another; None: there is none.
    versions
        Of the engines that a folder is written for, by engine; empty: only this engine is asked about.
    """

    engine: str
    version: str
    row: DraftRow
    captures: CaptureRow
    architecture: str
    num_layers: int
    profile: EngineProfile | None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The engine's name as its people write it."""
        return ENGINES[self.engine].title if self.engine in ENGINES else self.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class FedDepths:
    """The depths that the draft is fed, in order (None: it cannot be told); ``stated``: its config names them."""

    depths: tuple[int, ...] | None
    stated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What one reader finds: ``path`` is None and ``asked`` the default where it finds nothing.

    ``empty``: it finds an empty list and asks for nothing.
    """

    reader: IdReader
    path: str | None
    ids: tuple[int, ...]
    asked: tuple[int, ...]
    empty: bool = False


def fed_depths(draft: Draft, by: FedBy, problems: list[Problem]) -> FedDepths:
    """Return what the draft is fed; HS304, HS401 (warning), HS402, HS403, HS404 and HS603 are added to ``problems``."""
    title, row, captures, num_layers = by.title, by.row, by.captures, by.num_layers
    lists, broken = _stated(draft, row, problems)
    readings = [_read(draft, reader, lists, by) for reader in row.readers]
    first = readings[0]
    if broken:
        return FedDepths(depths=None, stated=True)
    _check_agreement(draft, lists, by, problems)
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


def shared_key(row: DraftRow) -> IdKey | None:
    """Return the first place that every reader of an engine looks into."""
    return next((key for key in row.readers[0].keys if all(key in reader.keys for reader in row.readers)), None)


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
            fix = "write the ids as a list of whole numbers, as the engine counts layers (docs/engines.md)"
            problems.append(problem(code, where=draft.at(f"{path}{place}"), got=got, expected=expected, fix=fix))
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
            return "HS304", f"[{i}]", repr(x)[:100], "0 or more: a negative id is dropped or counts from the end"
        if x > _MOST:
            return "HS304", f"[{i}]", "a number of more than 9 digits", "the number of a layer"
    return None


def _read(draft: Draft, reader: IdReader, lists: Mapping[str, tuple[int, ...]], by: FedBy) -> _Reading:
    loads = by.row.loads
    for key in reader.keys:
        ids = lists.get(key.path)
        if ids == () and loads.empty_ids == "nothing":
            return _Reading(reader=reader, path=None, ids=(), asked=(), empty=True)
        hidden = (
            lookup(draft.config, h.by) for h in loads.hidden_keys if (h.reader, h.path) == (reader.name, key.path)
        )
        if ids and not any(isinstance(value, dict) and value for value in hidden):
            asked = _meaning(by.captures, key, ids, by.num_layers)
            return _Reading(reader=reader, path=key.path, ids=ids, asked=asked)
    return _Reading(reader=reader, path=None, ids=(), asked=tuple(default_depths(by.captures, by.num_layers)))


def _meaning(captures: CaptureRow, key: IdKey, ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    return tuple(depths_of(captures, [i + key.plus for i in ids], num_layers))


def _check_agreement(draft: Draft, lists: Mapping[str, tuple[int, ...]], by: FedBy, problems: list[Problem]) -> None:
    """Two lists may differ as numbers if each means the same to the engine that looks there.

    The same numbers for two engines that make different layers of them are a warning. What a list means to an engine
    that does not know the target cannot be compared: a warning. So is what another engine's newest version makes of its
    list, where an older one that is known makes of it what this engine does.
    """
    here = {path: ids for path, ids in lists.items() if path in _READ_BY and ids}
    same = len(set(here.values())) < 2
    readings = {path: _readings(_READ_BY[path], ids, by) for path, ids in here.items()}
    meanings = {path: found[0][1] if found else None for path, found in readings.items()}
    known = set(meanings.values()) - {None}
    if len(known) < 2 and (same or None not in meanings.values()):
        return
    sometimes = set.intersection(*({depths for _, depths in found} for found in readings.values() if found), known)
    severity = Severity.ERROR if len(known) > 1 and not (sometimes or same) else Severity.WARNING
    got = "; ".join(f"{path} {list(ids)} ({_said(readings[path], _READ_BY[path])})" for path, ids in here.items())
    fix = "leave the list that is meant, or write each so that it means the same layers (hsformat.engines.emit does)"
    if by.versions:
        fix = "write a folder for one engine: the lists that the engines need contradict each other"
    elif sometimes:
        fix = "nothing, if the other engine serves it in a version for which the list was written"
    expected = "lists that mean the same layers"
    problems.append(
        problem("HS404", where=draft.at("layer ids"), got=got, expected=expected, fix=fix, severity=severity)
    )


def _readings(engine: str, ids: Sequence[int], by: FedBy) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a list means to an engine, by version: to those asked about, otherwise to all, the newest first."""
    if engine == by.engine:
        return [(by.version, _fed(by.captures, depths_of(by.captures, ids, by.num_layers)))]
    versions = {by.versions[engine]} if engine in by.versions else set(known_versions(engine))
    if by.profile is not None and by.profile.engine == engine and engine not in by.versions:
        versions.add(by.profile.version)
    out = []
    for version in sorted(versions, key=Version, reverse=True):
        try:
            row = capture_row(engine, version, by.architecture, by.profile)
        except ResolveError:
            continue
        out.append((version, _fed(row, depths_of(row, ids, by.num_layers))))
    return out


def _readers_disagree(draft: Draft, readings: Sequence[_Reading], captures: CaptureRow, title: str) -> Problem:
    got = "; ".join(
        f"{r.reader.name} feeds {_depths(fed(captures, r.asked))} "
        + (f"(from {r.path})" if r.path else "(its default: it finds no ids)" if not r.empty else "(an empty list)")
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
    if reading.empty:
        got = f"an empty list of layer ids, by which {who} captures nothing"
    elif any(not ids for ids in lists.values()):
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


def _said(readings: Sequence[tuple[str, tuple[int, ...]]], engine: str) -> str:
    title = ENGINES[engine].title
    if not readings:
        return f"unknown to {title}"
    version, depths = readings[0]
    older = next((f", {_depths(d)} to {v}" for v, d in readings if d != depths), "")
    return f"depths {_depths(depths)} to {title} {version}{older}"


def _depths(depths: Sequence[int]) -> str:
    return f"[{', '.join(f'd{d}' for d in depths)}]"
