"""A digest of what a source holds, so that a resume sees other data under the same ids. Brings no torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsformat.digests import digest_bytes
from hsformat.source import RecordSource
from hsformat.store import Store

__all__ = ["source_digest"]


def source_digest(source: RecordSource) -> str:
    """Return the digest of the content of a source.

    Of a store: of the checksums of every file of every segment, as its commit records state them, so that no array is
    read. The same records in other segments, in another order or compressed otherwise give another digest. Of another
    source: of the ids, token ids and masks of its records; it tells of no checksums, and its states are not read.
    """
    return digest_bytes(_of_store(source) if isinstance(source, Store) else _of_records(source))


def _of_store(store: Store) -> Iterator[bytes]:
    for segment in store.segments:
        yield f"segment of {segment.records}\n".encode()
        for key in sorted(segment.files):
            size, checksum = segment.files[key]
            yield f"{key} {size} {checksum}\n".encode()


def _of_records(source: RecordSource) -> Iterator[bytes]:
    for row in range(len(source)):
        record = source.read(row, captures=())
        yield f"{record.num_tokens} {len(record.id)}:{record.id}\n".encode()
        yield np.ascontiguousarray(record.input_ids, "<i4").tobytes()
        yield np.ascontiguousarray(record.loss_mask, np.uint8).tobytes()
