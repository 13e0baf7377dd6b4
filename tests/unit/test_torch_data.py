"""Records as tensors: dtypes, bits, memory; what a dataset refuses and reads; packing."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from factories import tiny_contract, tiny_record
from torch_sources import CONTRACT, LENGTHS, RECORDS, Memory

import hsformat as hs
from hsformat.record import Generation, Provenance
from hsformat.source import SegmentedSource
from hsformat.store.backend import RangedObject
from hsformat.store.local import LocalBackend
from hsformat.testing import build_store
from hsformat.torch import RecordDataset, RecordLoader, TensorRecord, pack, tensor_record
from hsformat.torch.tensors import to_tensor

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("data") / "s", CONTRACT, RECORDS, 4)


@pytest.fixture
def dataset(path):
    return RecordDataset(hs.open(path))


def test_tensors_are_the_records(dataset):
    assert len(dataset) == len(RECORDS)
    for record, got in zip(RECORDS, dataset, strict=True):
        assert got.id == record.id
        assert got.input_ids.dtype == got.position_ids.dtype == torch.int64
        assert got.input_ids.tolist() == record.input_ids.tolist()
        assert got.loss_mask.dtype == torch.bool
        assert got.loss_mask.tolist() == record.loss_mask.astype(bool).tolist()
        assert got.position_ids.tolist() == list(range(record.num_tokens))
        assert list(got.hidden) == ["d1", "d2", "d3", "d4"]
        for key, h in got.hidden.items():
            assert h.dtype == torch.bfloat16
            assert h.view(torch.uint16).numpy().tobytes() == record.hidden[key].tobytes()


def test_every_bfloat16_keeps_its_bits_and_its_memory(tmp_path):
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 8)
    tensor = to_tensor(bits.view(ml_dtypes.bfloat16))
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == bits.ctypes.data
    assert (tensor.view(torch.uint16).numpy() == bits).all()
    packed = pack([_with_states(bits[:100]), _with_states(bits[100:])])
    assert (packed.hidden["d1"].view(torch.uint16).numpy() == bits).all()
    finite = bits[np.isfinite(bits.view(ml_dtypes.bfloat16).astype(np.float32)).all(1)]
    hidden = {key: finite.view(ml_dtypes.bfloat16) for key in CONTRACT.keys}
    record = tiny_record(CONTRACT, tokens=len(finite), hidden=hidden)
    source = hs.open(build_store(tmp_path / "s", CONTRACT, [record]))
    assert (RecordDataset(source)[0].hidden["d3"].view(torch.uint16).numpy() == finite).all()


def _with_states(bits):
    t = len(bits)
    return TensorRecord(
        id="x", input_ids=torch.zeros(t, dtype=torch.int64), loss_mask=torch.ones(t, dtype=torch.bool),
        position_ids=torch.arange(t), hidden={"d1": to_tensor(bits.view(ml_dtypes.bfloat16))},
        token_fields={}, record_fields={},
    )  # fmt: skip


def test_what_cannot_be_shared_is_copied():
    fixed = np.arange(4, dtype=np.float32)
    fixed.flags.writeable = False
    for array in (fixed, np.arange(8, dtype=np.float32)[::2], np.arange(4, dtype=np.float16)[::-1]):
        assert to_tensor(array).tolist() == array.tolist()
        assert to_tensor(array).data_ptr() != array.ctypes.data


def test_dtypes_fields_and_positions(tmp_path, monkeypatch):
    fields = [
        {"name": "logp", "axis": "token", "dtype": "bfloat16", "shape": [2], "must_understand": False},
        {"name": "label", "axis": "record", "dtype": "int16", "shape": [], "must_understand": False},
    ]
    captures = [{"depth": d, "norm": "none", "dtype": t} for d, t in ((1, "float16"), (2, "float32"))]
    contract = tiny_contract(fields=fields, captures=captures, layout={"aux": ["d1"], "last": None})
    records = [tiny_record(contract, f"r{i}", tokens=5, position_ids=np.arange(5) + i) for i in range(2)]
    dataset = RecordDataset(hs.open(build_store(tmp_path / "s", contract, records)))
    got = pack([dataset[0], dataset[1]])
    assert {k: h.dtype for k, h in got.hidden.items()} == {"d1": torch.float16, "d2": torch.float32}
    assert got.token_fields["logp"].shape == (10, 2)
    assert got.token_fields["logp"].dtype == torch.bfloat16
    assert got.record_fields["label"].tolist() == [1, 1]
    assert got.position_ids.tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]
    # What is told of sizes, and bounds memory, is what the tensors have.
    assert dataset.nbytes().sum() == got.nbytes - got.cu_seqlens.nbytes - got.cu_states.nbytes - got.record_index.nbytes
    assert got.to("meta").hidden["d1"].is_meta
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t.to("meta"))  # there may be no device to pin for
    pinned = got.pin_memory()
    assert all(t.is_meta for t in (pinned.input_ids, pinned.cu_states, *pinned.hidden.values()))
    assert pinned.ids == got.ids


def test_states_have_offsets_of_their_own():
    """A batch of generated records: joined by one offset, the next record's states would move."""
    generations = (Generation(mode="greedy", max_new_tokens=3), Generation(mode="sampled", max_new_tokens=3))
    records = []
    for i, (t, generation) in enumerate(zip((4, 6), generations, strict=True)):
        record = tiny_record(CONTRACT, f"r{i}", tokens=t, seed=i, provenance=Provenance(generation=generation))
        record.hidden = {k: h[:-1] for k, h in record.hidden.items()}
        records.append(record)
    packed = pack([tensor_record(r, CONTRACT, CONTRACT.keys) for r in records])
    assert packed.cu_seqlens.tolist() == [0, 4, 10]
    assert packed.cu_states.tolist() == [0, 3, 8]
    assert packed.cu_seqlens.dtype == packed.cu_states.dtype == torch.int32
    assert packed.record_index.tolist() == [0] * 4 + [1] * 6
    assert packed.hidden["d1"].shape == (8, 8)
    for record, got in zip(records, packed.unpack(), strict=True):
        assert got.id == record.id
        assert got.hidden["d4"].view(torch.uint16).numpy().tobytes() == record.hidden["d4"].tobytes()
        assert got.hidden["d4"].untyped_storage().data_ptr() == packed.hidden["d4"].untyped_storage().data_ptr()
        assert got.input_ids.tolist() == record.input_ids.tolist()
        assert got.generation == record.provenance.generation
    assert packed.to("meta").generations == generations


