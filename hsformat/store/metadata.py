"""The JSON of a store: its root, its segments' names, and the commit record that makes a segment exist.

Every function that reads returns or raises problems with the place; none of them trusts what it reads. Consolidated
metadata is never used: what is committed is decided by each segment's own ``zarr.json``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from hsformat.contract import SPEC_VERSION, Contract, parse_contract
from hsformat.digests import canonical_json, checksum
from hsformat.models import FromList, Frozen
from hsformat.problems import Problem, StoreError, problem
from hsformat.record import Provenance
from hsformat.store.arrays import ArraySpec, array_specs
from hsformat.store.backend import Backend

__all__ = [
    "SEGMENTS",
    "CommitRecord",
    "FileEntry",
    "ensure_segments",
    "group_json",
    "load_commit",
    "load_contract",
    "root_attribute",
    "seal",
    "segment_names",
]

SEGMENTS = "segments"
_SEGMENT_NAME = re.compile(r"([0-9a-z]{1,32})-(0|[1-9][0-9]{0,14})\Z")
_FILE_KEY = re.compile(r"(?!(.*/)?\.\.?(/|\Z))[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*\Z")
"""No part is ``..``: a commit record never leads out of its segment."""

Count = Annotated[int, Field(gt=0)]
_Counts = Annotated[tuple[Count, ...], FromList]


class FileEntry(Frozen):
    """Size in bytes and checksum of one file."""

    size: Annotated[int, Field(ge=0)]
    checksum: Annotated[str, Field(pattern=r"^xxh3-128:[0-9a-f]{32}$")]


class CommitRecord(Frozen):
    """What a segment holds: the attribute ``hsformat`` of its ``zarr.json``, which is written last.

    Attributes
    ----------
    writer, n
        Of the segment's name ``<writer>-<n>``.
    records
        R, the number of records.
    ids, tokens, states
        Of each record, in order: id, T, S.
    provenance, provenance_index
        The distinct provenances, and which of them is each record's.
    source_digests
        Of each record: digest of the sample that it was made from, or None.
    producer
        What wrote the segment, as JSON; None: not said.
    files
        Every file of the segment but the commit record, by key relative to the segment.
    """

    model_config = ConfigDict(extra="ignore")  # attributes that a later writer adds do not change these

    spec_version: Literal["1.0"]
    writer: str
    n: Annotated[int, Field(ge=0)]
    records: Count
    ids: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], FromList]
    tokens: _Counts
    states: _Counts
    provenance: Annotated[tuple[Provenance, ...], FromList]
    provenance_index: Annotated[tuple[Annotated[int, Field(ge=0)], ...], FromList]
    source_digests: Annotated[tuple[str | None, ...], FromList]
    producer: dict[str, Any] | None
    files: dict[str, FileEntry]

    @property
    def name(self) -> str:
        """The segment's folder name."""
        return f"{self.writer}-{self.n}"

    @property
    def prefix(self) -> str:
        """The key under which the segment's files are."""
        return f"{SEGMENTS}/{self.name}"

    @property
    def nbytes(self) -> int:
        """Bytes of the segment's files on the disk, its commit record left out."""
        return sum(f.size for f in self.files.values())

    @property
    def provenances(self) -> tuple[Provenance, ...]:
        """The provenance of each record, in order."""
        return tuple(self.provenance[i] for i in self.provenance_index)

    @cached_property
    def state_starts(self) -> tuple[int, ...]:
        """First row of each record in the captures."""
        return _starts(self.states)

    @cached_property
    def token_starts(self) -> tuple[int, ...]:
        """First row of each record in the token arrays."""
        return _starts(self.tokens)

    def array_specs(self, contract: Contract) -> dict[str, ArraySpec]:
        """Return the arrays that the segment must have, by name."""
        return array_specs(
            contract,
            tokens=sum(self.tokens),
            states=sum(self.states),
            records=self.records,
            id_bytes=sum(len(i.encode()) for i in self.ids),
            positions="position_ids/zarr.json" in self.files,
        )


