"""Bytes and files of a store before it is written: arithmetic over dimensions and counts, which the writer shares.

What ``fast`` writes follows from the lengths of the records, to the byte. What ``compact`` writes depends on the
states: :data:`COMPACT_RATIO` is what was measured, :data:`LEAST_RATIO` what is needed at least. Left out is what the
run alone knows: the contract in the root, provenance and the engine's description in commit records.

May import ``arrays``, ``array_json``, ``codec``, ``commit`` and ``metadata``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hsformat.contract import StateDtype
from hsformat.dtypes import numpy_dtype
from hsformat.record import Provenance
from hsformat.store.array_json import ArraySpec
from hsformat.store.arrays import Dimensions, chunk_rows, metadata, planned_specs, segment_groups
from hsformat.store.codec import MAX_CHUNK_BYTES, Codec
from hsformat.store.commit import FileEntry, commit_members
from hsformat.store.metadata import group_json

__all__ = [
    "COMPACT_RATIO",
    "LEAST_RATIO",
    "NO_RECORDS",
    "MetadataSizes",
    "Plan",
    "PlannedRecord",
    "SegmentSize",
    "StoreSize",
    "Totals",
    "fits",
    "least_bytes",
    "likely_bytes",
    "record_bytes",
    "segment_size",
    "small_bytes",
    "state_bytes",
]

COMPACT_RATIO: Final[Mapping[StateDtype, float]] = {"bfloat16": 0.71, "float16": 0.88, "float32": 0.87}
"""Share of the bytes of states that ``compact`` leaves, by dtype: real states of long texts (docs/benchmarks.md)."""

LEAST_RATIO: Final = 0.63
"""Share of the bytes of states that any lossless codec needs: just below the entropy of real ones (docs/benchmarks.md).

States of a beginning that two records share are the same, and may be stored once.
"""

_INDEXES = ("token_offsets", "state_offsets", "ids", "id_offsets")
"""What a segment has beside the arrays of its records; the bound of a segment does not count it."""

_BLOSC_HEADER, _CRC, _INDEX_ENTRY = 16, 4, 16
_CHECKSUM = f"xxh3-128:{'0' * 32}"


class Totals(NamedTuple):
    """Sums over the records of a segment; ``nbytes`` are those of :func:`record_bytes`."""

    records: int = 0
    tokens: int = 0
    states: int = 0
    id_bytes: int = 0
    nbytes: int = 0

    def plus(self, *, tokens: int, states: int, id_bytes: int, nbytes: int, times: int = 1) -> Totals:
        """Return the sums with a record more, or several alike."""
        return Totals(
            self.records + times,
            self.tokens + tokens * times,
            self.states + states * times,
            self.id_bytes + id_bytes * times,
            self.nbytes + nbytes * times,
        )

    def specs(self, dimensions: Dimensions, *, positions: bool) -> dict[str, ArraySpec]:
        """Return the arrays of a segment of these sums."""
        return planned_specs(
            dimensions,
            tokens=self.tokens,
            states=self.states,
            records=self.records,
            id_bytes=self.id_bytes,
            positions=positions,
        )


NO_RECORDS = Totals()


def state_bytes(dimensions: Dimensions) -> int:
    """Return the bytes of one token's states, of all captures together."""
    return dimensions.hidden_size * sum(numpy_dtype(c.dtype).itemsize for c in dimensions.captures)


def record_bytes(dimensions: Dimensions, *, tokens: int, states: int, positions: bool) -> int:
    """Return the bytes that a record counts against the bound of a segment."""
    specs = Totals(records=1, tokens=tokens, states=states).specs(dimensions, positions=positions)
    return sum(s.nbytes for name, s in specs.items() if name not in _INDEXES)


def fits(dimensions: Dimensions, totals: Totals, *, segment_bytes: int) -> bool:
    """Return whether records of these sums may be one segment: all together, and all arrays but the states."""
    return totals.nbytes <= segment_bytes and small_bytes(dimensions, totals) <= MAX_CHUNK_BYTES


def small_bytes(dimensions: Dimensions, totals: Totals) -> int:
    """Return the bytes of all arrays but the states, of which a segment has a bound (rule G-7)."""
    specs = totals.specs(dimensions, positions=True).values()
    return sum(s.nbytes for s in specs if s.axis != "state")


