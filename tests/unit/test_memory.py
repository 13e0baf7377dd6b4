"""Memory that is used again: never while somebody refers to it, in bounded amounts, by threads and after a fork."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from hsformat import memory

SIZE = 3 * memory.LEAST_BYTES - 3999


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_kept", memory._Kept())


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (300, 576), (1, 100_000, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, ml_dtypes.bfloat16])
def test_arrays_are_those_of_numpy(shape, dtype):
    array = memory.empty(shape, dtype)
    assert (array.shape, array.dtype, type(array)) == (shape, np.dtype(dtype), np.ndarray)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = 1
    assert (array == 1).all()


def test_what_is_let_go_of_is_used_again():
    first = memory.empty((SIZE,), np.uint8)
    at = address(first)
    del first
    second = memory.empty((SIZE - 1000,), np.uint8)  # of about the same size
    assert address(second) == at
    assert address(memory.empty((SIZE,), np.uint8)) != at


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a[5:],
        lambda a: a[1:][1:][1:],
        lambda a: a.view(np.uint16)[1:].T,
        lambda a: memoryview(a)[7:],
        lambda a: np.asarray(memoryview(a)),
        lambda a: a.reshape(2, -1)[1].view(ml_dtypes.bfloat16).view(np.uint16),
    ],
)
def test_not_while_a_view_of_it_is_there(derive):
    array = memory.empty((SIZE - 1,), np.uint8)
    array[...] = 7
    view = derive(array)
    del array
    gc.collect()
    for _ in range(3):
        memory.empty((SIZE - 1,), np.uint8)[...] = 9
    assert bytes(view) == b"\7" * len(bytes(view))


@pytest.mark.needs("torch")
def test_not_while_a_tensor_of_it_is_there():
    import torch

    tensor = torch.from_numpy(memory.empty((SIZE - 1,), np.uint8))[10:].view(torch.bfloat16)
    tensor.fill_(3.0)
    gc.collect()
    memory.empty((SIZE - 1,), np.uint8)[...] = 9
    assert (tensor == 3.0).all()


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 10 * memory.LEAST_BYTES)
    arrays = [memory.empty((n * memory.LEAST_BYTES,), np.uint8) for n in (1, 2, 3, 4, 5, 11, 20)]
    while arrays:
        arrays.pop()
        assert 0 <= memory._kept._nbytes <= memory.KEPT_BYTES
        assert memory._kept._nbytes == sum(len(m) for free in memory._kept._free.values() for m in free)


def test_threads_never_share_an_array():
    def work(n: int) -> bool:
        for _ in range(200):
            array = memory.empty((SIZE,), np.uint8)
            array[:: SIZE // 50] = n
            if not (array[:: SIZE // 50] == n).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def _forked(array: np.ndarray) -> int:
    pid = os.fork()
    if not pid:
        array[...] = 2
        memory.empty((SIZE,), np.uint8)[...] = 3
        os._exit(0)
    return pid


def test_after_a_fork_each_process_has_its_own():
    array = memory.empty((SIZE,), np.uint8)
    array[...] = 1
    with memory._kept._lock:  # whatever another thread does at that moment
        pid = ThreadPoolExecutor(1).submit(_forked, array).result(30)
    assert os.waitpid(pid, 0)[1] == 0
    assert (array == 1).all()


def test_more_than_there_is():
    with pytest.raises(MemoryError):
        memory.empty((2**62,), np.uint8)
