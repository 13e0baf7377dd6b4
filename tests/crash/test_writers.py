"""Many writers of one store at once, in their own processes: nothing lost, nothing overwritten, one id found twice."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from factories import assert_same_record, tiny_contract, tiny_record

import hsformat as hs

CONTRACT = tiny_contract()
PER_WRITER = 5


def write_own(path: Path, writer: int) -> None:
    with hs.append(path, segment_bytes=600) as out:
        for i in range(PER_WRITER):
            out.append(tiny_record(CONTRACT, id=f"w{writer}-{i}", seed=writer * PER_WRITER + i))


def write_same(path: Path, writer: int) -> None:
    out = hs.append(path)
    out.append(tiny_record(CONTRACT, id="five", seed=writer))
    BARRIER.wait(timeout=60)  # all have opened the store before any commits
    out.close()


FORK = multiprocessing.get_context("fork")
BARRIER = FORK.Barrier(4)


def run(target: Callable[[Path, int], None], path: Path, n: int) -> None:
    processes = [FORK.Process(target=target, args=(path, i)) for i in range(n)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(timeout=120)
    assert [p.exitcode for p in processes] == [0] * n


def test_12_writers_lose_and_repeat_nothing(tmp_path):  # Model-Optimizer PR#404: part-10 beside part-010
    path = tmp_path / "x.hs.zarr"
    hs.create(path, CONTRACT).close()
    run(write_own, path, 12)
    store = hs.open(path)
    wanted = {f"w{w}-{i}": w * PER_WRITER + i for w in range(12) for i in range(PER_WRITER)}
    assert sorted(store.ids) == sorted(wanted)
    assert len({s.writer for s in store.segments}) == 12
    for record_id, seed in wanted.items():
        assert_same_record(store[record_id], tiny_record(CONTRACT, id=record_id, seed=seed))
    assert hs.validate_store(path, level="full") == []


def write_many(path: Path, writer: int) -> None:
    with hs.append(path, segment_bytes=40_000) as out:
        for i in range(200):
            out.append(tiny_record(CONTRACT, id=f"w{writer}-{i}", seed=writer * 200 + i))


def test_8_writers_of_200_records(tmp_path):
    path = tmp_path / "x.hs.zarr"
    hs.create(path, CONTRACT).close()
    run(write_many, path, 8)
    store = hs.open(path)
    assert len(store) == len(set(store.ids)) == 1600
    assert all(n >= 2 for n in Counter(s.writer for s in store.segments).values())
    for w in range(8):
        for i in range(200):
            wanted = tiny_record(CONTRACT, id=f"w{w}-{i}", seed=w * 200 + i)
            assert_same_record(store[wanted.id], wanted)
    assert hs.validate_store(path, level="metadata") == []


def test_4_processes_commit_one_id(tmp_path):  # vllm PR#43805
    path = tmp_path / "x.hs.zarr"
    hs.create(path, CONTRACT).close()
    run(write_same, path, 4)
    problems = hs.validate_store(path, level="full")
    assert [(p.code, p.record) for p in problems] == [("HS107", "five")] * 3
