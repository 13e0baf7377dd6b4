"""Records as tensors: the dataset, packing, and the loader with real threads and processes."""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
import time
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from factories import tiny_contract, tiny_record
from torch.utils.data import DataLoader

import hsformat as hs
from hsformat.record import Generation, Provenance
from hsformat.source import SegmentedSource
from hsformat.store.backend import RangedObject
from hsformat.store.local import LocalBackend
from hsformat.testing import build_store
from hsformat.torch import RecordDataset, RecordLoader, TensorRecord, pack, tensor_record
from hsformat.torch.tensors import to_tensor

CONTRACT = tiny_contract()
LENGTHS = [3 + 5 * i % 11 for i in range(30)]
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=t, seed=i) for i, t in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("data") / "s", CONTRACT, RECORDS, 4)


@pytest.fixture
def dataset(path):
    return RecordDataset(hs.open(path))


@pytest.fixture(autouse=True)
def nothing_left():
    """No thread and no process outlives a test."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    assert {t for t in threading.enumerate() if t not in before and not t.daemon} == set()
    assert not [t for t in threading.enumerate() if t.name.startswith("hsformat-loader")]


class Memory:
    """Records in memory: a source that tells no more than it must."""

    def __init__(self, records, contract=CONTRACT):
        self.contract, self.records = contract, records
        self.ids = [r.id for r in records]

    def __len__(self):
        return len(self.records)

    def read(self, key, *, captures=None):
        return self.records[key]


def order(loader):
    return [batch.ids for batch in loader]


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


def test_dtypes_fields_and_positions(tmp_path):
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


def test_states_have_offsets_of_their_own():
    """A batch of generated records: joined by one offset, the next record's states would move."""
    generated = Provenance(generation=Generation(mode="greedy", max_new_tokens=3))
    records = []
    for i, t in enumerate((4, 6)):
        record = tiny_record(CONTRACT, f"r{i}", tokens=t, seed=i, provenance=generated)
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


# Workers.


SPAWNED = {"batch_size": 4, "shuffle": "record", "seed": 3}


@pytest.mark.parametrize("worker_type", ["thread", "fork", "spawn"])
def test_workers_give_what_none_gives(dataset, worker_type):
    dataset[0]  # files are open, and small arrays read, when processes are forked
    expected = list(RecordLoader(dataset, workers=0, **SPAWNED))
    loader = RecordLoader(dataset, workers=1 if worker_type == "spawn" else 2, worker_type=worker_type, **SPAWNED)
    for got, wanted in zip(loader, expected, strict=True):
        assert got.ids == wanted.ids
        for key, h in wanted.hidden.items():
            assert torch.equal(got.hidden[key].view(torch.uint16), h.view(torch.uint16))
        assert torch.equal(got.loss_mask, wanted.loss_mask)


def test_the_dataset_in_a_plain_dataloader(dataset):
    plain = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=pack, multiprocessing_context="fork")
    assert [i for batch in plain for i in batch.ids] == dataset.ids


def damage(path: Path) -> str:
    """Flip a byte of the states of the first record of the second segment, and return its id."""
    store = hs.open(path)
    commit = store.segments[1]
    (shard,) = [k for k in commit.files if k.startswith("hidden/d2/") and not k.endswith(".json")]
    file = path / commit.prefix / shard
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)
    return commit.ids[0]


@pytest.mark.parametrize("workers", [{"workers": 0}, {"workers": 2}, {"workers": 2, "worker_type": "fork"}])
def test_damage_comes_out_as_itself_and_names_the_record(tmp_path, workers):
    record = damage(build_store(tmp_path / "s", CONTRACT, RECORDS, 4, chunk_tokens=4))
    loader = RecordLoader(RecordDataset(hs.open(tmp_path / "s")), batch_size=1, **workers)
    read = []

    def iterate():
        for batch in loader:
            read.extend(batch.ids)

    with pytest.raises(hs.StoreError) as e:
        iterate()
    assert [(p.code, p.record) for p in e.value.problems] == [("HS504", record)]
    assert read == [r.id for r in RECORDS][: len(read)]
    assert loader.state_dict()["batches"] == len(read) == loader.dataset.ids.index(record)


def test_damage_in_a_plain_dataloader_is_readable(tmp_path):
    record = damage(build_store(tmp_path / "s", CONTRACT, RECORDS, 4))
    dataset = RecordDataset(hs.open(tmp_path / "s"))
    plain = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=pack, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=f"HS504 checksum\n(.*\n)?.*record '{record}'"):
        list(plain)
    with pytest.raises(TypeError, match="not of text"):
        hs.StoreError("text")


