"""The JSON of a store's root, and its segments' names.

Every function that reads returns or raises problems with the place; none of them trusts what it reads. Consolidated
metadata is never used: what is committed is decided by each segment's own ``zarr.json`` (``commit``).
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from hsformat.contract import SPEC_VERSION, Contract, parse_contract
from hsformat.problems import Problem, Severity, StoreError, problem
from hsformat.store.backend import Backend, Source
from hsformat.store.unread import unread
from hsformat.strict_json import parse_json

__all__ = [
    "MAX_JSON_BYTES",
    "SEGMENTS",
    "ensure_segments",
    "group_fault",
    "group_json",
    "hs_attribute",
    "is_segment_name",
    "json_object",
    "load_contract",
    "new_writer",
    "other_folder_notes",
    "read_json",
    "root_attribute",
    "segment_names",
    "segments_group_problems",
]

SEGMENTS = "segments"
_GROUP_MEMBERS = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}

MAX_JSON_BYTES = 2**24
"""Of a ``zarr.json`` (rules S-1, S-8, G-1, G-7): parsed, JSON takes up to thirty times its bytes."""
_SEGMENT_NAME = re.compile(r"([0-9a-z]{1,32})-(0|[1-9][0-9]{0,14})\Z")


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


def segments_group_problems(source: Source) -> list[Problem]:
    """Return HS504 where ``segments/zarr.json`` is no Zarr group: other Zarr readers then see no segment. Or HS503."""
    key = f"{SEGMENTS}/zarr.json"
    try:
        data = read_json(source, key)
    except FileNotFoundError:
        return []
    except OSError as e:
        return [unread(e, where=f"{source.location}/{key}", expected="a Zarr v3 group")]
    got = data if isinstance(data, str) else group_fault(data)
    if got is None:
        return []
    fix = "remove this file: the next writer makes it again"
    return [problem("HS504", where=f"{source.location}/{key}", got=got, expected="a Zarr v3 group", fix=fix)]


def group_fault(data: Mapping[str, Any]) -> str | None:
    """Return why other Zarr readers do not take the JSON of a ``zarr.json`` for a group (rules S-1, S-8, G-1).

    Returns
    -------
    None if they do. Zarr v3 refuses members that it does not name, but those whose ``must_understand`` is false.
    """
    if data.get("zarr_format") != 3 or data.get("node_type") != "group":
        return "no Zarr v3 group"
    unknown = [k for k in data if k not in _GROUP_MEMBERS and not _is_optional(data[k])]
    return f"a member {unknown[0]!r} that Zarr readers do not know" if unknown else None


def _is_optional(value: Any) -> bool:
    """Whether Zarr v3 says that a reader may ignore an extension that it does not know."""
    return isinstance(value, dict) and value.get("must_understand") is False


def new_writer() -> str:
    """Return a writer's name (rule S-3): sorts by time; the random half tells those of one millisecond apart."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"


def is_segment_name(name: str) -> bool:
    """Return whether a folder of this name may be a segment (rule S-3)."""
    return _SEGMENT_NAME.match(name) is not None


def segment_names(source: Source) -> list[str]:
    """Return the names of all segment folders, committed or not, by writer and then by number."""
    found = [m for name in source.folders(SEGMENTS) if (m := _SEGMENT_NAME.match(name))]
    return [m[0] for m in sorted(found, key=lambda m: (m[1], int(m[2])))]


def other_folder_notes(source: Source) -> list[Problem]:
    """Return a note (HS506) about each folder that holds a commit record and whose name is no segment's.

    Readers pass over folders of other names (rule S-3), and so over all the records of one that was renamed or copied.
    """
    fix = "give it its name back (writer and n of its commit record), or move it out of the store"
    return [
        problem("HS506", where=f"{source.location}/{SEGMENTS}/{name}", got="a folder with a commit record, which no "
                "reader reads", expected="a segment's name: <writer>-<n>", fix=fix, severity=Severity.NOTE)
        for name in source.folders(SEGMENTS)
        if not is_segment_name(name) and _is_committed(source, f"{SEGMENTS}/{name}/zarr.json")
    ]  # fmt: skip


def _is_committed(source: Source, key: str) -> bool:
    try:
        data = read_json(source, key)
    except OSError:
        return False
    return isinstance(data, dict) and hs_attribute(data) is not None


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
        data = read_json(backend, "zarr.json")
    except FileNotFoundError as e:
        raise _no_store(where, "a folder without zarr.json") from e
    except OSError as e:
        raise StoreError(unread(e, where=where, expected="an hsformat store", code="HS501")) from e
    where = f"{where}/zarr.json"
    if isinstance(data, str):
        raise _no_store(where, data)
    if fault := group_fault(data):
        raise _no_store(where, fault)
    attribute = hs_attribute(data)
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


def read_json(source: Source, key: str) -> dict[str, Any] | str:
    """Return the JSON object of a file, or what is there instead; a larger file than is allowed is not read whole.

    Raises
    ------
    OSError
        It cannot be read.
    """
    return json_object(source.read(key, 0, MAX_JSON_BYTES + 1))


def json_object(raw: bytes) -> dict[str, Any] | str:
    """Return the JSON object in ``raw``, or what is there instead."""
    if len(raw) > MAX_JSON_BYTES:
        return f"more than {MAX_JSON_BYTES} bytes"
    try:
        data = parse_json(raw.decode())
    except UnicodeDecodeError as e:
        return f"not UTF-8 at byte {e.start}"
    except json.JSONDecodeError as e:
        return f"not JSON at character {e.pos} of {len(e.doc)}: {e.msg}"
    except (ValueError, RecursionError) as e:
        return f"not usable JSON: {e}"
    return data if isinstance(data, dict) else f"JSON that is no object: {type(data).__name__}"


def hs_attribute(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attribute ``hsformat`` of a group's ``zarr.json``; None: it has none, or one that is no object."""
    attributes = data.get("attributes")
    value = attributes.get("hsformat") if isinstance(attributes, dict) else None
    return value if isinstance(value, dict) else None
