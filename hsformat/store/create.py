"""Beginning to write: a new store, or another writer of one that exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hsformat.compare import compare
from hsformat.contract import Contract
from hsformat.problems import ContractMismatch, Problem, Severity, StoreError, problem
from hsformat.store.backend import Backend, Place
from hsformat.store.commit import load_commits
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import (
    MAX_JSON_BYTES,
    SEGMENTS,
    ensure_segments,
    group_json,
    load_contract,
    root_attribute,
)
from hsformat.store.places import backend_for
from hsformat.store.writer import COMMIT_SECONDS, SEGMENT_BYTES, Writer

__all__ = ["append", "check_new", "create", "exists"]


def exists(path: Place) -> bool:
    """Return whether a path holds a root ``zarr.json``, so that :func:`append` is meant and not :func:`create`."""
    backend = backend_for(path)
    try:
        return backend.size("zarr.json") is not None
    except OSError:
        return False


def check_new(path: Place) -> None:
    """Refuse a path at which :func:`create` would find something, or could make nothing.

    Nothing is written. So whether an object store takes what is put there is not known before.

    Raises
    ------
    StoreError
        HS501: there is a store, a file or a folder that is not empty; or the folder cannot be made or written to.
    """
    backend = backend_for(path)
    try:
        state = backend.state()
        store = state == "folder" and backend.size("zarr.json") is not None
        if state in ("absent", "empty") and isinstance(backend, LocalBackend):
            backend.check_writable()
    except OSError as e:
        raise StoreError(_cannot_create(backend, e)) from e
    if state in ("file", "folder"):
        found = "a file" if state == "file" else "a folder that is not empty"
        raise StoreError(
            problem(
                "HS501",
                where=backend.location,
                expected="nothing, or an empty folder",
                got="a store, or another Zarr hierarchy" if store else found,
                fix="hs.append writes to a store that exists" if store else "give another path",
            )
        )


def create(
    path: Place,
    contract: Contract,
    *,
    codec: Literal["compact", "fast"] | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    chunk_tokens: int | None = None,
    producer: Mapping[str, Any] | None = None,
    threads: int | None = None,
    commit_seconds: float = COMMIT_SECONDS,
) -> Writer:
    """Create a store and return its first writer.

    Parameters
    ----------
    path
        A path at which there is nothing, or an empty folder; or a backend of such a place.
    codec
        Replaces ``contract.codec``; None: as the contract says.
    segment_bytes
        Records are committed as a segment before they exceed this many bytes, uncompressed; memory does not.
    chunk_tokens
        Rows of a chunk of states; None: by the codec and the width.
    producer
        What writes, as JSON; recorded in each segment, never compared.
    threads
        That encode and write; None: one a core, at most four.
    commit_seconds
        A segment is committed by the first record that comes later than this many seconds after its first one.

    Raises
    ------
    StoreError
        HS501: something is at the path, it cannot be written, or a chunk would be beyond the limit of the codec.
    ValueError
        ``producer`` is no JSON, or a size is not positive.
    """
    check_new(path)
    backend = backend_for(path)
    if codec is not None:
        contract = Contract.model_validate_json(contract.model_copy(update={"codec": codec}).model_dump_json())
    writer = Writer(
        backend,
        contract,
        (),
        segment_bytes=segment_bytes,
        chunk_tokens=chunk_tokens,
        producer=producer,
        threads=threads,
        commit_seconds=commit_seconds,
    )
    root = group_json(root_attribute(contract))
    if len(root) > MAX_JSON_BYTES:
        got, expected = f"a contract of {len(root)} bytes as JSON", f"at most {MAX_JSON_BYTES}"
        fix = "declare fewer captures and fields"
        raise StoreError(problem("HS501", where=backend.location, got=got, expected=expected, fix=fix))
    try:
        backend.publish("zarr.json", root)  # now the store exists
    except FileExistsError as e:
        raise StoreError(
            problem(
                "HS501",
                where=backend.location,
                got="another process has just created a store here",
                expected="nothing, or an empty folder",
                fix="hs.append writes to a store that exists",
            )
        ) from e
    except OSError as e:
        raise StoreError(_cannot_create(backend, e)) from e
    try:
        ensure_segments(backend)
    except OSError as e:
        raise StoreError(_cannot_create(backend, e, f"{SEGMENTS} cannot be created")) from e
    return writer


def append(
    path: Place,
    *,
    expect: Contract | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    chunk_tokens: int | None = None,
    producer: Mapping[str, Any] | None = None,
    threads: int | None = None,
    commit_seconds: float = COMMIT_SECONDS,
) -> Writer:
    """Return another writer of a store, with a prefix of its own: no locks, any number at once.

    It knows the ids that were committed when it was opened; two writers at once must be given different records.

    Parameters
    ----------
    expect
        Refuse a store whose contract means something else.
    segment_bytes, chunk_tokens, producer, threads, commit_seconds
        As of :func:`create`.

    Raises
    ------
    ContractMismatch
        What ``expect`` and the store disagree on.
    StoreError
        HS501, HS502: there is no store that can be read. HS503, HS504: a commit record is damaged. HS507: a segment
        follows another version.
    """
    backend = backend_for(path)
    contract, _ = load_contract(backend)
    if expect is not None:
        errors = [p for p in compare(contract, expect) if p.severity is Severity.ERROR]
        if errors:
            raise ContractMismatch([p.at(backend.location) for p in errors])
    commits, problems = load_commits(backend)
    if errors := [p for p in problems if p.severity is Severity.ERROR]:
        raise StoreError(errors)
    return Writer(
        backend,
        contract,
        commits,
        segment_bytes=segment_bytes,
        chunk_tokens=chunk_tokens,
        producer=producer,
        threads=threads,
        commit_seconds=commit_seconds,
    )


def _cannot_create(backend: Backend, e: OSError, what: str = "cannot be created") -> Problem:
    got, expected = f"{what}: {e.strerror or e}", "a folder that can be written"
    fix = "give another path, or change its permissions"
    return problem("HS501", where=backend.location, got=got, expected=expected, fix=fix)
