"""The store: what goes in comes out, in the order and with the names that were promised."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from factories import assert_same_record, digest, tiny_contract, tiny_record

import hsformat.store as hs
import hsformat.zarr_dtype  # noqa: F401 - zarr finds it by itself from 3.4.1 on
from hsformat.contract import Contract
from hsformat.dtypes import BFLOAT16
from hsformat.layout import Layout
from hsformat.problems import ContractMismatch, InvalidRecord, StoreError
from hsformat.record import Generation, Provenance, Record
from hsformat.store.arrays import ArraySpec, encode_array

FIELDS = [
    {"name": "logprob", "axis": "token", "dtype": "float32", "shape": [], "must_understand": False},
    {"name": "top", "axis": "token", "dtype": "bfloat16", "shape": [3], "must_understand": False},
    {"name": "label", "axis": "record", "dtype": "bool", "shape": [], "must_understand": False},
    {"name": "pair", "axis": "record", "dtype": "int16", "shape": [2, 2], "must_understand": False},
]


def write(path: Path, contract: Contract, records: list[Record], **options: Any) -> hs.Store:
    with hs.create(path, contract, **options) as writer:
        for record in records:
            writer.append(record)
    return hs.open(path)


@pytest.mark.parametrize("codec", ["compact", "fast"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip_over_segments(tmp_path: Path, codec: Any, dtype: str) -> None:
    captures = [{"depth": d, "norm": "none", "dtype": dtype} for d in (1, 2, 3, 4)]
    contract = tiny_contract(captures=captures, fields=FIELDS)
    records = [tiny_record(contract, f"r{i}", tokens=1 + 40 * i, seed=i) for i in range(9)]
    store = write(tmp_path / "s", contract, records, codec=codec, segment_bytes=20_000, chunk_tokens=64)
    assert len(store.segments) > 2
    assert store.contract.codec == codec
    assert store.ids == [r.id for r in records]
    for i, record in enumerate(records):
        assert_same_record(store[i], record)
        assert_same_record(store[record.id], record)
        assert_same_record(store[i - len(records)], record)
    assert [r.id for r in store] == store.ids
    assert store.tokens == sum(r.num_tokens for r in records)
    assert "r3" in store
    assert "x" not in store


@pytest.mark.parametrize("codec", ["compact", "fast"])
def test_every_bfloat16_pattern_survives_an_array(codec: Any) -> None:  # pytorch#110285
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    spec = ArraySpec(name="hidden/d1", shape=(256, 256), dtype=BFLOAT16, axis="state")
    files = dict(encode_array(bits.view(BFLOAT16), spec, codec=codec, chunk_tokens=64))
    buffers = {k: zarr.core.buffer.cpu.Buffer.from_bytes(v) for k, v in files.items()}
    read = zarr.open_array(zarr.storage.MemoryStore(buffers), mode="r")
    assert np.asarray(read[:]).view(np.uint16).tolist() == bits.tolist()


def test_every_finite_bfloat16_pattern_survives_a_store(tmp_path: Path) -> None:
    contract = tiny_contract(target={"hidden_size": 256})
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80]
    states = finite.reshape(-1, 255)
    states = np.pad(states, ((0, 0), (0, 1)), constant_values=0x3F80).view(BFLOAT16)
    record = tiny_record(contract, tokens=len(states), hidden={"d2": states})
    assert_same_record(write(tmp_path / "s", contract, [record])[0], record)


def test_generated_records_have_one_state_less(tmp_path: Path) -> None:
    contract = tiny_contract()
    provenance = Provenance(generation=Generation(mode="sampled", max_new_tokens=4, temperature=0.7, seed=3))
    states = {k: h[:-1] for k, h in tiny_record(contract, tokens=9).hidden.items()}
    records = [
        tiny_record(contract, "a", tokens=9, hidden=states, provenance=provenance, source_digest=digest("7")),
        tiny_record(contract, "b", tokens=5, seed=1),
        tiny_record(contract, "c", tokens=9, hidden=states, provenance=provenance),
    ]
    store = write(tmp_path / "s", contract, records)
    for i, record in enumerate(records):
        assert_same_record(store[i], record)
        assert store.provenance(i) == record.provenance
    assert len(store.segments[0].provenance) == 2
    assert store.segments[0].provenances[2] == provenance


def test_positions_are_stored_only_where_they_say_something(tmp_path: Path) -> None:
    contract = tiny_contract()
    plain = [tiny_record(contract, "a"), tiny_record(contract, "b", position_ids=np.arange(7))]
    moved = [*plain, tiny_record(contract, "c", position_ids=[0, 1, 1, 2, 9, 9, 10])]
    assert "position_ids/zarr.json" not in write(tmp_path / "p", contract, plain).segments[0].files
    store = write(tmp_path / "m", contract, moved)
    assert store[0].position_ids is None
    assert store[1].position_ids is None
    assert_same_record(store[2], moved[2])


def test_reading_some_captures_opens_no_other(tmp_path: Path) -> None:
    contract = tiny_contract()
    store = write(tmp_path / "s", contract, [tiny_record(contract)])
    for key in ("d1", "d4"):
        (tmp_path / "s" / store.segments[0].prefix / f"hidden/{key}/c/0/0").unlink()
    assert list(store.read(0, captures=["d3", "d2"]).hidden) == ["d3", "d2"]
    assert store.read("r0", captures=[]).hidden == {}
    with pytest.raises(ContractMismatch) as e:
        store.read(0, captures=["d2", "d7", "d9"])
    assert [p.code for p in e.value.problems] == ["HS109", "HS109"]


def test_no_such_record(tmp_path: Path) -> None:
    store = write(tmp_path / "s", tiny_contract(), [])
    assert len(store) == 0
    for key, error in ((0, IndexError), (-1, IndexError), ("r0", KeyError), (1.5, TypeError)):
        with pytest.raises(error):
            store[key]  # type: ignore[index]  # zarr's unions


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    contract = tiny_contract(fields=FIELDS)
    record = tiny_record(contract)
    with hs.create(tmp_path / "s", contract) as writer:
        writer.append(record)
        before = {k: h.copy() for k, h in record.hidden.items()}
        for array in (record.input_ids, record.loss_mask, *record.hidden.values()):
            array[...] = 1  # an engine reuses its buffers
    store = hs.open(tmp_path / "s")
    first = store[0]
    assert all(first.hidden[k].tobytes() == before[k].tobytes() for k in before)
    for array in (first.input_ids, first.loss_mask, *first.fields.values()):
        array[...] = 0
    assert store[0].loss_mask.tolist() != first.loss_mask.tolist()
    assert store[0].fields["logprob"].tolist() == [1] * 7


def test_two_writers_at_once(tmp_path: Path) -> None:
    contract = tiny_contract()
    hs.create(tmp_path / "s", contract).close()
    with hs.append(tmp_path / "s") as one, hs.append(tmp_path / "s", producer={"name": "two"}) as two:
        for i in range(6):
            (one, two)[i % 2].append(tiny_record(contract, f"r{i}", seed=i))
            (one, two)[i % 2].flush()
    store = hs.open(tmp_path / "s")
    assert sorted(store.ids) == [f"r{i}" for i in range(6)]
    assert [s.n for s in store.segments] == [0, 1, 2, 0, 1, 2]
    assert sorted({str(s.producer) for s in store.segments}) == ["None", "{'name': 'two'}"]


def test_segments_are_ordered_by_number_not_by_text(tmp_path: Path) -> None:  # speculators PR#365
    contract = tiny_contract()
    with hs.create(tmp_path / "s", contract) as writer:
        for i in range(12):
            writer.append(tiny_record(contract, f"r{i}", tokens=2))
            writer.flush()
    assert hs.open(tmp_path / "s").ids == [f"r{i}" for i in range(12)]


def test_known_ids_are_refused(tmp_path: Path) -> None:
    contract = tiny_contract()
    with hs.create(tmp_path / "s", contract) as writer:
        writer.append(tiny_record(contract, "a", source_digest=digest("7")))
        with pytest.raises(InvalidRecord) as e:
            writer.append(tiny_record(contract, "a"))
        assert [(p.code, p.id) for p in e.value.problems] == [("HS107", "a")]
    with hs.append(tmp_path / "s") as writer:
        assert set(writer.ids) == {"a"}
        assert writer.source_digest("a") == digest("7")
        with pytest.raises(InvalidRecord):
            writer.append(tiny_record(contract, "a"))


def test_duplicate_ids_of_two_writers_are_never_guessed(tmp_path: Path) -> None:  # NeMo Automodel PR#3396
    contract = tiny_contract()
    hs.create(tmp_path / "s", contract).close()
    with hs.append(tmp_path / "s") as one, hs.append(tmp_path / "s") as two:
        one.append(tiny_record(contract, "a"))
        two.append(tiny_record(contract, "a", seed=1))
        two.append(tiny_record(contract, "b", seed=2))
    store = hs.open(tmp_path / "s")
    assert len(store) == 3
    assert store["b"].id == "b"
    with pytest.raises(StoreError) as e:
        store["a"]
    assert e.value.problems[0].code == "HS107"


def test_invalid_records_carry_all_problems_and_the_writer_goes_on(tmp_path: Path) -> None:
    contract = tiny_contract()
    good = tiny_record(contract)
    bad = tiny_record(contract, "bad", loss_mask=np.zeros(9, int), hidden={"d2": np.full((7, 8), np.nan)})
    with hs.create(tmp_path / "s", contract) as writer:
        with pytest.raises(InvalidRecord) as e:
            writer.append(bad)
        assert {p.code for p in e.value.problems} == {"HS101", "HS201"}
        assert {p.id for p in e.value.problems} == {"bad"}
        writer.append(good)
    assert hs.open(tmp_path / "s").ids == ["r0"]


def test_states_that_round_to_zero_are_found_before_they_are_stored(tmp_path: Path) -> None:
    contract = tiny_contract(captures=[{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)])
    with (
        hs.create(tmp_path / "s", contract) as writer,
        pytest.raises(InvalidRecord) as e,
    ):
        writer.append(tiny_record(contract, hidden={"d1": np.full((7, 8), 1e-9, np.float32)}))
    assert [p.code for p in e.value.problems] == ["HS202"]


def test_value_beyond_float16_is_refused_and_kept_in_bfloat16(tmp_path: Path) -> None:  # elk#208
    states = {"d1": np.full((7, 8), 7e4, np.float32)}
    half = tiny_contract(captures=[{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)])
    with (
        hs.create(tmp_path / "h", half) as writer,
        pytest.raises(InvalidRecord) as e,
    ):
        writer.append(tiny_record(half, hidden=states))
    assert e.value.problems[0].code == "HS207"
    wide = tiny_contract()
    stored = write(tmp_path / "w", wide, [tiny_record(wide, hidden=states)])[0].hidden["d1"].astype(np.float32)
    np.testing.assert_allclose(stored, 7e4, rtol=2**-8)


def test_provenance_that_json_cannot_keep_is_refused(tmp_path: Path) -> None:
    contract = tiny_contract()
    with hs.create(tmp_path / "s", contract) as writer:
        for value in (2**60, "\ud800", float("nan")):
            provenance = Provenance.model_construct(
                generation=Generation(mode="none"), template_digest=None, template_kwargs={"x": value}
            )
            with pytest.raises(InvalidRecord) as e:
                writer.append(tiny_record(contract, provenance=provenance))
            assert e.value.problems[0].code == "HS604"
        for changes in ({"source_digest": 7}, {"source_digest": "\ud800"}, {"id": ["a"]}, {"id": 7}):
            with pytest.raises(InvalidRecord) as e:
                writer.append(tiny_record(contract, **changes))
            assert e.value.problems[0].code in ("HS604", "HS107")


def test_a_failed_block_commits_what_was_appended_whole(tmp_path: Path) -> None:
    contract = tiny_contract()
    engine = iter([tiny_record(contract, "a"), KeyboardInterrupt()])

    def extract() -> None:
        with hs.create(tmp_path / "s", contract) as writer:
            for answer in engine:
                if isinstance(answer, BaseException):
                    raise answer
                writer.append(answer)

    with pytest.raises(KeyboardInterrupt):
        extract()
    assert hs.open(tmp_path / "s").ids == ["a"]


def test_plain_zarr_reads_every_array(tmp_path: Path) -> None:
    contract = tiny_contract(fields=FIELDS)
    records = [tiny_record(contract, f"ü{i}", tokens=3 + i, seed=i) for i in range(3)]
    store = write(tmp_path / "s", contract, records)
    root = zarr.open_group(tmp_path / "s", mode="r")
    assert root.attrs["hsformat"]["contract_digest"] == contract.digest  # type: ignore[call-overload, index]  # zarr's unions
    segment = root[store.segments[0].prefix]
    arrays = {name: np.asarray(a[...]) for name, a in segment.members(max_depth=None) if isinstance(a, zarr.Array)}  # type: ignore[union-attr]  # a group
    names = {"input_ids", "loss_mask", "token_offsets", "state_offsets", "ids", "id_offsets"}
    names |= {f"{g}/{k}" for g in ("hidden", "stats") for k in contract.keys}
    assert set(arrays) == names | {f"fields/{f['name']}" for f in FIELDS}
    offsets, ids = arrays["token_offsets"], arrays["id_offsets"]
    assert {arrays[n].dtype for n in ("token_offsets", "state_offsets", "id_offsets")} == {np.dtype(np.int64)}
    for i, record in enumerate(records):
        rows = slice(offsets[i], offsets[i + 1])
        assert arrays["hidden/d3"][rows].tobytes() == record.hidden["d3"].tobytes()
        assert arrays["ids"][ids[i] : ids[i + 1]].tobytes().decode() == record.id
        h = record.hidden["d3"].astype(np.float64)
        wanted = [np.linalg.norm(h, axis=1).mean(), np.abs(h).max()]
        np.testing.assert_allclose(arrays["stats/d3"][i], wanted, rtol=1e-6)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:  # datasets#7821, #615, #6206
    offsets = np.array([0, 3_000_000_000], np.int64)
    spec = ArraySpec(name="token_offsets", shape=(2,), dtype=np.dtype("<i8"))
    files = dict(encode_array(offsets, spec, codec="compact", chunk_tokens=256))
    assert json.loads(files["zarr.json"])["data_type"] == "int64"
    buffers = {k: zarr.core.buffer.cpu.Buffer.from_bytes(v) for k, v in files.items()}
    assert np.asarray(zarr.open_array(zarr.storage.MemoryStore(buffers), mode="r")[:]).tolist() == offsets.tolist()


def test_chunks_of_zeros_are_on_disk(tmp_path: Path) -> None:  # zarr-python#2060, #2611, xarray#10633
    contract = tiny_contract(fields=FIELDS)
    zeros = {"logprob": np.full(7, -0.0, np.float32), "top": np.zeros((7, 3), BFLOAT16)}
    record = tiny_record(contract, fields={**tiny_record(contract).fields, **zeros})
    store = write(tmp_path / "s", contract, [record])
    for name in ("fields/logprob/c/0", "fields/top/c/0/0", "state_offsets/c/0"):
        assert (tmp_path / "s" / store.segments[0].prefix / name).is_file()
    assert_same_record(store[0], record)  # and -0.0 is not 0.0


def test_the_number_of_files_does_not_grow_with_records(tmp_path: Path) -> None:  # napari#2012, SpecForge PR#282
    contract = tiny_contract()
    counts = []
    for n in (1, 200):
        records = [tiny_record(contract, f"r{i}", tokens=2, seed=i) for i in range(n)]
        write(tmp_path / str(n), contract, records)
        counts.append(sum(p.is_file() for p in (tmp_path / str(n)).rglob("*")))
    assert counts[0] == counts[1] < 50


def test_segments_respect_their_bound(tmp_path: Path) -> None:
    contract = tiny_contract()
    one = tiny_record(contract, tokens=10).nbytes
    with hs.create(tmp_path / "s", contract, segment_bytes=4 * one) as writer:
        for i in range(8):
            writer.append(tiny_record(contract, f"r{i}", tokens=10))
        writer.append(tiny_record(contract, "long", tokens=100))  # larger than the bound: a segment of its own
        writer.append(tiny_record(contract, "z", tokens=10))
    segments = hs.open(tmp_path / "s").segments
    assert [s.ids for s in segments[-2:]] == [("long",), ("z",)]
    assert all(sum(s.tokens) <= 40 for s in segments[:-2])
    assert all(a.ids[-1] < b.ids[0] for a, b in pairwise(segments[:-2]))


def test_pickle_keeps_no_handle(tmp_path: Path) -> None:
    contract = tiny_contract()
    store = write(tmp_path / "s", contract, [tiny_record(contract)])
    assert store[0].id == "r0"
    again = pickle.loads(pickle.dumps(store))
    assert_same_record(again[0], store[0])


def test_expect_is_compared(tmp_path: Path) -> None:
    contract = tiny_contract()
    write(tmp_path / "s", contract, [tiny_record(contract)])
    assert len(hs.open(tmp_path / "s", expect=contract.layout)) == 1
    with pytest.raises(ContractMismatch) as e:
        hs.open(tmp_path / "s", expect=Layout(aux=("d3", "d2", "d1"), last="d4"))
    assert [p.code for p in e.value.problems] == ["HS401"]
    other = tiny_contract(target={"basis_digest": contract.tokenizer_digest})
    with pytest.raises(ContractMismatch) as e:
        hs.append(tmp_path / "s", expect=other)
    assert [p.code for p in e.value.problems] == ["HS301"]
    with hs.append(tmp_path / "s", expect=tiny_contract(codec="fast", target={"name": "moved"})) as writer:
        assert writer.contract == contract


def test_fields_that_must_be_understood(tmp_path: Path) -> None:
    contract = tiny_contract(fields=[{**FIELDS[0], "must_understand": True}])
    write_ok = tiny_record(contract)
    with hs.create(tmp_path / "s", contract) as writer:
        writer.append(write_ok)
    with pytest.raises(StoreError) as e:
        hs.open(tmp_path / "s")
    assert [p.code for p in e.value.problems] == ["HS502"]
    assert "logprob" in e.value.problems[0].got
    assert len(hs.open(tmp_path / "s", understands={"logprob"})) == 1


def test_unknown_arrays_and_attributes_are_ignored(tmp_path: Path) -> None:
    contract = tiny_contract()
    store = write(tmp_path / "s", contract, [tiny_record(contract)])
    zarr.create_array(tmp_path / "s" / store.segments[0].prefix / "extra", shape=(3,), dtype="int8")
    (tmp_path / "s/segments/notes").mkdir()
    (tmp_path / "s/segments/.DS_Store").write_text("")
    opened = hs.open(tmp_path / "s")
    assert opened.problems == []
    assert_same_record(opened[0], store[0])