def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    starts, total = [], 0
    for n in lengths:
        starts.append(total)
        total += n
    return tuple(starts)


def group_json(attribute: Mapping[str, Any] | None = None) -> bytes:
    """Return the ``zarr.json`` of a group, with the attribute ``hsformat`` if one is given."""
    attributes = {} if attribute is None else {"hsformat": attribute}
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


def root_attribute(contract: Contract) -> dict[str, Any]:
    """Return the attribute ``hsformat`` of a store's root."""
    return {"spec_version": SPEC_VERSION, "contract": contract.to_json(), "contract_digest": contract.digest}


def ensure_segments(backend: Backend) -> None:
    """Make the group of the segments if there is none: a writer may have been killed right after making the root.

    Raises
    ------
    OSError
        It cannot be written.
    """
    key = f"{SEGMENTS}/zarr.json"
    if backend.size(key) is None:
        with contextlib.suppress(FileExistsError):  # another writer was faster
            backend.publish(key, group_json())
    backend.settle(SEGMENTS)


def seal(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Return a commit record's JSON with its own checksum in it.

    Raises
    ------
    ValueError
        It holds something that JSON cannot say exactly.
    """
    return {**attribute, "checksum": checksum(canonical_json(attribute))}


def segment_names(backend: Backend) -> list[str]:
    """Return the names of all segment folders, committed or not, by writer and then by number."""
    found = [m for name in backend.folders(SEGMENTS) if (m := _SEGMENT_NAME.match(name))]
    return [m[0] for m in sorted(found, key=lambda m: (m[1], int(m[2])))]


def load_contract(backend: Backend) -> tuple[Contract, list[Problem]]:
    """Read a store's root.

    Returns
    -------
    The contract, and what is worth saying about the root without being an error (HS508).

    Raises
    ------
    StoreError
        HS501: this is no store. HS502: its version or a field of its contract is not known. HS504: the contract
        is not the one that was written.
    """
    where = backend.location
    try:
        state = backend.state()
        if state != "folder":
            got = {"absent": "nothing", "empty": "an empty folder", "file": "a file"}[state]
            raise _no_store(where, got)
        raw = backend.read("zarr.json")
    except FileNotFoundError as e:
        raise _no_store(where, "a folder without zarr.json") from e
    except OSError as e:
        raise _no_store(where, f"cannot be read: {e.strerror or e}") from e
    where = f"{where}/zarr.json"
    data = _json_object(raw)
    if isinstance(data, str):
        raise _no_store(where, data)
    if data.get("zarr_format") != 3 or data.get("node_type") != "group":
        raise _no_store(where, "no Zarr v3 group")
    attribute = _attribute(data)
    if attribute is None:
        raise _no_store(where, "a Zarr group without the attribute 'hsformat'")
    version = attribute.get("spec_version")
    if version != SPEC_VERSION:
        got = "no field 'spec_version'" if "spec_version" not in attribute else json.dumps(version)[:80]
        raise StoreError(
            problem(
                "HS502",
                where=f"{where}: spec_version",
                got=got,
                expected=SPEC_VERSION,
                fix="install a version of hsformat that reads it",
            )
        )
    for name in ("contract", "contract_digest"):
        if name not in attribute:
            raise StoreError(
                problem(
                    "HS502",
                    where=f"{where}: {name}",
                    got=f"no field {name!r}",
                    expected=f"the field {name!r}",
                    fix="restore zarr.json from a copy",
                )
            )
    contract = parse_contract(attribute["contract"], where=f"{where}: contract")
    if attribute["contract_digest"] != contract.digest:
        raise StoreError(
            problem(
                "HS504",
                where=f"{where}: contract_digest",
                got=contract.digest,
                expected=str(attribute["contract_digest"])[:80],
                fix="restore zarr.json from a copy; a contract is never edited",
            )
        )
    stale = [problem("HS508", where=where, got="consolidated metadata", expected="none")]
    return contract, stale if data.get("consolidated_metadata") else []


def _no_store(where: str, got: str) -> StoreError:
    return StoreError(problem("HS501", where=where, got=got, expected="an hsformat store"))


def load_commit(backend: Backend, name: str) -> tuple[CommitRecord | None, list[Problem]]:
    """Read the commit record of one segment.

    Returns
    -------
    The record and no problem; or None and why: HS506 (note) if the segment is not committed, HS502 with the field's
    name if its version or a field is not known, HS503 if it cannot be read, HS504 if it is damaged.
    """
    key = f"{SEGMENTS}/{name}/zarr.json"
    where = f"{backend.location}/{key}"

    def damaged(got: str, expected: str, code: str = "HS504") -> tuple[None, list[Problem]]:
        return None, [problem(code, where=where, got=got, expected=expected)]

    try:
        raw = backend.read(key)
    except FileNotFoundError:
        place = f"{backend.location}/{SEGMENTS}/{name}"
        return None, [problem("HS506", where=place, got="no commit record", expected="zarr.json")]
    except OSError as e:
        return damaged(f"cannot be read: {e.strerror or e}", "the commit record", "HS503")
    data = _json_object(raw)
    if isinstance(data, str):
        return damaged(data, "the commit record as JSON")
    attribute = _attribute(data)
    if attribute is None:
        return damaged("no attribute 'hsformat'", "the commit record")
    body = {k: v for k, v in attribute.items() if k != "checksum"}
    try:
        actual = checksum(canonical_json(body))
    except (ValueError, RecursionError) as e:
        return damaged(str(e), "JSON that has a canonical form")
    if attribute.get("checksum") != actual:
        return damaged(actual, f"{str(attribute.get('checksum'))[:80]}, the checksum written with it")
    try:
        commit = CommitRecord.model_validate_json(json.dumps(body))
    except ValidationError as e:
        return None, [
            problem(
                "HS502",
                where=f"{where}: {'.'.join(map(str, err['loc']))}",
                got=repr(err["input"])[:80],
                expected=err["msg"],
                fix="install a version of hsformat that reads it",
            )
            for err in e.errors(include_url=False)
        ]
    if contradiction := _contradiction(commit, name):
        return damaged(contradiction, "a commit record that does not contradict itself")
    return commit, []


def _contradiction(c: CommitRecord, name: str) -> str | None:
    per_record = (c.ids, c.tokens, c.states, c.provenance_index, c.source_digests)
    if c.name != name:
        return f"the commit record of segment {c.name}"
    if any(len(values) != c.records for values in per_record):
        return f"{c.records} records and lists of {sorted({len(v) for v in per_record})} entries"
    if max(c.provenance_index) >= len(c.provenance):
        return f"provenance_index {max(c.provenance_index)} of {len(c.provenance)} provenances"
    if any(s not in (t, t - 1) for s, t in zip(c.states, c.tokens, strict=True)):
        return "a record whose number of states is neither that of its tokens nor one less"
    if len(set(c.ids)) != c.records:
        return "one id twice"
    if bad := next((k for k in c.files if not _FILE_KEY.match(k)), None):
        return f"a file {bad[:80]!r}"
    return None


def _json_object(raw: bytes) -> dict[str, Any] | str:
    """Return the JSON object in ``raw``, or what is there instead."""
    try:
        data = json.loads(raw.decode())
    except UnicodeDecodeError as e:
        return f"not UTF-8 at byte {e.start}"
    except json.JSONDecodeError as e:
        return f"not JSON at character {e.pos} of {len(e.doc)}: {e.msg}"
    except (ValueError, RecursionError) as e:
        return f"not usable JSON: {e}"
    return data if isinstance(data, dict) else f"JSON that is no object: {type(data).__name__}"


def _attribute(data: Mapping[str, Any]) -> dict[str, Any] | None:
    attributes = data.get("attributes")
    value = attributes.get("hsformat") if isinstance(attributes, dict) else None
    return value if isinstance(value, dict) else None
