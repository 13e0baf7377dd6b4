"""The commit record: the JSON that makes a segment exist and says what it holds.

What is read is validated whole and then kept in ``columns``.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hsformat.contract import SPEC_VERSION, Contract
from hsformat.digests import Digest, canonical_json, checksum
from hsformat.models import FromList, Frozen
from hsformat.problems import Problem, problem
from hsformat.record import Generation, Provenance
from hsformat.store.array_json import ArraySpec
from hsformat.store.arrays import array_specs
from hsformat.store.backend import Distant, Source
from hsformat.store.columns import Digests, FileEntry, Files
from hsformat.store.metadata import SEGMENTS, group_fault, hs_attribute, is_segment_name, read_json, segment_names
from hsformat.store.unread import unread

__all__ = [
    "CommitRecord",
    "FileEntry",
    "Files",
    "Segments",
    "commit_members",
    "load_commit",
    "load_commits",
    "load_segments",
    "replaced_note",
    "seal",
]

_FILE_KEY = re.compile(r"(?!(.*/)?\.{0,2}(/|\Z))[^\0]+\Z", re.DOTALL)
"""No part is empty, ``.`` or ``..``: a commit record never leads out of its segment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CommitRecord:
    """What a segment holds: the attribute ``hsformat`` of its ``zarr.json``, which is written last.

    Attributes
    ----------
    writer, n
        Of the segment's name ``<writer>-<n>``.
    ids, tokens, states
        Of each record, in order: id, T, S.
    provenance, provenance_index
        The distinct provenances, and which of them is each record's.
    source_digests
        Of each record: digest of the sample that it was made from, or None.
    producer
        What wrote the segment, as JSON; None: not said.
    replaces
        Names of segments that do not exist any more since this one does.
    files
        Every file of the segment but the commit record.
    """

    writer: str
    n: int
    ids: tuple[str, ...]
    tokens: Sequence[int]
    states: Sequence[int]
    provenance: tuple[Provenance, ...]
    provenance_index: Sequence[int]
    source_digests: Sequence[str | None]
    producer: Mapping[str, Any] | None
    replaces: tuple[str, ...]
    files: Files

    @property
    def name(self) -> str:
        """The segment's folder name."""
        return f"{self.writer}-{self.n}"

    @property
    def prefix(self) -> str:
        """The key under which the segment's files are."""
        return f"{SEGMENTS}/{self.name}"

    @property
    def records(self) -> int:
        """R, the number of records."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the segment's files on the disk, its commit record left out."""
        return self.files.nbytes

    @property
    def provenances(self) -> tuple[Provenance, ...]:
        """The provenance of each record, in order."""
        return tuple(self.provenance[i] for i in self.provenance_index)

    @cached_property
    def state_starts(self) -> Sequence[int]:
        """First row of each record in the captures, and their length."""
        return array("q", accumulate(self.states, initial=0))

    @cached_property
    def token_starts(self) -> Sequence[int]:
        """First row of each record in the token arrays, and their length."""
        return array("q", accumulate(self.tokens, initial=0))

    @cached_property
    def _id_bytes(self) -> int:
        return sum(len(i.encode()) for i in self.ids)

    def array_specs(self, contract: Contract) -> dict[str, ArraySpec]:
        """Return the arrays that the segment must have, by name."""
        return array_specs(
            contract,
            tokens=sum(self.tokens),
            states=sum(self.states),
            records=self.records,
            id_bytes=self._id_bytes,
            positions="position_ids/zarr.json" in self.files,
        )


def commit_members(
    *,
    writer: str,
    n: int,
    ids: list[str],
    tokens: list[int],
    states: list[int],
    provenance: list[dict[str, Any]],
    provenance_index: list[int],
    source_digests: list[str | None],
    producer: Mapping[str, Any] | None,
    files: Mapping[str, FileEntry],
    replaces: Iterable[str] = (),
) -> dict[str, Any]:
    """Return a commit record's members as JSON-able data, all but its own checksum, which :func:`seal` adds."""
    return {
        "spec_version": SPEC_VERSION,
        "writer": writer,
        "n": n,
        "records": len(ids),
        "ids": ids,
        "tokens": tokens,
        "states": states,
        "provenance": provenance,
        "provenance_index": provenance_index,
        "source_digests": source_digests,
        "producer": producer,
        "replaces": sorted(replaces),
        "files": {key: entry._asdict() for key, entry in sorted(files.items())},
    }


