"""The loader with real threads and processes: order, epochs, resuming, ranks, memory, errors, and what stays behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from factories import tiny_record
from torch.utils.data import DataLoader
from torch_sources import CONTRACT, RECORDS, Live, Memory

import hsformat as hs
from hsformat.testing import build_store
from hsformat.torch import RecordDataset, RecordLoader, pack

pytestmark = pytest.mark.needs("torch")


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


def order(loader):
    return [batch.ids for batch in loader]


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
    with pytest.raises(RuntimeError, match="ended before the end of its epoch"):
        next(first)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": 999}, "batches is 999, and epoch 0 has 8"),
        ({"batches": -2}, "batches is -2"),
        ({"batches": "3"}, "batches is '3'"),
        ({"batches": True}, "batches is True"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": None}, "epoch is None"),
        ({"batching": None}, "batching is None"),
        ({"batching": {}}, "batch_size was not stated and is 4"),
        ({"plan": 7}, "plan is 7"),
    ],
)
def test_a_state_that_nobody_returned_is_refused(dataset, change, message):
    loader = RecordLoader(dataset, batch_size=4, shuffle="record", workers=0)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**state, **change})
    with pytest.raises(ValueError, match=f"no '{next(iter(change))}'"):
        loader.load_state_dict({k: v for k, v in state.items() if k not in change})
    assert loader.state_dict() == state
    assert sorted(i for b in order(loader) for i in b) == sorted(dataset.ids)


def test_what_is_no_state_and_no_epoch(dataset):
    loader = RecordLoader(dataset, batch_size=4)
    for wrong in (None, [], "state"):
        with pytest.raises(ValueError, match="must be what state_dict"):
            loader.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"epoch is 1\.5"):
        loader.set_epoch(1.5)


def test_an_iteration_that_was_displaced_says_so(dataset):
    loader = RecordLoader(dataset, batch_size=10, workers=2)
    state = loader.state_dict()
    for displace in (lambda: iter(loader), lambda: loader.set_epoch(0), lambda: loader.load_state_dict(state)):
        running = iter(loader)
        next(running)
        kept = displace()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended before the end of its epoch"):
                next(running)
        del kept
    ended = iter(loader)
    assert len(list(ended)) == 3
    iter(loader)
    assert next(ended, None) is None  # was at its end already


def test_a_killed_worker_is_named(dataset):
    """Where torch's handler of SIGCHLD does not come first: it raises wherever the program is, in its own words."""
    loader = RecordLoader(dataset, batch_size=1, workers=2, worker_type="fork", prefetch=4)
    read, victims = [], []

    def iterate():
        for batch in loader:
            read.extend(batch.ids)
            if len(read) == 2:
                victims.extend(p.pid for p in multiprocessing.active_children())
                os.kill(victims[0], signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        with pytest.raises(RuntimeError, match=r"has ended: \d+ by signal 9 \(Killed\)") as e:
            iterate()
        assert multiprocessing.active_children() == []  # although the error is still there
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    assert str(victims[0]) in str(e.value)
    rest = RecordLoader(dataset, batch_size=1)
    rest.load_state_dict(loader.state_dict())
    assert read + [i for batch in rest for i in batch.ids] == dataset.ids


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
        ({"max_tokens": 1.5}, "max_tokens is 1.5, and must be an integer"),
        ({"batch_size": "4"}, "batch_size is '4'"),
        ({"batch_size": 1, "workers": None}, "workers is None"),
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