def least_bytes(dimensions: Dimensions, *, tokens: int, states: int) -> int:
    """Return what records of so many tokens and rows of states, all different, take at least, in whatever segments.

    With ``compact``, depth 0 counts nothing, since an embedding returns with its token, and states that are stored
    wider than the target ran count as narrow as they were.
    """
    if dimensions.codec == "fast":
        return likely_bytes(dimensions, tokens=tokens, states=states)
    run = numpy_dtype(dimensions.target_dtype).itemsize
    row = sum(min(run, numpy_dtype(c.dtype).itemsize) for c in dimensions.captures if c.depth)
    return int(LEAST_RATIO * states * dimensions.hidden_size * row)


def likely_bytes(dimensions: Dimensions, *, tokens: int, states: int) -> int:
    """Return what the arrays of the same records take likely: with ``fast`` their bytes. Indexes are left out."""
    specs = Totals(tokens=tokens, states=states).specs(dimensions, positions=False)
    arrays = (s for name, s in specs.items() if name not in _INDEXES)
    return sum(round(s.nbytes * _share(dimensions, s.name)) for s in arrays)


def _share(dimensions: Dimensions, name: str) -> float:
    """Return which share of its bytes an array likely takes; small arrays count whole."""
    if dimensions.codec == "fast" or not name.startswith("hidden/"):
        return 1.0
    (dtype,) = (c.dtype for c in dimensions.captures if f"hidden/{c.key}" == name)
    run, stored = (numpy_dtype(d).itemsize for d in (dimensions.target_dtype, dtype))
    # Of states stored wider than the target ran, the lower bytes are zeros.
    return COMPACT_RATIO[dimensions.target_dtype] * run / stored if run < stored else COMPACT_RATIO[dtype]


class PlannedRecord(NamedTuple):
    """A record by what decides its size; ``positions``: whether it has any but 0..T-1."""

    id: str
    tokens: int
    states: int
    positions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSize:
    """Bytes of a segment: of each array before it is encoded, by name, and of each file, by key."""

    totals: Totals
    arrays: Mapping[str, int]
    files: Mapping[str, int]


def segment_size(
    dimensions: Dimensions,
    records: Sequence[PlannedRecord],
    *,
    n: int = 0,
    chunk_tokens: int | None = None,
    metadata_sizes: MetadataSizes | None = None,
) -> SegmentSize:
    """Return the bytes of the segment that these records make; its commit record is among the files.

    With ``fast`` they are exact, those of the commit record up to provenance and producer. With ``compact`` states are
    estimated, and every other array counts as if nothing of it could be compressed.
    """
    metadata_sizes = metadata_sizes or MetadataSizes(dimensions.codec, chunk_tokens=chunk_tokens)
    ids, tokens, states = [r.id for r in records], [r.tokens for r in records], [r.states for r in records]
    id_bytes = sum(len(i.encode()) for i in ids)
    totals = Totals(records=len(ids), tokens=sum(tokens), states=sum(states), id_bytes=id_bytes)
    specs = totals.specs(dimensions, positions=any(r.positions for r in records))
    files = {f"{group}/zarr.json": len(group_json()) for group in segment_groups(dimensions.fields)}
    for name, spec in specs.items():
        files[f"{name}/{spec.file}"] = _array_file(dimensions, spec, chunk_tokens=chunk_tokens)
        files[f"{name}/zarr.json"] = metadata_sizes.of(spec)
    members = commit_members(
        writer="0" * 20,
        n=n,
        ids=ids,
        tokens=tokens,
        states=states,
        provenance=[Provenance().model_dump(mode="json")],
        provenance_index=[0] * len(ids),
        source_digests=[f"sha256:{'0' * 64}"] * len(ids),
        producer=None,
        files={key: FileEntry(size, _CHECKSUM) for key, size in files.items()},
    )
    files["zarr.json"] = len(group_json({**members, "checksum": _CHECKSUM}))
    return SegmentSize(totals=totals, arrays={name: s.nbytes for name, s in specs.items()}, files=files)


