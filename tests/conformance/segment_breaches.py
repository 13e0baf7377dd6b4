"""Broken commit records, files, chunks and statistics of a segment: rules G."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from conformance.breaches import Breaches
from conformance.independent_reader import crc32c
from conformance.tamper import (
    edit_array,
    edit_commit,
    edit_index,
    edit_root,
    flip_byte,
    list_again,
    rewrite_array,
    segment,
)
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.digests import checksum
from hsformat.store.array_json import ArraySpec
from hsformat.store.array_json import array_json as array_json_of
from hsformat.zarr_dtype import BFloat16

breaks = Breaches()


@breaks("G-1")
def commit_record_edited(store):
    edit_commit(store, lambda c: c["tokens"].reverse(), seal=False)


@breaks("G-1")
def commit_record_cut(store):
    path = segment(store) / "zarr.json"
    path.write_text(path.read_text()[:200])


@breaks("G-1")
def commit_record_of_another_segment(store):
    edit_commit(store, lambda c: c.update(n=7))


@breaks("G-1")
def commit_record_without_a_member(store):
    edit_commit(store, lambda c: c.pop("producer"))


@breaks("G-1")
def provenance_without_a_member(store):
    edit_commit(store, lambda c: c["provenance"][0]["generation"].pop("seed"))


@breaks("G-1")
def path_that_leads_out(store):
    edit_commit(store, lambda c: c["files"].update({"a/../../b": {"size": 1, "checksum": checksum(b"x")}}))


@breaks("G-15")
def commit_record_of_another_version(store):
    edit_commit(store, lambda c: c.update(spec_version="1.1"))


@breaks("G-2")
def shard_deleted(store):
    (segment(store) / "hidden" / "d2" / "c" / "0" / "0").unlink()
    with pytest.raises(hs.StoreError) as e:
        hs.open(store)["r0"]
    assert [p.code for p in e.value.problems] == ["HS503"]


@breaks("G-2")
def metadata_deleted(store):
    (segment(store) / "input_ids" / "zarr.json").unlink()


@breaks("G-3")
def shard_cut(store):
    path = segment(store) / "hidden" / "d2" / "c" / "0" / "0"
    path.write_bytes(path.read_bytes()[:-9])


@breaks("G-4")
def byte_of_a_chunk_flipped(store):
    flip_byte(segment(store) / "hidden" / "d2" / "c" / "0" / "0", 40)


@breaks("G-4")
def byte_of_array_metadata_flipped(store):
    flip_byte(segment(store) / "hidden" / "d2" / "zarr.json", 20)


@breaks("G-4")
def two_intact_shards_exchanged(store):  # each ends in its own CRC-32C, so that a CRC of the whole file is a constant
    shutil.rmtree(store)
    with hs.create(store, tiny_contract(codec="fast")) as writer:
        writer.append(tiny_record(writer.contract))
    first, second = (segment(store) / "hidden" / key / "c" / "0" / "0" for key in ("d1", "d2"))
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b)
    first.write_bytes(b)
    second.write_bytes(a)


@breaks("G-13")
def chunk_damaged_before_its_file_was_listed(store):
    path = segment(store) / "hidden" / "d2" / "c" / "0" / "0"
    flip_byte(path, 40)
    list_again(store, "hidden/d2/c/0/0")


@breaks("G-13")
def chunk_that_says_another_length(store):
    """Of Blosc's header alone: nothing else of the chunk is damaged."""
    path = segment(store) / "loss_mask" / "c" / "0"
    data = bytearray(path.read_bytes()[:-4])
    data[4:8] = (10**9).to_bytes(4, "little")
    path.write_bytes(data + crc32c(bytes(data)).to_bytes(4, "little"))
    list_again(store, "loss_mask/c/0")


@breaks("G-13")
def shard_with_a_gap(store):
    path = segment(store) / "hidden" / "d2" / "c" / "0" / "0"
    data = path.read_bytes()
    path.write_bytes(data[:-20] + bytes(2**20) + data[-20:])
    list_again(store, "hidden/d2/c/0/0")


