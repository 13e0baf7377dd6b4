"""Plain zarr-python over obstore, and TensorStore, read every array of a store as this library does."""

from __future__ import annotations

import numpy as np
import obstore.store
import pytest
import tensorstore
import zarr
import zarr.storage
from factories import tiny_contract, tiny_record

import hsformat as hs
import hsformat.zarr_dtype  # the type bfloat16, for plain zarr
from hsformat.store.local import LocalBackend
from hsformat.store.segment import SegmentReader

FIELDS = [
    {"name": "weight", "axis": "record", "dtype": "float32", "shape": [], "must_understand": False},
    {"name": "label", "axis": "token", "dtype": "int16", "shape": [2], "must_understand": False},
]


@pytest.fixture(params=["compact", "fast"])
def stored(request, tmp_path):
    """Return a store of two segments with positions and fields, and its path."""
    contract = tiny_contract(codec=request.param, fields=FIELDS)
    with hs.create(tmp_path / "s", contract, chunk_tokens=4) as writer:
        for i in range(4):
            record = tiny_record(contract, id=f"r{i}", tokens=6 + i, seed=i)
            record.position_ids = np.arange(6 + i) + i % 2
            writer.append(record)
            if i == 1:
                writer.flush()
    return hs.open(tmp_path / "s"), tmp_path / "s"


def zarr_over_obstore(path, name):
    store = zarr.storage.ObjectStore(obstore.store.LocalStore(path), read_only=True)
    return np.asarray(zarr.open_array(store, path=name, mode="r")[...])


def tensor_store(path, name):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}
    return np.asarray(tensorstore.open(spec, open=True).result().read().result())


@pytest.mark.parametrize("read", [zarr_over_obstore, tensor_store])
def test_every_array(stored, read):
    store, path = stored
    seen = set()
    for commit in store.segments:
        reader = SegmentReader(LocalBackend(str(path)), store.contract, commit)
        for name in reader.array_names:
            own, other = reader.rows(name, slice(None)), read(path, f"{commit.prefix}/{name}")
            assert (other.shape, other.dtype) == (own.shape, own.dtype), name
            assert other.tobytes() == own.tobytes(), name
            seen.add(name)
        of_zarr = [k for k in commit.files if k.endswith("/zarr.json")]
        groups = {"hidden/zarr.json", "stats/zarr.json", "fields/zarr.json"}
        assert {k.removesuffix("/zarr.json") for k in of_zarr if k not in groups} == set(reader.array_names)
    assert {"hidden/d2", "stats/d2", "input_ids", "position_ids", "fields/weight", "fields/label", "ids"} <= seen