def _array_file(dimensions: Dimensions, spec: ArraySpec, *, chunk_tokens: int | None) -> int:
    """Return the bytes of the one file that holds an array: a shard, or its one chunk."""
    fast = dimensions.codec == "fast"
    if not fast and spec.axis == "state":
        return round(spec.nbytes * _share(dimensions, spec.name))
    overhead = (0 if fast else _BLOSC_HEADER) + _CRC
    if not spec.sharded:
        return spec.nbytes + overhead
    rows = chunk_rows(spec, dimensions.codec, chunk_tokens)
    chunks = -(-spec.shape[0] // rows)  # the last one is filled up
    return chunks * (rows * spec.row_bytes + overhead + _INDEX_ENTRY) + _CRC


class MetadataSizes:
    """Sizes of the ``zarr.json`` of arrays: made once for all lengths of the same numbers of digits."""

    def __init__(self, codec: Codec, *, chunk_tokens: int | None) -> None:
        self._codec, self._chunk_tokens = codec, chunk_tokens
        self._sizes: dict[tuple[str, tuple[int, ...]], int] = {}

    def of(self, spec: ArraySpec) -> int:
        """Return the size of one array's metadata in bytes."""
        rows, chunk = spec.shape[0], chunk_rows(spec, self._codec, self._chunk_tokens)
        numbers = (rows, -(-rows // chunk) * chunk, chunk * spec.row_bytes)
        key = (spec.name, tuple(len(str(number)) for number in numbers))
        if key not in self._sizes:
            self._sizes[key] = len(metadata(spec, codec=self._codec, chunk_rows=chunk))
        return self._sizes[key]


@dataclass(kw_only=True)
class StoreSize:
    """Sums over the segments of a store.

    Attributes
    ----------
    records, tokens, segments
        Counts.
    files
        Of a new store: those of its segments, the root and the group of the segments.
    arrays
        Bytes by name of the array, before they are encoded.
    encoded
        Bytes of the files of arrays; with ``compact`` an estimate.
    metadata
        Bytes of all ``zarr.json``, commit records among them.
    """

    records: int = 0
    tokens: int = 0
    segments: int = 0
    files: int = 2
    arrays: Counter[str] = field(default_factory=Counter)
    encoded: int = 0
    metadata: int = 0

    @property
    def raw(self) -> int:
        """Bytes of all arrays before they are encoded."""
        return self.arrays.total()

    @property
    def stored(self) -> int:
        """Bytes of all files."""
        return self.encoded + self.metadata


class Plan:
    """Deals records into segments as a writer does that is given them in this order and not closed in between.

    Parameters
    ----------
    dimensions, segment_bytes, chunk_tokens
        As of the writer.
    """

    def __init__(self, dimensions: Dimensions, *, segment_bytes: int, chunk_tokens: int | None = None) -> None:
        self._dimensions, self._segment_bytes, self._chunk_tokens = dimensions, segment_bytes, chunk_tokens
        self._metadata = MetadataSizes(dimensions.codec, chunk_tokens=chunk_tokens)
        self._records: list[PlannedRecord] = []
        self._totals = NO_RECORDS
        self._size = StoreSize(metadata=len(group_json()))

    def add(self, record: PlannedRecord, *, times: int = 1) -> None:
        """Add a record, or several alike."""
        nbytes = record_bytes(self._dimensions, tokens=record.tokens, states=record.states, positions=record.positions)
        while times:
            room = self._room(record, nbytes, times)
            if not room:
                self._close()
            elif self._records or room == times:
                self._records += [record] * room
                self._totals = self._with(record, nbytes, room)
                times -= room
            else:  # they fill an empty segment, and more of them; the last may have room for another kind
                whole = (times - 1) // room
                self._records = [record] * room
                self._close(whole)
                times -= room * whole

    def _with(self, record: PlannedRecord, nbytes: int, times: int) -> Totals:
        id_bytes = len(record.id.encode())
        return self._totals.plus(
            tokens=record.tokens, states=record.states, id_bytes=id_bytes, nbytes=nbytes, times=times
        )

    def _room(self, record: PlannedRecord, nbytes: int, times: int) -> int:
        """Return how many of ``times`` such records still fit; into an empty segment at least one."""

        def full(k: int) -> bool:
            return not fits(self._dimensions, self._with(record, nbytes, k), segment_bytes=self._segment_bytes)

        room = times if not full(times) else bisect_left(range(1, times + 1), x=True, key=full)
        return room if self._records else max(room, 1)

    def _close(self, times: int = 1) -> None:
        size = self._size
        segment = segment_size(
            self._dimensions,
            self._records,
            n=size.segments,
            chunk_tokens=self._chunk_tokens,
            metadata_sizes=self._metadata,
        )
        own = sum(n for key, n in segment.files.items() if key.rpartition("/")[2] == "zarr.json")
        size.records += segment.totals.records * times
        size.tokens += segment.totals.tokens * times
        size.segments += times
        size.files += len(segment.files) * times
        size.metadata += own * times
        size.encoded += (sum(segment.files.values()) - own) * times
        for name, nbytes in segment.arrays.items():
            size.arrays[name] += nbytes * times
        self._records, self._totals = [], NO_RECORDS

    def finish(self) -> StoreSize:
        """Close the last segment and return the sums."""
        if self._records:
            self._close()
        return self._size