@breaks("G-12")
def chunk_not_stored(store):
    edit_index(store, "hidden/d2", lambda index: index.fill(2**64 - 1))


@breaks("G-13")
def index_that_points_outside(store):
    edit_index(store, "hidden/d2", lambda index: index[0].put(0, 10**6))


@breaks("G-5")
def offsets_moved(store):
    rewrite_array(store, "token_offsets", lambda o: o + np.array([0, 1, *[0] * (len(o) - 2)]))


@breaks("G-5")
def offsets_do_not_start_at_zero(store):
    rewrite_array(store, "state_offsets", lambda o: o + 1)


@breaks("G-6")
def other_ids(store):
    rewrite_array(store, "ids", lambda b: b[::-1].copy())


@breaks("G-7")
def another_element_type(store):
    rewrite_array(store, "hidden/d2", lambda h: h.astype(np.float16))


def metadata_with(array: str, path: str, value: object) -> Callable[[Path], None]:
    """Return a case that sets, or with ``...`` removes, one member of an array's metadata."""

    def case(store: Path) -> None:
        edit_array(store, array, lambda meta: put(meta, path, value))

    return case


def put(at, path: str, value: object) -> None:
    *front, name = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in front:
        at = at[key]
    if value is ...:
        del at[name]
    else:
        at[name] = value


BIG = {"name": "bytes", "configuration": {"endian": "big"}}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
SHARD = "codecs.0.configuration"

for array, path, value in [
    ("hidden/d2", "zarr_format", 2),
    ("hidden/d2", "node_type", "group"),
    ("hidden/d2", "shape", [26, 8, 1]),
    ("hidden/d2", "shape", [26, 9]),
    ("hidden/d2", "shape", ...),
    ("hidden/d2", "data_type", "uint16"),
    ("hidden/d2", "data_type", {"name": "bfloat16", "configuration": {"x": 1}}),
    ("hidden/d2", "chunk_grid.name", "rectangular"),
    ("hidden/d2", "chunk_grid.configuration.chunk_shape", [512, 8]),
    ("hidden/d2", "chunk_grid.configuration.chunk_shape", [26, 8]),
    ("hidden/d2", "chunk_key_encoding", {"name": "v2"}),
    ("hidden/d2", "chunk_key_encoding.configuration.separator", "."),
    ("hidden/d2", "codecs", []),
    ("hidden/d2", "codecs", {"name": "bytes"}),
    ("hidden/d2", "codecs", [LITTLE, {"name": "blosc", "configuration": {}}, CRC]),
    ("hidden/d2", "codecs.0.configuration", ...),
    ("hidden/d2", f"{SHARD}.chunk_shape", [256, 4]),
    ("hidden/d2", f"{SHARD}.chunk_shape", [0, 8]),
    ("hidden/d2", f"{SHARD}.chunk_shape", [True, 8]),
    ("hidden/d2", f"{SHARD}.chunk_shape", [2**40, 8]),
    ("hidden/d2", f"{SHARD}.chunk_shape", []),
    ("hidden/d2", f"{SHARD}.index_location", "start"),
    ("hidden/d2", f"{SHARD}.index_codecs", [LITTLE]),
    ("hidden/d2", f"{SHARD}.index_codecs", [BIG, CRC]),
    ("hidden/d2", f"{SHARD}.index_codecs", ...),
    ("hidden/d2", f"{SHARD}.codecs.0", BIG),
    ("hidden/d2", f"{SHARD}.codecs.0", {"name": "bytes"}),
    ("hidden/d2", f"{SHARD}.codecs.1", {"name": "gzip", "configuration": {"level": 1}}),
    ("hidden/d2", f"{SHARD}.codecs.2", ...),
    ("hidden/d2", "storage_transformers", [{"name": "x"}]),
    ("hidden/d2", "surprise", {"name": "x"}),
    ("input_ids", "chunk_grid.configuration.chunk_shape", [13]),
    ("input_ids", f"{SHARD}.codecs.0", BIG),
    ("input_ids", f"{SHARD}.index_codecs.0", BIG),
    ("loss_mask", f"{SHARD}.codecs.2", ...),
    ("loss_mask", f"{SHARD}.codecs.0", BIG),
    ("loss_mask", "data_type", "int8"),
    ("ids", "codecs.2", ...),
    ("token_offsets", "codecs.0", BIG),
    ("token_offsets", "chunk_grid.configuration.chunk_shape", [3]),
    ("stats/d3", "data_type", "float64"),
    ("token_offsets", "data_type", "uint64"),
]:
    breaks("G-7")(metadata_with(array, path, value))