def test_other_errors_say_which_records(dataset):
    class Broken(Memory):
        def read(self, key, *, captures=None):
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone") as e:
        list(RecordLoader(RecordDataset(Broken(RECORDS)), batch_size=2, workers=1))
    assert e.value.__notes__ == ["reading record 'r0'"]

    def collate(records):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as e:
        list(RecordLoader(dataset, batch_size=2, workers=1, collate=collate))
    assert e.value.__notes__ == ["making a batch of records ['r0', 'r1']"]


@pytest.mark.parametrize("workers", [{"workers": 2}, {"workers": 2, "worker_type": "fork"}])
def test_breaking_out_leaves_nothing_behind(dataset, workers):
    loader = RecordLoader(dataset, batch_size=2, **workers)
    for batch in loader:
        assert batch.ids == ("r0", "r1")
        break
    gc.collect()
    assert multiprocessing.active_children() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("hsformat-loader")]
    assert loader.epoch == 0
    first = iter(loader)  # begins again, and is ended by the next
    assert next(first).ids == ("r0", "r1")
    assert sum(len(batch) for batch in loader) == len(RECORDS)
    assert next(first, None) is None


class Live(Memory):
    """Counts bytes of records and batches that somebody holds."""

    def __init__(self, records):
        super().__init__(records)
        self.lock, self.live, self.peak, self.reads = threading.Lock(), 0, 0, 0

    def hold(self, thing, nbytes):
        with self.lock:
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        weakref.finalize(thing, self.release, nbytes)

    def release(self, nbytes):
        with self.lock:
            self.live -= nbytes

    def read(self, key, *, captures=None):
        self.reads += 1
        record = self.records[key]
        copies = {k: h.copy() for k, h in record.hidden.items()}
        for h in copies.values():
            self.hold(h, h.nbytes)
        return hs.Record(id=record.id, input_ids=record.input_ids, loss_mask=record.loss_mask, hidden=copies)

    def collate(self, records):
        packed = pack(records)
        for h in packed.hidden.values():
            self.hold(h, h.nbytes)
        return packed

    def token_counts(self):
        return np.array([r.num_tokens for r in self.records])

    state_counts = token_counts

    def segment_counts(self):
        return np.array([len(self.records)])


@pytest.mark.parametrize("bound", [5, 9])
def test_memory_of_reading_ahead_is_bounded(bound):
    source = Live([tiny_record(CONTRACT, f"r{i}", tokens=500) for i in range(40)])
    dataset = RecordDataset(source)
    batch_bytes = int(dataset.nbytes()[:2].sum())
    loader = RecordLoader(
        dataset, batch_size=2, workers=4, prefetch=16, prefetch_bytes=bound * batch_bytes, collate=source.collate
    )
    seen = 0
    for batch in loader:
        seen += len(batch)
        time.sleep(0.01)  # a consumer that is slower than the readers
        del batch
    assert seen == 40
    assert 2 * batch_bytes < source.peak <= (bound + 1) * batch_bytes  # one is in the consumer's hands
    assert source.live == 0


def test_batches_larger_than_the_bound_come_one_at_a_time():
    source = Live([tiny_record(CONTRACT, f"r{i}", tokens=500) for i in range(8)])
    loader = RecordLoader(RecordDataset(source), batch_size=2, workers=4, prefetch_bytes=0)
    stream = iter(loader)
    next(stream)
    time.sleep(0.05)
    assert source.reads <= 4  # the one that was handed out, and the next
    assert sum(len(b) for b in stream) == 6


# Order, epochs, resuming; the properties are in tests/property/test_torch_plan.py.


def test_epochs_follow_each_other_and_can_be_chosen(dataset):
    loader = RecordLoader(dataset, batch_size=4, shuffle="record")
    first, second = order(loader), order(loader)
    assert loader.epoch == 2
    assert first != second
    assert sorted(i for b in first for i in b) == sorted(dataset.ids)
    loader.set_epoch(1)
    assert order(loader) == second
    assert order(RecordLoader(dataset, batch_size=4, shuffle="record", epoch=1)) == second
    assert order(RecordLoader(dataset, batch_size=4, shuffle="record", seed=1)) != first
    assert len(loader) == 8


