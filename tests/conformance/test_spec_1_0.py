"""Every MUST of docs/spec/1.0.md has a check and a failing case here, and each case gives the code that the rule names.

A case is a function marked ``@breaks("R-4")``: it damages a valid store in the one way that the rule forbids, or
returns the problems with which a reader or a writer refused.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
import zarr
from conformance.independent_reader import crc32c
from conformance.tamper import (
    edit_array,
    edit_commit,
    edit_index,
    edit_root,
    flip_byte,
    list_again,
    rewrite_array,
    rewrite_text,
    segment,
)
from factories import digest, tiny_contract, tiny_record

import hsformat as hs
from hsformat.digests import checksum
from hsformat.problems import CODES, Problem
from hsformat.record import Generation, Provenance
from hsformat.spec.v1_0 import contract_schema, problems_document, rules
from hsformat.store.array_json import ArraySpec
from hsformat.store.array_json import array_json as array_json_of
from hsformat.zarr_dtype import BFloat16

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "docs" / "spec" / "1.0.md").read_text(encoding="utf-8")
CASES: list[tuple[str, Callable[[Path], list[Problem] | None]]] = []
FIELD = {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": True}


def breaks(rule: str):
    def register(case):
        CASES.append((rule, case))
        return case

    return register


def refused(**changes) -> list[Problem]:
    """Append a record to a new writer and return why it was refused."""
    contract = changes.pop("contract", None) or tiny_contract()
    with tempfile.TemporaryDirectory() as folder, hs.create(Path(folder) / "x", contract) as writer:
        with pytest.raises(hs.InvalidRecord) as e:
            writer.append(tiny_record(contract, **changes))
        return e.value.problems


def contract_with(path: str, value: object) -> Callable[[Path], None]:
    """Return a case that sets, or with ``...`` removes, one member of the stored contract."""

    def case(store: Path) -> None:
        def edit(attribute):
            at = attribute["contract"]
            *front, name = path.split(".")
            for key in front:
                at = at[int(key)] if key.isdigit() else at[key]
            if value is ...:
                del at[name]
            else:
                at[name] = value

        edit_root(store, edit)

    return case


for rule, path, value in [
    ("C-1", "surprise", 1),
    ("C-1", "tokenizer_digest", ...),
    ("C-1", "target.head.softcap", ...),
    ("C-1", "captures.0.extra", 1),
    ("C-2", "spec_version", "9.0"),
    ("C-3", "target.num_layers", 0),
    ("C-3", "target.hidden_size", "8"),
    ("C-3", "target.final_norm.kind", "unknown"),
    ("C-3", "target.head.padded_vocab", 50),
    ("C-4", "captures", []),
    ("C-4", "captures.1.depth", 1),
    ("C-4", "captures.0.dtype", "float8"),
    ("C-5", "captures.3.depth", 5),
    ("C-5", "captures.2.norm", "final"),
    ("C-6", "layout.aux", ["d0", "d1"]),
    ("C-6", "layout.aux", ["d1", "d1"]),
    ("C-6", "layout.aux", []),
    ("C-7", "layout.last", "d3"),
    ("C-8", "positions", "mrope"),
    ("C-9", "codec", "zip"),
    ("C-10", "fields", [FIELD, FIELD]),
    ("C-10", "fields", [{**FIELD, "name": "Weight"}]),
    ("C-10", "fields", [{**FIELD, "shape": [1] * 31}]),
    ("C-12", "tokenizer_digest", "md5:00"),
    ("C-12", "target.basis_digest", digest("A")),
]:
    breaks(rule)(contract_with(path, value))


@breaks("C-11")
def unknown_field_that_must_be_understood(store):
    shutil.rmtree(store)
    hs.create(store, tiny_contract(fields=[FIELD])).close()
    with pytest.raises(hs.StoreError) as e:
        hs.open(store)
    assert len(hs.open(store, understands=["weight"])) == 0
    return e.value.problems


@breaks("X-1")
def edited_contract(store):
    edit_root(store, lambda a: a["contract"]["target"].update(vocab_size=99), digest=False)


@breaks("S-1")
def no_attribute(store):
    (store / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')


@breaks("S-1")
def json_cut_in_the_middle(store):
    text = (store / "zarr.json").read_text()
    (store / "zarr.json").write_text(text[: len(text) // 2])


@breaks("S-1")
def no_root(store):
    (store / "zarr.json").unlink()


@breaks("S-2")
def two_versions(store):
    edit_root(store, lambda a: a.update(spec_version="1.1"))


@breaks("S-7")
def root_without_digest(store):
    edit_root(store, lambda a: a.pop("contract_digest"), digest=False)


@breaks("S-8")
def group_of_the_segments_cut(store):
    path = store / "segments" / "zarr.json"
    path.write_text(path.read_text()[:9])
    assert len(hs.open(store)) == 4  # a reader does not need it


def as_somebody_else_reads_it(text: str) -> str:
    return text.replace('"zarr_format"', '"zarr_format": 2, "zarr_format"', 1)


def beyond_its_length(text: str) -> str:
    return text + " " * (2**24 + 1 - len(text))


def with_a_number_that_is_none(text: str) -> str:
    return text.replace('"zarr_format"', '"x": NaN, "zarr_format"', 1)


def as_an_older_zarr(text: str) -> str:
    return text.replace('"zarr_format": 3', '"zarr_format": 2', 1)


def as_an_array(text: str) -> str:
    return text.replace('"node_type": "group"', '"node_type": "array"', 1)


def with_a_member_that_zarr_does_not_name(text: str) -> str:
    return text.replace('"zarr_format"', '"chunk_grid": {}, "zarr_format"', 1)


for edit in (as_an_older_zarr, as_an_array, with_a_member_that_zarr_does_not_name):

    @breaks("S-1")
    def root_group(store, edit=edit):
        rewrite_text(store / "zarr.json", edit)

    @breaks("S-8")
    def segments_group(store, edit=edit):
        rewrite_text(store / "segments" / "zarr.json", edit)

    @breaks("G-1")
    def segment_group(store, edit=edit):
        rewrite_text(segment(store) / "zarr.json", edit)


for edit in (as_somebody_else_reads_it, beyond_its_length, with_a_number_that_is_none):

    @breaks("S-1")
    def root_json(store, edit=edit):
        rewrite_text(store / "zarr.json", edit)

    @breaks("S-8")
    def segments_json(store, edit=edit):
        rewrite_text(store / "segments" / "zarr.json", edit)

    @breaks("G-1")
    def segment_json(store, edit=edit):
        rewrite_text(segment(store) / "zarr.json", edit)

    @breaks("G-7")
    def array_json(store, edit=edit):
        rewrite_text(segment(store) / "hidden" / "d2" / "zarr.json", edit)
        list_again(store, "hidden/d2/zarr.json")


@breaks("S-5")
def uncommitted_segment(store):
    (segment(store) / "zarr.json").unlink()
    assert len(hs.open(store)) == 0


@breaks("S-9")
def replaced_segment(store):
    first = segment(store).name
    with hs.append(store) as writer:
        writer.append(tiny_record(tiny_contract(), id="new"))
    (later,) = (p.parent.name for p in store.glob("segments/*-0/zarr.json") if p.parent.name != first)
    edit_commit(store, lambda c: c.update(replaces=[later]))
    assert hs.open(store).ids == ["r0", "r1", "r2", "r3"]
    (store / "segments" / later / "zarr.json").write_text("damaged")
    assert hs.open(store).ids == ["r0", "r1", "r2", "r3"]
    with hs.append(store) as writer:
        assert "new" not in writer.ids


@breaks("R-1")
def mask_longer_than_ids(_store):
    return refused(loss_mask=np.ones(8, np.uint8))


@breaks("R-1")
def token_field_too_short(_store):
    return refused(contract=tiny_contract(fields=[FIELD]), fields={"weight": np.ones(6, np.float32)})


@breaks("R-2")
def captures_of_different_length(_store):
    return refused(hidden={"d2": np.ones((6, 8), np.float32)})


@breaks("R-2")
def one_state_less_and_not_generated(store):
    def edit(commit):
        commit["provenance"] = [Provenance().model_dump(mode="json")]

    shutil.rmtree(store)
    contract = tiny_contract()
    generated = Provenance(generation=Generation(mode="greedy", max_new_tokens=3))
    states = {k: np.ones((6, 8), np.float32) for k in contract.keys}
    with hs.create(store, contract) as writer:
        writer.append(tiny_record(contract, hidden=states, provenance=generated))
    assert hs.validate_store(store, level="full") == []
    edit_commit(store, edit)


@breaks("R-3")
def no_token(_store):
    return refused(tokens=0)


@breaks("R-4")
def nothing_supervised(store):
    rewrite_array(store, "loss_mask", np.zeros_like)


@breaks("R-5")
def mask_of_two(store):
    rewrite_array(store, "loss_mask", lambda m: m * 2)


@breaks("R-6")
def token_beyond_the_vocabulary(store):
    rewrite_array(store, "input_ids", lambda ids: ids + 100)


@breaks("R-6")
def ignored_index_as_token(store):
    rewrite_array(store, "input_ids", lambda ids: ids * 0 - 100)


@breaks("R-7")
def positions_that_fall(_store):
    return refused(position_ids=np.array([0, 1, 2, 1, 2, 3, 4]))


@breaks("R-7")
def positions_beyond_63_bits(_store):
    return refused(position_ids=np.arange(7, dtype=np.uint64) + np.uint64(2**63))


@breaks("R-8")
def one_id_by_two_writers(store):
    first, second = hs.append(store), hs.append(store)  # each knows what was committed when it was opened
    for writer in (first, second):
        writer.append(tiny_record(tiny_contract(), id="twice"))
        writer.close()


@breaks("R-8")
def empty_id(_store):
    return refused(id="")


@breaks("R-9")
def capture_left_out(store):
    def edit(commit):
        commit["files"] = {k: v for k, v in commit["files"].items() if not k.startswith("hidden/d2/")}

    shutil.rmtree(segment(store) / "hidden" / "d2")
    edit_commit(store, edit)


@breaks("R-10")
def nan_on_disk(store):
    def edit(h):
        h[3, 4] = np.nan
        return h

    rewrite_array(store, "hidden/d3", edit)


@breaks("R-11")
def zero_capture(store):
    rewrite_array(store, "hidden/d1", lambda h: h * 0)


@breaks("R-11")
def capture_of_depth_0_all_zero(_store):
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (0, 1, 2, 3, 4)]
    return refused(contract=tiny_contract(captures=captures), hidden={"d0": np.zeros((7, 8), np.float32)})


@breaks("R-12")
def overflow_of_float16(_store):
    captures = [{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)]
    return refused(contract=tiny_contract(captures=captures), hidden={"d2": np.full((7, 8), 7e4, np.float32)})


@breaks("R-12")
def float8_states(_store):
    return refused(hidden={"d2": np.ones((7, 8), ml_dtypes.float8_e4m3fn)})


@breaks("R-14")
def source_that_is_no_digest(_store):
    return refused(source_digest="banana")


@breaks("R-14")
def provenance_that_is_none(_store):
    return refused(provenance={"generation": {"mode": "none"}})


@breaks("R-13")
def another_width(_store):
    return refused(hidden={"d2": np.ones((7, 9), np.float32)})


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


@pytest.fixture
def store(tmp_path) -> Path:
    contract = tiny_contract()
    path = tmp_path / "data.hs.zarr"
    with hs.create(path, contract) as writer:
        for i in range(4):
            writer.append(tiny_record(contract, id=f"r{i}", tokens=5 + i, seed=i))
    assert hs.validate_store(path, level="full") == []
    return path


def test_every_legal_spelling_is_read(store):
    """Zarr v3: a name alone is an object without configuration; what is left out has its default."""
    before = [r.hidden["d2"].tobytes() for r in hs.open(store)]
    for array, path, value in [
        ("hidden/d2", "data_type", {"name": "bfloat16"}),
        ("hidden/d2", "chunk_key_encoding", "default"),
        ("hidden/d2", "attributes", {"note": [1]}),
        ("hidden/d2", "dimension_names", ["state", None]),
        ("hidden/d2", "fill_value", 0),
        ("hidden/d2", "storage_transformers", []),
        ("hidden/d2", "surprise", {"must_understand": False}),
        ("hidden/d2", f"{SHARD}.index_location", ...),
        ("hidden/d2", f"{SHARD}.codecs.2", "crc32c"),
        ("hidden/d2", f"{SHARD}.index_codecs.1", {"name": "crc32c", "configuration": {}}),
        (
            "hidden/d2",
            f"{SHARD}.codecs.1.configuration",
            {"cname": "lz4", "clevel": 9, "shuffle": "noshuffle", "blocksize": 0},
        ),
        ("loss_mask", f"{SHARD}.codecs.0", "bytes"),
        ("loss_mask", f"{SHARD}.codecs.0", {"name": "bytes", "configuration": {}}),
        ("ids", "codecs.0", LITTLE),
        ("input_ids", "attributes", ...),
    ]:
        edit_array(store, array, lambda meta, path=path, value=value: put(meta, path, value))
    assert hs.validate_store(store, level="full") == []
    assert [r.hidden["d2"].tobytes() for r in hs.open(store)] == before


def test_clauses_are_named(store):
    edit_array(store, "hidden/d2", lambda m: put(m, f"{SHARD}.index_location", "start"))
    edit_array(store, "input_ids", lambda m: put(m, f"{SHARD}.codecs.0", BIG))
    problems = hs.validate_store(store, level="sample")
    assert [p.where.rsplit(": ")[-1] for p in problems if p.code == "HS507"] == [
        "codecs[0].configuration.codecs[0].configuration.endian",
        "codecs[0].configuration.index_location",
    ]


def test_zero_row_of_the_embedding_is_a_note(tmp_path):
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (0, 1, 2, 3, 4)]
    contract = tiny_contract(captures=captures)
    states = np.ones((7, 8), np.float32)
    states[[0, 1, 2, 3, 4, 5]] = 0
    with hs.create(tmp_path / "s", contract) as writer:
        writer.append(tiny_record(contract, hidden={"d0": states}))
    problems = hs.validate_store(tmp_path / "s", level="full")
    assert [(p.code, p.severity) for p in problems] == [("HS202", "note")]


MUSTS = {r.id: r for r in rules(SPEC) if r.level == "MUST"}


def _name(case: tuple[str, Callable[[Path], list[Problem] | None]]) -> str:
    return f"{case[0]}-{case[1].__name__}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_breach_is_reported_with_the_code_of_its_rule(case, store):
    rule, break_it = case
    problems = break_it(store)
    if problems is None:
        problems = hs.validate_store(store, level="full")
    assert MUSTS[rule].code in {p.code for p in problems}
    for p in problems:
        assert p.where
        assert p.got != p.expected
        assert p.fix


def test_every_must_has_a_failing_case():
    assert {rule for rule, _ in CASES} == set(MUSTS)


def test_rule_numbers_are_unique_and_codes_known():
    ids = [r.id for r in rules(SPEC)]
    assert len(ids) == len(set(ids))
    assert len(ids) == len(re.findall(r"^- \*\*[A-Z]-", SPEC, re.MULTILINE))
    assert {r.code for r in MUSTS.values()} <= set(CODES)


def test_schema_is_the_committed_one_and_agrees_with_the_model():
    committed = (ROOT / "docs" / "spec" / "1.0.schema.json").read_text(encoding="utf-8")
    schema = json.loads(committed)
    assert schema == json.loads(contract_schema()), "run make docs"
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    validator(schema).validate(tiny_contract(fields=[FIELD]).to_json())
    wrong = {**tiny_contract().to_json(), "surprise": 1}
    assert list(validator(schema).iter_errors(wrong))


def test_problem_codes_document_is_the_committed_one():
    assert (ROOT / "docs" / "problems.md").read_text(encoding="utf-8") == problems_document(), "run make docs"