def test_pack_refuses_nothing_and_mixtures(dataset, path):
    with pytest.raises(ValueError, match="no records"):
        pack([])
    with pytest.raises(ValueError, match=r"record 'r1' has hidden \['d1'\]"):
        pack([dataset[0], RecordDataset(hs.open(path), captures=["d1"])[1]])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"loss_mask": np.ones(6, np.uint8)}, "HS101"),
        ({"loss_mask": np.full(7, 2)}, "HS104"),
        ({"input_ids": np.full(7, 100)}, "HS105"),
        ({"hidden": {"d2": np.zeros((6, 8), ml_dtypes.bfloat16)}}, "HS101"),
        ({"hidden": {"d2": np.zeros((7, 9), ml_dtypes.bfloat16)}}, "HS409"),
        ({"hidden": {"d2": np.zeros((7, 8), np.float32)}}, "HS207"),
    ],
)
def test_a_record_of_any_source_is_checked(change, code):
    dataset = RecordDataset(Memory([tiny_record(CONTRACT, "bad", **change)]))
    with pytest.raises(hs.InvalidRecord) as e:
        dataset[0]
    assert code in {p.code for p in e.value.problems}
    assert {p.record for p in e.value.problems} == {"bad"}


def test_a_capture_that_a_source_leaves_out_is_missing():
    record = tiny_record(CONTRACT, "bad")
    del record.hidden["d3"]
    with pytest.raises(hs.InvalidRecord) as e:
        RecordDataset(Memory([record]))[0]
    assert [p.code for p in e.value.problems] == ["HS109"]


def test_what_a_dataset_refuses(path, tmp_path):
    store = hs.open(path)
    with pytest.raises(hs.ContractMismatch) as e:
        RecordDataset(store, captures=["d1", "d9"])
    assert [p.code for p in e.value.problems] == ["HS109"]
    for wrong in ({"captures": "d1"}, {"ids": "r1"}):
        with pytest.raises(TypeError, match="not text"):
            RecordDataset(store, **wrong)
    with pytest.raises(KeyError, match="1 of 2 ids are not in the source, 'x' the first"):
        RecordDataset(store, ids=["r1", "x"])
    with pytest.raises(ValueError, match="given twice, 'r1'"):
        RecordDataset(store, ids=["r1", "r1"])
    twice = RecordDataset(Memory([RECORDS[0], RECORDS[0], RECORDS[1]]), ids=["r1"])
    assert twice[0].id == "r1"
    with pytest.raises(hs.StoreError) as e:
        RecordDataset(twice.source, ids=["r1", "r0"])
    assert [(p.code, p.record) for p in e.value.problems] == [("HS107", "r0")]


def test_ids_choose_and_order(path):
    dataset = RecordDataset(hs.open(path), ids=["r7", "r2"])
    assert dataset.ids == ["r7", "r2"]
    assert [r.id for r in dataset] == ["r7", "r2"]
    assert dataset.token_counts().tolist() == [LENGTHS[7], LENGTHS[2]]
    assert dataset.segments().tolist() == [1, 0]


class Counting(LocalBackend):
    """A folder that counts what is read, by array."""

    def __init__(self, path):
        super().__init__(path)
        self.read_bytes = {}

    def read(self, key, start=0, length=None):
        data = super().read(key, start, length)
        array = "/".join(key.split("/")[2:4])
        self.read_bytes[array] = self.read_bytes.get(array, 0) + len(data)
        return data

    def open_object(self, key):
        return RangedObject(self, key)


def test_captures_that_are_not_chosen_are_not_read(path):
    place = Counting(str(path))
    dataset = RecordDataset(hs.open(place), captures=["d2"])
    place.read_bytes.clear()
    assert sum(len(batch.hidden["d2"]) for batch in RecordLoader(dataset, batch_size=7)) == sum(LENGTHS)
    read = {name for name in place.read_bytes if name.startswith("hidden/")}
    assert read == {"hidden/d2"}
    assert place.read_bytes["hidden/d2"] > 0


def test_a_store_is_a_segmented_source_and_reads_in_threads(path):
    store = hs.open(path)
    assert isinstance(store, SegmentedSource)
    assert store.token_counts().tolist() == LENGTHS
    assert store.state_counts().tolist() == LENGTHS
    assert store.segment_counts().sum() == len(store)
    store._readers.clear()
    wrong = []

    def read(seed):
        for row in np.random.default_rng(seed).permutation(len(store)):
            record = store.read(row)
            if record.hidden["d1"].tobytes() != RECORDS[row].hidden["d1"].tobytes():
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_readers_may_be_let_go_by_another_thread(path, monkeypatch):
    monkeypatch.setattr("hsformat.store.reader._CACHED_SEGMENTS", 0)
    store = hs.open(path)
    assert [store.read(i).id for i in range(len(store))] == [r.id for r in RECORDS]
