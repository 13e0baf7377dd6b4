"""What the ``zarr.json`` of an array must be (rules G-7, G-11), and comparing one with it, clause by clause.

Zarr allows several spellings of one meaning; all are brought to the plainest before they are compared. Arrays are then
decoded by what was checked, and never by what is on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from hsformat.contract import differing_fields
from hsformat.dtypes import dtype_name
from hsformat.problems import Problem, problem
from hsformat.store.codec import MAX_CHUNK_BYTES, Codec, index_bytes, longest_chunk
from hsformat.store.metadata import json_object

__all__ = [
    "MAX_CHUNKS",
    "ArraySpec",
    "Axis",
    "Encoding",
    "array_json",
    "check_array_json",
    "check_length",
    "check_small_arrays",
]

MAX_CHUNKS = 2**24
"""Of a shard, so that its index has a bound."""

Axis = Literal["state", "token", "record"]
"""What the rows of an array are of: states, tokens, or else (records, bytes of ids)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """What an array of a segment must be."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: Axis = "record"

    @property
    def sharded(self) -> bool:
        """Whether the array is cut into chunks inside one shard; any other is one chunk."""
        return self.axis != "record"

    @property
    def file(self) -> str:
        """The key of its one shard or chunk, relative to the array."""
        return "/".join(["c", *"0" * len(self.shape)])

    @property
    def nbytes(self) -> int:
        """Bytes before they are encoded."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row before they are encoded."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def array_json(spec: ArraySpec, *, codec: Codec, chunk_rows: int) -> dict[str, Any]:
    """Return the ``zarr.json`` of an array of which a chunk, or an inner chunk, has so many rows."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum: dict[str, Any] = {"name": "crc32c"}
    blosc = {
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "typesize": spec.dtype.itemsize,
        # One block a chunk: with Blosc's own choice of size, splitting costs a tenth of the ratio on real states.
        "blocksize": chunk_rows * spec.row_bytes,
    }
    codecs = [little, {"name": "blosc", "configuration": blosc}, checksum] if codec == "compact" else [little, checksum]
    chunk, sharded = (chunk_rows, *spec.shape[1:]), spec.sharded
    if sharded:
        configuration = {
            "chunk_shape": list(chunk),
            "codecs": codecs,
            "index_codecs": [little, checksum],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        chunk = (-(-spec.shape[0] // chunk_rows) * chunk_rows, *spec.shape[1:])
    fill = False if spec.dtype == np.bool_ else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": dtype_name(spec.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        # A reader that does not check sizes sees NaN where states are lost, never zeros (zarr-python#486).
        "fill_value": "NaN" if spec.axis == "state" else fill,
        "codecs": codecs,
        "attributes": {},
    }


class Encoding(NamedTuple):
    """How the numbers of an array are encoded: rows of a chunk, and by which codec."""

    chunk_rows: int
    codec: Codec


def check_array_json(raw: bytes, spec: ArraySpec, *, where: str) -> tuple[Encoding, list[Problem]]:
    """Compare the bytes of a ``zarr.json`` with what it must be.

    Returns
    -------
    How the array says that it is encoded; and one problem a clause that differs from rule G-7: HS101 for the number of
    rows, HS507 for everything else.
    """
    none = Encoding(0, "fast")
    data = json_object(raw)
    if isinstance(data, str):
        return none, [_drift(f"{where}/zarr.json", data, "metadata of a Zarr v3 array")]
    if (shape := data.get("shape")) != list(spec.shape):  # chunks follow from the shape: nothing else is compared
        if isinstance(shape, list) and shape[1:] == list(spec.shape[1:]) and type(shape[0]) is int:
            fix, expected = "write the segment again", f"{spec.shape[0]}, by the commit record"
            return none, [problem("HS101", where=where, got=f"{shape[0]} rows", expected=expected, fix=fix)]
        return none, [_drift(f"{where}/zarr.json: shape", shape, list(spec.shape))]
    rows, most = _chunk_rows(data, spec), MAX_CHUNK_BYTES // spec.row_bytes
    if spec.sharded and not 0 < rows <= most:
        got, expected = f"inner chunks of {rows} rows", f"1 to {most} rows, by the limit of Blosc"
        return none, [_drift(f"{where}/zarr.json: codecs[0].configuration.chunk_shape", got, expected)]
    encoding = Encoding(rows, _codec(data, spec))
    plain, expected_plain = _plain(data, spec), _plain(array_json(spec, **encoding._asdict()), spec)
    return encoding, [
        _drift(f"{where}/zarr.json: {path}", got, expected)
        for path, got, expected in differing_fields(plain, expected_plain)
    ]


def check_length(spec: ArraySpec, encoding: Encoding, size: int, *, where: str) -> list[Problem]:
    """Return HS507 for more chunks than a shard may have, HS504 for a file that is longer than its chunks can be.

    Asked before a byte of the file is read, and however its metadata was checked: what an index or a chunk takes in
    memory follows from these numbers.
    """
    chunks = -(-spec.shape[0] // encoding.chunk_rows)
    if chunks > MAX_CHUNKS:
        return [_drift(where, f"{chunks} chunks", f"at most {MAX_CHUNKS} of one shard")]
    most = chunks * longest_chunk(encoding.chunk_rows * spec.row_bytes, encoding.codec)
    most += index_bytes(chunks) if spec.sharded else 0
    if size > most:
        expected = f"at most {most}, those of {chunks} chunk(s) and their index"
        return [problem("HS504", where=f"{where}/{spec.file}", got=f"a file of {size} bytes", expected=expected)]
    return []


def check_small_arrays(specs: Iterable[ArraySpec], *, where: str) -> list[Problem]:
    """Return HS507 where the arrays that may be held whole, all but the states, are too large together (rule G-7)."""
    total = sum(s.nbytes for s in specs if s.axis != "state")
    if total <= MAX_CHUNK_BYTES:
        return []
    expected = f"at most {MAX_CHUNK_BYTES}, since a reader may hold them whole"
    return [_drift(where, f"{total} bytes of arrays outside hidden/", expected)]


def _drift(where: str, got: Any, expected: Any) -> Problem:
    fix = "write the segment again; the contract says what its arrays are"
    return problem("HS507", where=where, got=str(got)[:300], expected=str(expected), fix=fix)


def _chunk_rows(data: dict[str, Any], spec: ArraySpec) -> int:
    """Return rows of an inner chunk, as the metadata says; 0: it does not."""
    if not spec.sharded:
        return spec.shape[0]
    match data.get("codecs"):
        case [{"configuration": {"chunk_shape": [int(rows), *_]}}, *_] if not isinstance(rows, bool):
            return rows
        case [{"name": "sharding_indexed"}, *_]:
            return 0
        case _:  # another codec: reported by comparing, for which any number does
            return 1


def _codec(data: dict[str, Any], spec: ArraySpec) -> Codec:
    """Return which of the two lists of codecs the metadata has, or is closer to."""
    codecs = data.get("codecs")
    match codecs:
        case [{"configuration": {"codecs": inner}}, *_] if spec.sharded:
            codecs = inner
    named = [_named(c) for c in codecs] if isinstance(codecs, list) else []
    return "compact" if any(isinstance(c, dict) and c.get("name") == "blosc" for c in named) else "fast"


def _plain(data: dict[str, Any], spec: ArraySpec) -> dict[str, Any]:
    """Return what decides how an array is read, in the plainest spelling."""
    free = ("attributes", "dimension_names", "fill_value")
    out = {k: v for k, v in data.items() if k not in free and not _is_optional(v)}
    if out.get("storage_transformers") == []:
        del out["storage_transformers"]
    out["data_type"] = _named(data.get("data_type"))
    if isinstance(out["data_type"], dict) and not out["data_type"].get("configuration"):
        out["data_type"] = out["data_type"].get("name")
    encoding = _named(data.get("chunk_key_encoding"))
    if isinstance(encoding, dict) and encoding.get("name") == "default" and not encoding["configuration"]:
        encoding["configuration"] = {"separator": "/"}
    out["chunk_key_encoding"] = encoding
    out["chunk_grid"] = _named(data.get("chunk_grid"))
    out["codecs"] = _plain_codecs(data.get("codecs"), spec.dtype.itemsize)
    return out


def _is_optional(value: Any) -> bool:
    """Whether Zarr v3 says that a reader may ignore an extension that it does not know."""
    return isinstance(value, dict) and value.get("must_understand") is False and "name" not in value


def _named(value: Any) -> Any:
    """Return ``"x"`` and ``{"name": "x"}`` as an object of a name and a configuration."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict):
        return value
    return {"configuration": {}, **{k: v for k, v in value.items() if k != "must_understand"}}


def _plain_codecs(codecs: Any, itemsize: int) -> Any:
    return [_plain_codec(c, itemsize) for c in codecs] if isinstance(codecs, list) else codecs


def _plain_codec(codec: Any, itemsize: int) -> Any:
    codec = _named(codec)
    match codec:
        case {"name": "bytes", "configuration": {"endian": "little"}} if itemsize == 1:
            codec["configuration"] = {}
        case {"name": "blosc", "configuration": dict()}:  # what its parameters are is written in each chunk
            codec["configuration"] = {}
        case {"name": "sharding_indexed", "configuration": dict(inner)}:
            codec["configuration"] = {
                "index_location": "end",
                **inner,
                "codecs": _plain_codecs(inner.get("codecs"), itemsize),
                "index_codecs": _plain_codecs(inner.get("index_codecs"), 8),
            }
    return codec