def seal(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Return a commit record's JSON with its own checksum in it.

    Raises
    ------
    ValueError
        It holds something that JSON cannot say exactly.
    """
    return {**attribute, "checksum": checksum(canonical_json(attribute))}


def load_commit(source: Source, name: str) -> tuple[CommitRecord | None, list[Problem]]:
    """Read the commit record of one segment.

    Returns
    -------
    The record and no problem; or None and why: HS506 (note) if the segment is not committed, HS507 if its version is
    not known, HS503 if it cannot be read, HS504 if it is damaged.
    """
    key = f"{SEGMENTS}/{name}/zarr.json"
    where = f"{source.location}/{key}"

    def damaged(got: str, expected: str) -> tuple[None, list[Problem]]:
        return None, [problem("HS504", where=where, got=got, expected=expected)]

    try:
        data = read_json(source, key)
    except FileNotFoundError:
        place = f"{source.location}/{SEGMENTS}/{name}"
        return None, [problem("HS506", where=place, got="no commit record", expected="zarr.json")]
    except OSError as e:
        return None, [unread(e, where=where, expected="the commit record")]
    if isinstance(data, str):
        return damaged(data, "the commit record as JSON")
    if fault := group_fault(data):
        return damaged(fault, "the Zarr v3 group of a segment")
    attribute = hs_attribute(data)
    if attribute is None:
        return damaged("no attribute 'hsformat'", "the commit record")
    body = {k: v for k, v in attribute.items() if k != "checksum"}
    try:
        canonical = canonical_json(body)
    except (ValueError, RecursionError) as e:
        return damaged(str(e), "JSON that has a canonical form")
    if attribute.get("checksum") != (actual := checksum(canonical)):
        return damaged(actual, f"{str(attribute.get('checksum'))[:80]}, the checksum written with it")
    if (version := body.get("spec_version")) != SPEC_VERSION:
        place, got = f"{where}: spec_version", json.dumps(version)[:80]
        fix = "install a version of hsformat that reads it, or open the store without the segment: damaged='skip'"
        return None, [problem("HS507", where=place, got=got, expected=SPEC_VERSION, fix=fix)]
    try:
        parsed = _CommitJson.model_validate_json(canonical)
    except ValidationError as e:
        return None, [
            problem(
                "HS504",
                where=f"{where}: {'.'.join(map(str, err['loc']))}",
                got=repr(err["input"])[:80],
                expected=err["msg"],
            )
            for err in e.errors(include_url=False)
        ]
    if contradiction := _contradiction(parsed, name):
        return damaged(contradiction, "a commit record that does not contradict itself")
    return parsed.columns(), []


class Segments(NamedTuple):
    """All segment folders of a store, in order, with what :func:`load_commit` says; ``owners``: who replaces whom."""

    found: dict[str, tuple[CommitRecord | None, list[Problem]]]
    owners: dict[str, str]


def load_segments(source: Source) -> Segments:
    """Read the commit records of all segments, of replaced ones as well; one that is damaged replaces none."""
    names, load = segment_names(source), partial(load_commit, source)
    if isinstance(source, Distant):
        with ThreadPoolExecutor(source.requests_at_once) as pool:
            found = dict(zip(names, pool.map(load, names), strict=True))
    else:
        found = {name: load(name) for name in names}
    return Segments(found, {old: c.name for c, _ in found.values() if c is not None for old in c.replaces})


def load_commits(source: Source) -> tuple[list[CommitRecord], list[Problem]]:
    """Read the commit records of all segments that exist: committed, and not replaced (rule S-9).

    Returns
    -------
    The records by writer and number, and what :func:`load_commit` says of other segments; of replaced ones, a note.
    """
    found, owners = load_segments(source)
    commits, problems = [], []
    for name, (commit, about) in found.items():
        if name in owners:
            problems.append(replaced_note(source, name, owners[name]))
            continue
        problems += about
        commits += [] if commit is None else [commit]
    return commits, problems


def replaced_note(source: Source, name: str, owner: str) -> Problem:
    """Return the note about the files of a segment that another one has replaced."""
    where, got = f"{source.location}/{SEGMENTS}/{name}", f"a segment that {owner} has replaced"
    fix = "no reader uses it: hsformat gc removes its files"
    return problem("HS506", where=where, got=got, expected="a segment that is in use", fix=fix)


def _known(model: type[BaseModel], value: Any) -> Any:
    """Leave out the members that this version does not know (rule S-6), and demand those that it knows."""
    if not isinstance(value, dict):
        return value
    if missing := [name for name in model.model_fields if name not in value]:
        raise ValueError(f"no member {missing[0]!r}")
    return {name: value[name] for name in model.model_fields}


def _known_provenance(value: Any) -> Any:
    value = _known(Provenance, value)
    return {**value, "generation": _known(Generation, value["generation"])} if isinstance(value, dict) else value


_Count = Annotated[int, Field(gt=0)]
_Counts = Annotated[tuple[_Count, ...], FromList]
_Index = Annotated[int, Field(ge=0)]


class _FileJson(Frozen):
    model_config = ConfigDict(extra="ignore")

    size: Annotated[int, Field(ge=0)]
    checksum: Annotated[str, Field(pattern=r"^xxh3-128:[0-9a-f]{32}$")]


class _CommitJson(Frozen):
    """A commit record as JSON; members that a later writer adds do not change these."""

    model_config = ConfigDict(extra="ignore")

    writer: str
    n: _Index
    records: _Count
    ids: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], FromList]
    tokens: _Counts
    states: _Counts
    provenance: Annotated[tuple[Annotated[Provenance, BeforeValidator(_known_provenance)], ...], FromList]
    provenance_index: Annotated[tuple[_Index, ...], FromList]
    source_digests: Annotated[tuple[Digest | None, ...], FromList]
    producer: dict[str, Any] | None
    replaces: Annotated[tuple[str, ...], FromList]
    files: dict[str, _FileJson]

    def columns(self) -> CommitRecord:
        return CommitRecord(
            writer=self.writer,
            n=self.n,
            ids=self.ids,
            tokens=array("q", self.tokens),
            states=array("q", self.states),
            provenance=tuple(_shared_provenance(p.model_dump_json()) for p in self.provenance),
            provenance_index=array("q", self.provenance_index),
            source_digests=Digests(self.source_digests),
            producer=None if self.producer is None else _shared_json(json.dumps(self.producer)),
            replaces=self.replaces,
            files=Files({k: FileEntry(f.size, f.checksum) for k, f in self.files.items()}),
        )


@lru_cache(maxsize=64)
def _shared_provenance(text: str) -> Provenance:
    return Provenance.model_validate_json(text)


@lru_cache(maxsize=64)
def _shared_json(text: str) -> Any:
    return json.loads(text)


def _contradiction(c: _CommitJson, name: str) -> str | None:
    per_record = (c.ids, c.tokens, c.states, c.provenance_index, c.source_digests)
    if f"{c.writer}-{c.n}" != name:
        return f"the commit record of segment {c.writer}-{c.n}"
    if any(len(values) != c.records for values in per_record):
        return f"{c.records} records and lists of {sorted({len(v) for v in per_record})} entries"
    if max(c.provenance_index) >= len(c.provenance):
        return f"provenance_index {max(c.provenance_index)} of {len(c.provenance)} provenances"
    if any(s not in (t, t - 1) for s, t in zip(c.states, c.tokens, strict=True)):
        return "a record whose number of states is neither that of its tokens nor one less"
    if max(sum(c.tokens), sum(f.size for f in c.files.values())) >= 2**53:
        return "lengths beyond 2**53"
    if bad := next((old for old in c.replaces if not is_segment_name(old)), None):
        return f"replaces {bad[:80]!r}, which is no name of a segment"
    if name in c.replaces:
        return "a segment that replaces itself"
    if len(set(c.ids)) != c.records:
        return "one id twice"
    if bad := next((k for k in c.files if not _FILE_KEY.match(k)), None):
        return f"a file {bad[:80]!r}"
    return None
