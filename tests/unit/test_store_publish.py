"""Stores and segments that are published: each name once, whoever else is there, with and without hard links."""

from __future__ import annotations

import errno
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from factories import assert_same_record, tiny_contract, tiny_record
from failing_writes import code_of, fail_after

import hsformat.store as hs
from hsformat.problems import StoreError
from hsformat.store import local, writer
from hsformat.store.local import LocalBackend

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", seed=i) for i in range(6)]


def test_segments_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # sglang PR#31926
    hs.create(tmp_path / "s", CONTRACT).close()
    monkeypatch.setattr(writer, "new_writer", lambda: "0" * 20)
    with hs.append(tmp_path / "s") as one:
        one.append(RECORDS[0])
    two = hs.append(tmp_path / "s")
    assert code_of(lambda: two.append(RECORDS[1])) == "HS506"
    store = hs.open(tmp_path / "s")
    assert store.ids == ["r0"]
    assert_same_record(store[0], RECORDS[0])


def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(local.Path, "hardlink_to", no_links)


def test_publish_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hard_links(monkeypatch)
    with hs.create(tmp_path / "s", CONTRACT) as out:
        out.append(RECORDS[0])
    assert_same_record(hs.open(tmp_path / "s")[0], RECORDS[0])
    place = LocalBackend(str(tmp_path / "s"))
    with pytest.raises(FileExistsError):
        place.publish("zarr.json", b"other")
    assert {p.name for p in (tmp_path / "s").iterdir()} == {"zarr.json", "segments"}


def test_publish_is_put_if_absent(tmp_path: Path) -> None:
    place = LocalBackend(str(tmp_path))
    place.publish("a/zarr.json", b"one")
    with pytest.raises(FileExistsError):
        place.publish("a/zarr.json", b"two")
    with pytest.raises(FileExistsError):
        place.write("a/zarr.json", b"three")
    assert place.read("a/zarr.json") == b"one"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["zarr.json"]


def test_create_refuses_what_exists(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    hs.create(tmp_path / "store", CONTRACT).close()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = (tmp_path / "store/zarr.json").read_bytes()
    for name in ("file", "full", "store", "link", "file/below", "x" * 300):
        assert code_of(lambda name=name: hs.create(tmp_path / name, CONTRACT)) == "HS501", name  # type: ignore[misc]  # bound now
    for name in ("file", "full", "store", "link", "file/below", "x" * 300):  # before a model is loaded for minutes
        assert code_of(lambda name=name: hs.check_new(tmp_path / name)) == "HS501", name  # type: ignore[misc]  # bound now
    with pytest.raises(StoreError, match=r"hs\.append"):
        hs.create(tmp_path / "store", CONTRACT)
    assert (tmp_path / "store/zarr.json").read_bytes() == before
    assert hs.exists(tmp_path / "store")
    assert not any(hs.exists(tmp_path / name) for name in ("file", "full", "nothing", "file/below", "x" * 300))
    (tmp_path / "empty").mkdir()
    hs.create(tmp_path / "empty", CONTRACT).close()
    hs.create(tmp_path / "a/b/c", CONTRACT).close()
    assert len(hs.open(tmp_path / "a/b/c")) == 0


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_after(monkeypatch, "publish", 0, errno.EACCES)
    assert code_of(lambda: hs.create(tmp_path / "s", CONTRACT)) == "HS501"
    assert not hs.exists(tmp_path / "s")


def test_two_creators_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local._link_new

    def rival_first(temporary: Path, path: Path) -> None:
        if not path.exists():
            path.write_bytes(b"the rival's")
        real(temporary, path)

    monkeypatch.setattr(local, "_link_new", rival_first)
    with pytest.raises(StoreError, match="another process") as e:
        hs.create(tmp_path / "s", CONTRACT)
    assert e.value.problems[0].code == "HS501"
    assert {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()} == {"zarr.json": b"the rival's"}


def test_failure_after_the_root_is_no_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def occupied(backend: LocalBackend) -> None:
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(sys.modules["hsformat.store.create"], "ensure_segments", occupied)
    with pytest.raises(StoreError, match="segments cannot be created") as e:
        hs.create(tmp_path / "s", CONTRACT)
    assert e.value.problems[0].code == "HS501"
    assert "another process" not in str(e.value)


def test_lost_answer_of_a_link_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # NFS
    real = Path.hardlink_to

    def link(self: Path, target: Path) -> None:
        real(self, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(local.Path, "hardlink_to", link)
    with hs.create(tmp_path / "s", CONTRACT) as out:
        out.append(RECORDS[0])
    assert hs.open(tmp_path / "s").ids == ["r0"]


def test_guard_of_a_writer_that_was_killed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/.zarr.json.guard").write_bytes(b"")
    no_hard_links(monkeypatch)
    hs.create(tmp_path / "s", CONTRACT).close()
    assert {p.name for p in (tmp_path / "s").iterdir()} == {"zarr.json", "segments"}


def test_one_of_many_creators_wins_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hard_links(monkeypatch)
    place = LocalBackend(str(tmp_path / "s"))

    def create(i: int) -> bool:
        try:
            place.publish("zarr.json", str(i).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [i for i, ok in enumerate(pool.map(create, range(32))) if ok]
    assert [str(i).encode() for i in won] == [place.read("zarr.json")]
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["zarr.json"]


def test_a_new_writer_flushes_no_old_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flushes() -> int:
        calls: list[Path] = []
        with monkeypatch.context() as m, hs.append(tmp_path / "s") as out:
            m.setattr(local, "_sync_folder", calls.append)
            out.append(tiny_record(CONTRACT, f"n{len(hs.open(tmp_path / 's'))}"))
            out.flush()
        assert tmp_path / "s/segments" in calls
        return len(calls)

    hs.create(tmp_path / "s", CONTRACT).close()
    first = flushes()
    assert [flushes() for _ in range(3)] == [first] * 3
