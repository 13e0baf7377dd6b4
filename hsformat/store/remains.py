"""What a segment with a damaged ``zarr.json`` still says of itself: its commit record if that is whole, or its ids."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.problems import StoreError
from hsformat.store.array_json import ArraySpec, check_array_json, check_length
from hsformat.store.backend import Source
from hsformat.store.codec import DamagedChunk
from hsformat.store.commit import CommitRecord, load_commit
from hsformat.store.metadata import MAX_JSON_BYTES, SEGMENTS, group_json, json_object
from hsformat.store.native import NativeArray
from hsformat.strict_json import parse_json

__all__ = ["known_ids", "recovered_commit"]

_SMALL: dict[str, np.dtype[Any]] = {"ids": np.dtype(np.uint8), "id_offsets": np.dtype("<i8")}


def recovered_commit(source: Source, name: str) -> CommitRecord | None:
    """Return the commit record inside of a ``zarr.json`` that is damaged elsewhere: its own checksum proves it.

    None: there is none that is whole, or it cannot be read.
    """
    try:
        raw = source.read(f"{SEGMENTS}/{name}/zarr.json", 0, MAX_JSON_BYTES + 1)
    except OSError:
        return None
    text = raw.decode(errors="replace") if len(raw) <= MAX_JSON_BYTES else ""
    for start in {text.find("{", text.find('"hsformat"')), text.rfind("{", 0, text.find('"spec_version"') + 1)} - {-1}:
        try:
            _, end = json.JSONDecoder().raw_decode(text, start)
            attribute = parse_json(text[start:end])
        except (ValueError, RecursionError):
            continue
        if (commit := load_commit(_OneFile(source, group_json(attribute)), name)[0]) is not None:
            return commit
    return None


class _OneFile:
    """A source that has the same bytes under every key."""

    def __init__(self, source: Source, data: bytes) -> None:
        self.location, self.state, self.folders, self._data = source.location, source.state, source.folders, data

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._data[start : None if length is None else start + length]

    def size(self, key: str) -> int | None:
        return len(self._data)


def known_ids(source: Source, prefix: str) -> list[str]:
    """Return the ids of a segment whose commit record is damaged, from its arrays; empty if those do not say."""
    arrays = []
    for name in ("id_offsets", "ids"):
        array = _small_array(source, f"{prefix}/{name}", name)
        if array is None:
            return []
        arrays.append(array)
    offsets, text = arrays
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(text) or (np.diff(offsets) <= 0).any():
        return []
    data = text.tobytes()
    try:
        return [data[a:b].decode() for a, b in pairwise(offsets.tolist())]
    except UnicodeDecodeError:
        return []


def _small_array(source: Source, prefix: str, name: str) -> npt.NDArray[Any] | None:
    """Read an array of one chunk by its own metadata; its CRC-32C vouches for it. None: it cannot be read."""
    where = f"{source.location}/{prefix}"
    try:
        raw = source.read(f"{prefix}/zarr.json", 0, MAX_JSON_BYTES + 1)
        data = json_object(raw)
        shape = data.get("shape") if isinstance(data, dict) else None
        if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or not 0 < shape[0] < 2**31:
            return None
        spec = ArraySpec(name=name, shape=(shape[0],), dtype=_SMALL[name])
        encoding, problems = check_array_json(raw, spec, where=where)
        size = source.size(f"{prefix}/{spec.file}")
        if problems or size is None or check_length(spec, encoding, size, where=where):
            return None
        return NativeArray(source, prefix, spec, encoding, {spec.file: size}).read(slice(None))
    except (OSError, StoreError, DamagedChunk):
        return None
