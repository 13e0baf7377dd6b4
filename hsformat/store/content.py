"""A digest of what a store holds, however it is cut into segments, ordered and encoded."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from hsformat.digests import digest_bytes
from hsformat.record import Record

if TYPE_CHECKING:
    from hsformat.store.reader import Store

__all__ = ["content_digest", "record_digest"]


def content_digest(store: Store) -> str:
    """Return the digest of all records of a store, whatever their order, segments, codec and writers.

    It tells whether a copy, a merge or a resumed extraction holds the same: id, token ids, mask, positions and every
    capture of every record enter; declared fields and provenance do not. Every record is read and verified.

    Raises
    ------
    StoreError
        HS503, HS504, HS505: a record cannot be read.
    """
    return digest_bytes(sorted(record_digest(record) for record in store))


def record_digest(record: Record) -> bytes:
    """Return the SHA-256, 32 bytes, of one record as it is stored: each part with its name, type and shape before it.

    Positions of 0..T-1 count as none.
    """
    h = hashlib.sha256()
    positions = record.position_ids
    if positions is not None and np.array_equal(positions, np.arange(record.num_tokens)):
        positions = None
    parts = {
        "id": np.frombuffer(record.id.encode(), np.uint8),
        "input_ids": record.input_ids.astype("<i4"),
        "loss_mask": record.loss_mask.astype(np.uint8),
        "position_ids": np.empty(0, np.int64) if positions is None else positions.astype("<i8"),
        **{f"hidden/{key}": record.hidden[key] for key in sorted(record.hidden)},
    }
    for name, array in parts.items():
        h.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        h.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return h.digest()
