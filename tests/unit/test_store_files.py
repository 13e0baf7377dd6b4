"""Files that are kept open, and what is said of those that cannot be read now: a limit is no damage."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from factories import assert_same_record, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.problems import CODES, StoreError
from hsformat.store import opened
from hsformat.store.local import LocalBackend, LocalFile
from hsformat.validate import validate_store

CONTRACT = tiny_contract(codec="fast")
RECORDS = [tiny_record(CONTRACT, f"r{i}", seed=i) for i in range(12)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of a record a segment."""
    path = tmp_path_factory.mktemp("files") / "s"
    with hs.create(path, CONTRACT) as writer:
        for record in RECORDS:
            writer.append(record)
            writer.flush()
    return path


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with nothing that other tests keep open."""
    monkeypatch.setattr(opened, "_state", opened._State())


def opened_below(folder: Path) -> int:
    """Return how many files of a folder this process holds open; others' come and go beside a test."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is gone
            count += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return count


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors")
@pytest.mark.usefixtures("closed")
def test_all_stores_of_a_process_keep_few_files_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "MOST", 8)
    stores = [hs.open(path) for _ in range(3)]
    most = 0
    for i, record in enumerate(RECORDS):
        for store in stores:
            assert_same_record(store[i], record)
            most = max(most, opened_below(path))
    assert 0 < most <= 8
    for store in stores:  # from the first again: files that were let go of are opened again
        assert_same_record(store[0], RECORDS[0])
    del store, stores
    assert opened_below(path) == 0


@pytest.mark.usefixtures("closed")
def test_files_are_let_go_of_where_no_more_can_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(LocalFile):
        left = 7

        def __init__(self, path: Path) -> None:
            self._fd = -1
            if not Few.left:
                raise OSError(errno.EMFILE, "Too many open files", str(path))
            super().__init__(path)
            Few.left -= 1

        def __del__(self) -> None:
            Few.left += self._fd >= 0
            super().__del__()

    monkeypatch.setattr("hsformat.store.local.LocalFile", Few)
    store = hs.open(path)
    for _ in range(2):
        for i, record in enumerate(RECORDS):
            assert_same_record(store[i], record)
    assert Few.left < 7
    del store
    Few.left = 0  # and nothing to let go of
    with pytest.raises(StoreError) as e:
        hs.open(path)[0]
    (p,) = e.value.problems
    assert (p.code, "ulimit -n" in p.fix, "repair" in p.fix) == ("HS503", True, False)


@pytest.mark.usefixtures("closed")
def test_threads_read_while_files_come_and_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "MOST", 1)
    store = hs.open(path)
    with ThreadPoolExecutor(4) as pool:
        for i, read in enumerate(pool.map(lambda i: store[i % 12], range(120))):
            assert_same_record(read, RECORDS[i % 12])


def test_a_process_of_few_files_reads_every_segment(path: Path) -> None:
    code = f"""
        import resource
        import hsformat as hs
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        stores = [hs.open({str(path)!r}) for _ in range(3)]
        print(*(sum(r.num_tokens for r in store) for store in stores))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(sum(r.num_tokens for r in RECORDS))] * 3, done.stderr


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("method", ["size", "read", "open_object"])
def test_what_cannot_be_read_now_is_not_to_be_repaired(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: int, method: str
) -> None:
    real = getattr(LocalBackend, method)

    def fail(self: LocalBackend, key: str, *args: Any) -> Any:
        if failing in key:
            raise OSError(error, os.strerror(error), key)
        return real(self, key, *args)

    monkeypatch.setattr(LocalBackend, method, fail)
    for failing in ("input_ids", "-0/zarr.json", "segments/zarr.json"):
        found = [p for p in validate_store(path, level="full") if p.code == "HS503"]
        assert all("repair" not in p.fix for p in found)
        assert not any(p.fix.startswith("remove") for p in found)
        if failing == "input_ids" or method == "read":
            assert found, failing
    failing = "zarr.json"
    if method == "read":
        with pytest.raises(StoreError) as e:
            hs.open(path)
        assert [(p.code, p.fix != CODES["HS501"].fix) for p in e.value.problems] == [("HS501", True)]


def test_a_file_that_is_gone_may_be_repaired(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: LocalBackend, key: str) -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", key)

    monkeypatch.setattr(LocalBackend, "open_object", gone)
    with pytest.raises(StoreError) as e:
        hs.open(path)[0]
    assert {p.fix for p in e.value.problems} == {CODES["HS503"].fix}