@breaks("G-7")
def not_sharded(store):
    array = np.array(zarr.open_array(segment(store) / "hidden" / "d2", mode="r")[...])
    shutil.rmtree(segment(store) / "hidden" / "d2")
    codecs = {"serializer": LITTLE, "compressors": [zarr.codecs.BloscCodec(), zarr.codecs.Crc32cCodec()]}
    target = zarr.create_array(
        segment(store) / "hidden" / "d2", shape=array.shape, chunks=array.shape, dtype=BFloat16(), **codecs
    )
    target[...] = array
    for key in ("zarr.json", "c/0/0"):
        list_again(store, f"hidden/d2/{key}")


@breaks("G-7")
def small_arrays_that_are_not_small(store):
    """2^30 bytes each; one of them alone would be within the limit of Blosc."""
    field = {"axis": "record", "dtype": "uint8", "must_understand": False, "shape": [2**29]}
    edit_root(store, lambda a: a["contract"].update(fields=[{"name": "a", **field}, {"name": "b", **field}]))
    for name in ("a", "b"):
        spec = ArraySpec(name=f"fields/{name}", shape=(2, 2**29), dtype=np.dtype("uint8"))
        folder = segment(store) / "fields" / name
        folder.mkdir(parents=True)
        (folder / "zarr.json").write_text(json.dumps(array_json_of(spec, codec="compact", chunk_rows=2)))
        list_again(store, f"fields/{name}/zarr.json")


@breaks("G-7")
def more_inner_chunks_than_an_index_may_have(store):
    def edit(commit):
        commit["tokens"][0] += 2**25
        commit["states"][0] += 2**25

    def one_row_a_chunk(meta):
        meta["shape"][0] += 2**25
        meta["chunk_grid"]["configuration"]["chunk_shape"][0] = meta["shape"][0]
        meta["codecs"][0]["configuration"]["chunk_shape"][0] = 1

    edit_commit(store, edit)
    edit_array(store, "hidden/d2", one_row_a_chunk)


for text in ("{}", "[]", "null", '{"codecs": []}', "no JSON"):

    @breaks("G-7")
    def metadata_that_is_none(store, text=text):
        (segment(store) / "hidden" / "d2" / "zarr.json").write_text(text)
        list_again(store, "hidden/d2/zarr.json")


@breaks("G-10")
def stats_of_other_states(store):
    rewrite_array(store, "stats/d2", lambda s: s * 2)


@breaks("G-10")
def the_mean_norm_alone_of_other_states(store):
    rewrite_array(store, "stats/d2", lambda s: s * np.array([1.002, 1], s.dtype))


@breaks("G-10")
def the_largest_value_alone_one_bit_off(store):
    rewrite_array(store, "stats/d2", lambda s: np.stack([s[:, 0], np.nextafter(s[:, 1], s.dtype.type(0))], axis=1))


@breaks("G-10")
def two_captures_exchanged_with_their_entries(store):
    def edit(commit):
        files = commit["files"]
        for key in [k for k in files if k.startswith("hidden/d1/")]:
            other = key.replace("d1", "d2")
            files[key], files[other] = files[other], files[key]

    hidden = segment(store) / "hidden"
    (hidden / "d1").rename(hidden / "x")
    (hidden / "d2").rename(hidden / "d1")
    (hidden / "x").rename(hidden / "d2")
    edit_commit(store, edit)
    assert "HS504" in {p.code for p in hs.validate_store(store, level="sample")}


@breaks("G-11")
def a_row_too_many(store):
    rewrite_array(store, "loss_mask", lambda m: np.append(m, m[:1]))
