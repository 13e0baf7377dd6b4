"""Arrays of a segment: which there are, how they are cut into chunks, and how a whole one becomes files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture, Contract, FieldSpec, StateDtype
from hsformat.dtypes import numpy_dtype
from hsformat.problems import StoreError, problem
from hsformat.store.array_json import ArraySpec, Axis, array_json
from hsformat.store.codec import MAX_CHUNK_BYTES, Codec, encode_chunk
from hsformat.store.shards import encode_shard

__all__ = [
    "Dimensions",
    "array_specs",
    "check_chunk",
    "chunk_rows",
    "encode_array",
    "metadata",
    "planned_specs",
    "segment_groups",
]

_STATE_BYTES: dict[Codec, int] = {"compact": 1024 * 1024, "fast": 80 * 1024}
"""Most bytes of an inner chunk of states, unless it has few rows: compression gets better up to there; without it, less
is read beside a record's own rows."""

_STATE_ROWS = (16, 256)
"""Least and most rows of an inner chunk of states."""

_TOKEN_ROWS = 4096
"""Rows of an inner chunk of what is stored a token beside its states, unless that is more than a MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What of a contract decides the arrays of a segment: of a contract, or of a store that is only planned.

    Attributes
    ----------
    hidden_size, captures, fields, codec
        As in :class:`hsformat.contract.Contract`.
    target_dtype
        The dtype in which the target runs.
    """

    hidden_size: int
    captures: tuple[Capture, ...]
    fields: tuple[FieldSpec, ...] = ()
    codec: Codec
    target_dtype: StateDtype

    @classmethod
    def of(cls, contract: Contract) -> Dimensions:
        """Return those of a contract."""
        return cls(
            hidden_size=contract.target.hidden_size,
            captures=contract.captures,
            fields=contract.fields,
            codec=contract.codec,
            target_dtype=contract.target.dtype,
        )


def array_specs(
    contract: Contract, *, tokens: int, states: int, records: int, id_bytes: int, positions: bool
) -> dict[str, ArraySpec]:
    """Return the arrays of a segment by name; the lengths are sums over its records (docs/spec/1.0.md, section 5)."""
    dimensions = Dimensions.of(contract)
    return planned_specs(
        dimensions, tokens=tokens, states=states, records=records, id_bytes=id_bytes, positions=positions
    )


def planned_specs(
    dimensions: Dimensions, *, tokens: int, states: int, records: int, id_bytes: int, positions: bool
) -> dict[str, ArraySpec]:
    """Return what :func:`array_specs` returns for a contract of these dimensions."""
    r = records
    rows: list[tuple[str, tuple[int, ...], str, Axis]] = [
        ("input_ids", (tokens,), "int32", "token"),
        ("loss_mask", (tokens,), "uint8", "token"),
        ("token_offsets", (r + 1,), "int64", "record"),
        ("state_offsets", (r + 1,), "int64", "record"),
        ("ids", (id_bytes,), "uint8", "record"),
        ("id_offsets", (r + 1,), "int64", "record"),
    ]
    if positions:
        rows.append(("position_ids", (tokens,), "int64", "token"))
    rows += [(f"hidden/{c.key}", (states, dimensions.hidden_size), c.dtype, "state") for c in dimensions.captures]
    rows += [(f"stats/{c.key}", (r, 2), "float32", "record") for c in dimensions.captures]
    for f in dimensions.fields:
        rows.append((f"fields/{f.name}", (tokens if f.axis == "token" else r, *f.shape), f.dtype, f.axis))
    return {
        name: ArraySpec(name=name, shape=shape, dtype=numpy_dtype(dtype), axis=axis)
        for name, shape, dtype, axis in rows
    }


def segment_groups(fields: Collection[FieldSpec]) -> tuple[str, ...]:
    """Return the names of the groups inside a segment."""
    return ("hidden", "stats", *(["fields"] if fields else []))


def chunk_rows(spec: ArraySpec, codec: Codec, chunk_tokens: int | None = None) -> int:
    """Return how many rows a writer puts into a chunk of an array, of states ``chunk_tokens`` if that is given."""
    match spec.axis:
        case "state":
            least, most = _STATE_ROWS
            fitting: int = _STATE_BYTES[codec] // max(1, spec.row_bytes)
            return chunk_tokens or max(least, min(most, 2 ** max(0, fitting.bit_length() - 1)))
        case "token":
            return max(1, min(_TOKEN_ROWS, 2**20 // max(1, spec.row_bytes)))
        case "record":
            return spec.shape[0]


def check_chunk(nbytes: int, *, where: str, fix: str) -> None:
    """Refuse a chunk that Blosc cannot hold.

    Raises
    ------
    StoreError
        HS501, naming the limit.
    """
    if nbytes > MAX_CHUNK_BYTES:
        raise StoreError(
            problem(
                "HS501",
                where=where,
                got=f"{nbytes} bytes",
                fix=fix,
                expected=f"at most {MAX_CHUNK_BYTES}, the limit of Blosc (2 GiB less its header)",
            )
        )


def metadata(spec: ArraySpec, *, codec: Codec, chunk_rows: int) -> bytes:
    """Return the ``zarr.json`` of an array as a writer of this library writes it."""
    return json.dumps(array_json(spec, codec=codec, chunk_rows=chunk_rows)).encode()


def encode_array(
    array: npt.NDArray[Any], spec: ArraySpec, *, codec: Codec, chunk_tokens: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of one array, key (relative to the array) and bytes; the metadata last.

    Parameters
    ----------
    array
        Of the spec's shape and dtype.
    """
    rows = chunk_rows(spec, codec, chunk_tokens)
    if spec.sharded:
        yield spec.file, encode_shard(array, rows, codec)
    else:
        body, crc = encode_chunk(np.ascontiguousarray(array), codec)
        yield spec.file, bytes(body) + crc
    yield "zarr.json", metadata(spec, codec=codec, chunk_rows=rows)