@pytest.mark.parametrize("workers", [{"workers": 0}, {"workers": 3}, {"workers": 2, "worker_type": "fork"}])
def test_an_epoch_goes_on_where_it_was(path, dataset, workers):
    settings = {"max_tokens": 20, "shuffle": "segment", "buffer": 2, "epoch": 5}
    whole = RecordLoader(dataset, **settings)
    expected = order(whole)
    interrupted = RecordLoader(dataset, **settings)
    for i, _ in enumerate(interrupted):
        if i == 3:
            break
    state = json.loads(json.dumps(interrupted.state_dict()))
    assert state["batches"] == 4
    resumed = RecordLoader(RecordDataset(hs.open(path)), **{**settings, "epoch": 0}, **workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert order(resumed) == expected[4:]
    assert order(resumed) == order(whole)  # the next epoch


def test_a_state_at_the_end_of_an_epoch_leaves_none_of_it(dataset):
    loader = RecordLoader(dataset, batch_size=16)
    for _ in loader:
        state = loader.state_dict()
    other = RecordLoader(dataset, batch_size=16)
    other.load_state_dict(state)
    assert order(other) == []
    assert other.epoch == 1
    assert len(order(other)) == 2


def test_a_state_of_other_batches_is_refused(dataset, path):
    state = RecordLoader(dataset, batch_size=4, shuffle="record").state_dict()
    with pytest.raises(ValueError, match="seed was 0 and is 1; world_size was 1 and is 2"):
        RecordLoader(dataset, batch_size=4, shuffle="record", seed=1, world_size=2).load_state_dict(state)
    fewer = RecordDataset(hs.open(path), ids=dataset.ids[:-1])
    with pytest.raises(ValueError, match="other records"):
        RecordLoader(fewer, batch_size=4, shuffle="record").load_state_dict(state)
    with pytest.raises(ValueError, match="version 2"):
        RecordLoader(dataset, batch_size=4, shuffle="record").load_state_dict({**state, "version": 2})


def test_ranks_share_an_epoch_and_a_state(dataset):
    def loaders():
        return [RecordLoader(dataset, batch_size=4, shuffle="record", world_size=3, rank=r) for r in range(3)]

    orders = [order(loader) for loader in loaders()]
    assert {len(o) for o in orders} == {3}
    assert sorted(i for o in orders for b in o for i in b) == sorted(dataset.ids)
    states = []
    for loader in loaders():
        stream = iter(loader)
        next(stream)
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    resumed = loaders()
    for loader, whole in zip(resumed, orders, strict=True):
        loader.load_state_dict(states[0])
        assert order(loader) == whole[1:]


def test_what_is_dropped_is_said(dataset):
    loader = RecordLoader(dataset, batch_size=4, drop_last=True, world_size=2)
    assert len(loader) == 3
    assert loader.dropped() == dataset.ids[24:]
    assert RecordLoader(dataset, batch_size=4, world_size=2).dropped() == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "batch_size or max_tokens"),
        ({"batch_size": 1, "max_tokens": 50}, "one of them"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1, "buffer": 0}, "buffer is 0"),
        ({"batch_size": 1, "seed": -1}, "seed is -1"),
        ({"batch_size": 1, "rank": 1}, "below world_size"),
        ({"batch_size": 1, "workers": -1}, "workers is -1"),
        ({"batch_size": 1, "prefetch": 0}, "prefetch is 0"),
        ({"batch_size": 1, "shuffle": "records"}, "shuffle is 'records'"),
        ({"batch_size": 1, "worker_type": "process"}, "worker_type is 'process'"),
        ({"max_tokens": 12}, r"3 records have more than max_tokens=12 tokens, 'r\d+' of 13"),
        ({"batch_size": 30, "world_size": 31}, "30 records do not make 31 batches"),
    ],
)
def test_what_a_loader_refuses(dataset, wrong, message):
    with pytest.raises(ValueError, match=message):
        RecordLoader(dataset, **wrong)


def test_a_source_that_tells_little(dataset):
    source = RecordDataset(Memory(RECORDS))
    assert order(RecordLoader(source, batch_size=4, shuffle="record")) == order(
        RecordLoader(dataset, batch_size=4, shuffle="record")
    )
    for asked in ({"max_tokens": 50}, {"batch_size": 2, "shuffle": "segment"}):
        with pytest.raises(ValueError, match="SegmentedSource"):
            RecordLoader(source, **asked)
