"""A file that cannot be read now is no damage: repair tells of it and leaves its segment as it is."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.maintain import RepairReport, repair_store
from hsformat.store.backend import OpenObject, Part
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import segment_names

NOBODY = 65534
CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=20, seed=i) for i in range(4)]


class Failing(LocalBackend):
    """A disk that fails the ``at``-th time that something is asked of a key which ends so; every time, if None."""

    def __init__(self, path: Path, end: str, *, at: int | None = 0, error: int = errno.ETIMEDOUT) -> None:
        super().__init__(str(path))
        self.end, self.at, self.error, self.asked = end, at, error, 0

    def ask(self, key: str) -> None:
        if key.endswith(self.end):
            self.asked += 1
            if self.at is None or self.asked == self.at + 1:
                raise OSError(self.error, os.strerror(self.error), key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.ask(key)
        return super().read(key, start, length)

    def size(self, key: str) -> int | None:
        self.ask(key)
        return super().size(key)

    def open_object(self, key: str) -> OpenObject:
        self.ask(key)
        return FailingFile(super().open_object(key), self, key)


class FailingFile:
    def __init__(self, opened: OpenObject, backend: Failing, key: str) -> None:
        self._opened, self._backend, self._key = opened, backend, key

    def read_into(self, start: int, parts: list[Part]) -> int:
        self._backend.ask(self._key)
        return self._opened.read_into(start, parts)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of two segments, r0..r2 and r3."""
    with hs.create(tmp_path / "s", CONTRACT, chunk_tokens=16) as writer:
        for i, record in enumerate(RECORDS):
            writer.append(record)
            if i == 2:
                writer.flush()
    return tmp_path / "s"


def snapshot(path: Path) -> dict[Path, bytes]:
    """Return all files but copies of commit records, which change nothing for anybody."""
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.suffix != ".aside"}


def untouched(path: Path, before: dict[Path, bytes], report: RepairReport, *, records: int = 4) -> None:
    assert snapshot(path) == before
    assert (report.segments, report.lost, report.records, report.exit_code) == ([], [], records, 1)
    assert {p.code for p in report.problems} == {"HS503"}
    assert all("cannot be read now" in p.got for p in report.problems)


FILES = ["input_ids/c/0", "loss_mask/c/0", "hidden/d2/c/0/0", "hidden/zarr.json", "ids/c/0", "stats/d1/c/0/0"]


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("file", FILES)
def test_healthy_segment_stays(path: Path, file: str, error: int) -> None:
    before = snapshot(path)
    for at in (0, 1, None):  # its size, its bytes, both
        backend = Failing(path, f"-0/{file}", at=at, error=error)
        untouched(path, before, repair_store(backend))
        assert backend.asked
    assert repair_store(path).exit_code == 0


@pytest.mark.parametrize("damage", ["hidden/d1/c/0/0", "input_ids/c/0"])  # r0 is lost; all are lost
def test_damaged_segment_stays_while_not_all_of_it_can_be_read(path: Path, damage: str) -> None:
    shard = path / "segments" / segment_names(LocalBackend(str(path)))[0] / damage
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(data)
    before, met = snapshot(path), 0
    for file in FILES:
        for at in range(12):  # first it is verified, then what is whole is taken from it
            backend = Failing(path, f"-0/{file}", at=at)
            report = repair_store(backend, dry_run=True)
            if backend.asked <= at:
                break
            met += 1
            untouched(path, before, report)
            untouched(path, before, repair_store(Failing(path, f"-0/{file}", at=at)))
    assert met > 2 * len(FILES)
    assert repair_store(path).lost


def test_commit_record_that_cannot_be_read_when_its_segment_ends(path: Path) -> None:
    first = segment_names(LocalBackend(str(path)))[0]
    (path / "segments" / first / "input_ids/c/0").unlink()
    before, met = snapshot(path), 0
    for at in range(1, 20):  # at 0, when the store is opened: the segment is passed over
        backend = Failing(path, f"{first}/zarr.json", at=at)
        report = repair_store(backend)
        if backend.asked <= at:
            break
        met += 1
        untouched(path, before, report)
    assert met
    assert report.lost == ["r0", "r1", "r2"]


def test_damaged_commit_record_stays_while_its_arrays_cannot_be_read(path: Path) -> None:
    first = segment_names(LocalBackend(str(path)))[0]
    (path / "segments" / first / "zarr.json").write_text("{")
    before = snapshot(path)
    untouched(path, before, repair_store(Failing(path, "-0/ids/c/0")), records=1)
    assert repair_store(path).lost == ["r0", "r1", "r2"]


def test_group_of_the_segments_stays(path: Path) -> None:
    before = snapshot(path)
    untouched(path, before, repair_store(Failing(path, "segments/zarr.json")))


def test_duplicate_of_a_record_that_cannot_be_read_is_kept(path: Path) -> None:
    with hs.create(path.with_name("other"), CONTRACT) as writer:
        writer.append(RECORDS[1])
    (other,) = (path.with_name("other") / "segments").glob("*-0")
    other.rename(path / "segments" / other.name)
    before = snapshot(path)
    first = segment_names(LocalBackend(str(path)))[0]
    report = repair_store(Failing(path, f"{first}/loss_mask/c/0"), dedupe=True)
    untouched(path, before, report)
    assert [s.duplicates for s in repair_store(path, dedupe=True).segments] == [("r1",)]


@pytest.fixture
def unprivileged(path: Path) -> Iterator[Path]:
    """Yield a copy of the store and be nobody meanwhile, if this is root, who may read everything."""
    with tempfile.TemporaryDirectory() as folder:  # those of pytest are open to their user alone
        shutil.copytree(path, copy := Path(folder) / "x.hs.zarr")
        if os.geteuid():
            yield copy
            return
        for place in (Path(folder), *Path(folder).rglob("*")):
            os.chown(place, NOBODY, -1)
        os.seteuid(NOBODY)
        try:
            yield copy
        finally:
            os.seteuid(0)


def test_file_without_permission(unprivileged: Path) -> None:
    file = unprivileged / "segments" / segment_names(LocalBackend(str(unprivileged)))[0] / "input_ids/c/0"
    before = snapshot(unprivileged)
    file.chmod(0)
    report = repair_store(unprivileged)
    file.chmod(0o600)
    untouched(unprivileged, before, report)


def test_size_of_what_cannot_be_looked_at_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Python answer that there is no file."""
    (tmp_path / "x").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    backend = LocalBackend(str(tmp_path))
    assert [backend.size(k) for k in ("x", "x/below", "none", "loop", "")] == [1, None, None, None, None]

    def refuse(*_: Any, **__: Any) -> Callable[[], None]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(PermissionError):
        backend.size("x")
