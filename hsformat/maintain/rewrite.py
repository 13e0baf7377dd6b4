"""Writing one segment from records that were stored before: repaired ones, converted ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from hsformat.contract import Contract
from hsformat.digests import digest_json
from hsformat.problems import Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats
from hsformat.store.backend import Backend
from hsformat.store.building import Building
from hsformat.store.commit import load_commit
from hsformat.store.encoder import Encoder, default_threads
from hsformat.store.pending import MAX_PRODUCER_BYTES, Pending, make_row

__all__ = ["producer_of", "write_segment"]

_UNBOUNDED = 2**62
"""Bytes of a segment: it holds no more than the one that it is made from."""


def producer_of(work: str, details: Mapping[str, Any], original: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the producer of a segment that was made from another one, whose own producer it keeps.

    As its digest alone, if both together are more than a commit record has room for.
    """
    made = {"name": "hsformat", "version": version("hsformat"), work: dict(details), "original": original}
    if len(json.dumps(made)) > MAX_PRODUCER_BYTES:
        made["original"] = {"digest": digest_json(original)}
    return made


def write_segment(
    backend: Backend,
    contract: Contract,
    records: Iterable[tuple[Record, Mapping[str, CaptureStats]]],
    *,
    name: str,
    producer: Callable[[], Mapping[str, Any]],
    replaces: Iterable[str] = (),
    wanted: Callable[[], bool] = lambda: True,
) -> bool:
    """Write valid records as one segment and commit it, with the segments that it replaces.

    Parameters
    ----------
    name
        Of the segment, ``<writer>-<n>``, of which there is nothing yet.
    producer
        Asked for after the last record.
    wanted
        Asked right before the commit; nothing is committed if not.

    Returns
    -------
    Whether it is committed: not if there was no record, or it was not wanted.

    Raises
    ------
    StoreError
        HS506 (error): it cannot be written; nothing that was committed before has changed.
    """
    writer, _, n = name.rpartition("-")
    encoder, pending = Encoder(default_threads()), Pending(contract, segment_bytes=_UNBOUNDED)
    building = Building(backend, contract, pending, encoder, writer=writer, n=int(n), chunk_tokens=None)
    committed = False
    try:
        for record, stats in records:
            building.add(make_row(contract, record, stats), record.hidden)
        if pending and wanted():
            building.commit(producer(), replaces=replaces)
            committed = True
    except OSError as e:
        committed = load_commit(backend, name)[0] is not None
        if not committed:
            raise StoreError(
                problem(
                    "HS506",
                    where=f"{backend.location}/{building.prefix}",
                    severity=Severity.ERROR,
                    got=e.strerror or str(e),
                    expected="a segment written whole; what was committed before has not changed",
                    fix="free space or restore access, then run the command again",
                )
            ) from e
    finally:
        building.abort()
        if not committed:
            with contextlib.suppress(OSError):  # FileExistsError: it was committed all the same
                backend.discard(building.prefix)
        encoder.close()
    return committed
