"""Garbage: what no reader uses goes, in an order that changes nothing for readers; a live writer's segment stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.test_store_conformance import InMemory
from factories import tiny_contract, tiny_record
from typer.testing import CliRunner

import hsformat.store as hs
from hsformat.cli.commands import app
from hsformat.maintain import gc_store, merge_stores, repair_store
from hsformat.problems import StoreError
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import segment_names

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=20, seed=i) for i in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with hs.create(tmp_path / "s", CONTRACT, chunk_tokens=16) as writer:
        for record in RECORDS:
            writer.append(record)
    return tmp_path / "s"


def age(path: Path, hours: float) -> None:
    """Make all files below a folder, or one file, that old."""
    then = time.time() - 3600 * hours
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            os.utime(file, (then, then))


def names(path: Path) -> list[str]:
    return segment_names(LocalBackend(str(path)))


def damaged(path: Path) -> tuple[str, str]:
    """Repair a flipped bit; return the segment that was replaced, and the one that replaces it."""
    shard = path / "segments" / names(path)[0] / "hidden/d2/c/0/0"
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(data)
    (segment,) = repair_store(path).segments
    return segment.segment, segment.successor or ""


def test_clean_store(path: Path) -> None:
    age(path, 48)
    report = gc_store(path)
    assert (report.removed, report.kept, report.nbytes) == ([], [], 0)
    assert len(hs.open(path)) == 3


def test_orphan_goes_when_it_is_old(path: Path) -> None:
    orphan = path / "segments/0a-0"
    (orphan / "hidden/d1/c/0").mkdir(parents=True)
    (orphan / "hidden/d1/c/0/0").write_bytes(b"x" * 100)
    (orphan / "ids").write_bytes(b"y")
    report = gc_store(path)
    assert ([(r.kind, r.key) for r in report.kept], report.removed) == ([("orphan", "segments/0a-0")], [])
    age(orphan / "ids", 48)
    assert gc_store(path).removed == []  # its newest file is young
    age(orphan, 48)
    dry = gc_store(path, dry_run=True)
    assert orphan.exists()
    report = gc_store(path)
    assert [(r.kind, r.key, r.objects, r.nbytes) for r in report.removed] == [("orphan", "segments/0a-0", 2, 101)]
    assert [r.key for r in dry.removed] == ["segments/0a-0"]
    assert not orphan.exists()
    assert hs.open(path).problems == []


def test_replaced_segment_goes_by_when_it_was_replaced(path: Path) -> None:
    age(path, 48)
    old, new = damaged(path)
    assert [(r.kind, r.key) for r in gc_store(path).kept] == [("replaced", f"segments/{old}")]
    age(path / "segments" / new / "zarr.json", 25)
    age(path / "segments" / old, 48)
    before = hs.open(path).ids
    report = gc_store(path)
    assert [(r.kind, r.key) for r in report.removed] == [("replaced", f"segments/{old}")]
    assert report.nbytes > 1000
    assert names(path) == [new]
    assert hs.open(path).ids == before
    assert gc_store(path).removed == []


def test_replaced_files_go_before_those_of_the_segment_that_names_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = damaged(path)
    second, third = damaged_again(path, second)
    age(path, 48)
    monkeypatch.setattr(LocalBackend, "discard", fail)
    with pytest.raises(StoreError, match="stopped"):
        gc_store(path)
    monkeypatch.undo()
    assert not (path / "segments" / first / "zarr.json").exists()
    assert (path / "segments" / second / "zarr.json").exists()
    assert hs.open(path).ids == hs.open(path).ids
    assert [r.key.split("/")[1] for r in gc_store(path).removed] == [first, second]
    assert names(path) == [third]


def damaged_again(path: Path, name: str) -> tuple[str, str]:
    (path / "segments" / name / "token_offsets/c/0").unlink()
    (segment,) = repair_store(path).segments
    return segment.segment, segment.successor or ""


def fail(*_: object) -> None:
    raise OSError(5, "stopped")


def test_leftovers_of_a_publish(path: Path) -> None:
    young, old, committed = (
        path / ".zarr.json.01.partial",
        path / "segments/.zarr.json.02.partial",
        path / "segments" / names(path)[0] / ".zarr.json.03.partial",
    )
    for file in (young, old, committed):
        file.write_bytes(b"12345")
    age(old, 48)
    age(committed, 48)
    (path / "mine.partial").write_text("somebody's")
    age(path / "mine.partial", 48)
    report = gc_store(path)
    assert sorted(r.key for r in report.removed) == sorted(str(p.relative_to(path)) for p in (old, committed))
    assert [r.key for r in report.kept] == [".zarr.json.01.partial"]
    assert (path / "mine.partial").exists()
    assert len(hs.open(path)) == 3


def test_damaged_commit_record_is_no_orphan(path: Path) -> None:
    (path / "segments" / names(path)[0] / "zarr.json").write_text("{")
    age(path, 48)
    assert gc_store(path).removed == []


@pytest.mark.parametrize("gone", ["all", "one", "cut"])
def test_writer_whose_files_were_taken_says_so(path: Path, gone: str) -> None:
    writer = hs.append(path, chunk_tokens=16)
    writer.append(tiny_record(CONTRACT, "w0", tokens=10))  # less than a chunk: no thread has anything to write
    (paused,) = set(names(path)) - {s.name for s in hs.open(path).segments}
    folder = path / "segments" / paused
    if gone == "all":
        age(folder, 48)
        assert [r.key for r in gc_store(path).removed] == [f"segments/{paused}"]
    elif gone == "one":
        (folder / "hidden/d1/c/0/0").unlink()
    writer.append(tiny_record(CONTRACT, "w1", tokens=20))
    if gone == "cut":
        file = (folder / "input_ids/c/0").open("r+b")
        with file, pytest.MonkeyPatch.context() as patch:
            settle = LocalBackend.settle
            patch.setattr(LocalBackend, "settle", lambda self, key: (settle(self, key), file.truncate(3)))
            with pytest.raises(StoreError) as e:
                writer.close()
    else:
        with pytest.raises(StoreError) as e:
            writer.close()
    (found,) = e.value.problems
    assert (found.code, found.severity) == ("HS506", "error")
    assert "gone or cut" in found.got
    assert "2 record(s) not committed" in found.got
    assert hs.open(path).ids == ["r0", "r1", "r2"]
    with hs.append(path) as again:
        again.append(tiny_record(CONTRACT, "w0", tokens=20))
    assert hs.open(path).ids[3:] == ["w0"]


WRITE = """
import sys, time
import hsformat.store as hs
from conformance.test_store_conformance import InMemory
from factories import tiny_contract, tiny_record

writer = hs.append(sys.argv[1], chunk_tokens=16)
for i in range(3):
    writer.append(tiny_record(tiny_contract(), f"w{i}", tokens=20, seed=i))
print("writing", flush=True)
sys.stdin.readline()
writer.close()
print("closed", flush=True)
"""


@pytest.fixture
def writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return another process that has appended records and not committed them; a line lets it commit."""
    roots = [str(Path(__file__).parents[n]) for n in (1, 2)]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def test_segment_of_a_live_writer_stays(path: Path, writing: subprocess.Popen[str]) -> None:
    (orphan,) = set(names(path)) - {s.name for s in hs.open(path).segments}
    report = gc_store(path, older_than=300)
    assert ([r.key for r in report.kept], report.removed) == ([f"segments/{orphan}"], [])
    assert writing.stdin is not None
    assert writing.stdout is not None
    writing.stdin.write("\n")
    writing.stdin.flush()
    assert writing.stdout.readline() == "closed\n"
    assert hs.open(path).ids[3:] == ["w0", "w1", "w2"]


def test_segment_of_a_killed_writer_goes(path: Path, writing: subprocess.Popen[str]) -> None:
    writing.send_signal(signal.SIGKILL)
    writing.wait()
    (orphan,) = set(names(path)) - {s.name for s in hs.open(path).segments}
    age(path / "segments" / orphan, 48)
    (removed,) = gc_store(path).removed
    assert (removed.kind, removed.key) == ("orphan", f"segments/{orphan}")
    assert removed.objects > 4
    assert hs.open(path).problems == []


def test_segment_that_is_committed_meanwhile_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = names(path)[0]
    record = (path / "segments" / name / "zarr.json").read_bytes()
    (path / "segments" / name / "zarr.json").unlink()
    age(path, 48)
    real = LocalBackend.discard

    def commit_first(self: LocalBackend, key: str) -> None:
        (path / key / "zarr.json").write_bytes(record)
        real(self, key)

    monkeypatch.setattr(LocalBackend, "discard", commit_first)
    assert gc_store(path).removed == []
    assert len(hs.open(path)) == 3


def orphan(path: Path, name: str = "0a-0") -> Path:
    (path / "segments" / name).mkdir()
    (path / "segments" / name / "ids").write_bytes(b"y")
    age(path / "segments" / name, 48)
    return path / "segments" / name


@pytest.mark.parametrize("method", ["unlink", "rmdir"])
def test_what_cannot_be_removed_is_said(path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    orphan(path)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, method, read_only)
    with pytest.raises(StoreError) as e:
        gc_store(path)
    (found,) = e.value.problems
    assert (found.code, found.severity) == ("HS506", "error")
    assert "Read-only file system" in found.got
    assert found.where.endswith("segments/0a-0")


def test_what_is_still_there_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan(path)
    monkeypatch.setattr(LocalBackend, "discard", lambda *_: None)
    with pytest.raises(StoreError, match="still there"):
        gc_store(path)


def test_what_cannot_be_listed_is_no_orphan(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest file may be in the folder that could not be read."""
    young = orphan(path) / "hidden"
    young.mkdir()
    (young / "0").write_bytes(b"a writer's")
    real = os.scandir

    def scan(top: object = ".") -> object:
        if str(top).endswith("hidden") and "0a-0" in str(top):
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        return real(top)  # type: ignore[call-overload]  # as it was called

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(OSError, match="timed out"):
        gc_store(path)
    monkeypatch.undo()
    assert (young / "0").exists()


def test_empty_folder_goes_when_it_is_old(path: Path) -> None:
    folder = path / "segments/0a-0/hidden/d1/c/0"
    folder.mkdir(parents=True)
    assert [(r.kind, r.objects) for r in gc_store(path).kept] == [("orphan", 0)]
    for one in (folder, *folder.parents[:4]):
        os.utime(one, (time.time() - 48 * 3600,) * 2)
    os.utime(folder.parent)
    assert gc_store(path).removed == []
    os.utime(folder.parent, (time.time() - 48 * 3600,) * 2)
    assert [r.key for r in gc_store(path).removed] == ["segments/0a-0"]
    assert hs.open(path).problems == []


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Return a folder outside of the store, which must not change."""
    home = tmp_path / "home"
    (home / "hidden/d1").mkdir(parents=True)
    for name in ("letter", "hidden/d1/photo", ".zarr.json.01.partial"):
        (home / name).write_text(name)
    age(home, 48)
    before = {p: p.lstat().st_mtime_ns for p in home.rglob("*")}
    yield home
    assert {p: p.lstat().st_mtime_ns for p in home.rglob("*")} == before


def test_link_in_place_of_a_segment_stays(path: Path, home: Path) -> None:
    (path / "segments/0a-0").symlink_to(home)
    os.utime(path / "segments/0a-0", (0, 0), follow_symlinks=False)
    report = gc_store(path)
    assert ([(r.kind, r.key) for r in report.kept], report.removed) == ([("link", "segments/0a-0")], [])
    assert (path / "segments/0a-0").is_symlink()
    with pytest.raises(OSError, match="link"):
        LocalBackend(str(path)).discard("segments/0a-0")
    for key in ("segments/0a-0/letter", "segments/0a-0/hidden/d1/photo"):
        with pytest.raises(OSError, match="link"):
            LocalBackend(str(path)).remove(key)


def test_links_inside_of_an_orphan_go_and_what_they_lead_to_stays(path: Path, home: Path) -> None:
    folder = orphan(path)
    for name, target in (
        ("hidden", home),
        ("stats", home / "hidden"),
        ("zarr", home / "letter"),
        ("gone", path / "no"),
    ):
        (folder / name).symlink_to(target)
    assert gc_store(path).removed == []  # a link counts by its own age
    for link in folder.iterdir():
        os.utime(link, (0, 0), follow_symlinks=False)
    (removed,) = gc_store(path).removed
    assert (removed.key, removed.objects) == ("segments/0a-0", 5)
    assert not folder.exists()


def test_nothing_is_removed_behind_a_link_to_all_segments(path: Path, home: Path) -> None:
    (home.parent / "x").mkdir()
    (path / "segments").rename(home.parent / "x/segments")
    (path / "segments").symlink_to(home.parent / "x/segments")
    folder = orphan(path)
    with pytest.raises(StoreError) as e:
        gc_store(path)
    assert [(p.code, p.severity) for p in e.value.problems] == [("HS506", "error")]
    assert folder.exists()
    assert len(hs.open(path)) == 3


def test_a_link_to_the_store_is_the_store(path: Path) -> None:
    folder = orphan(path)
    (path.parent / "link").symlink_to(path)
    assert [r.key for r in gc_store(path.parent / "link").removed] == ["segments/0a-0"]
    assert not folder.exists()


def test_segment_that_is_a_link_is_repaired_and_nothing_is_removed_behind_it(path: Path) -> None:
    name = names(path)[0]
    elsewhere = (path / "segments" / name).rename(path.parent / "elsewhere")
    (path / "segments" / name).symlink_to(elsewhere)
    age(elsewhere, 48)
    assert len(hs.open(path)) == 3
    _, successor = damaged(path)
    assert successor
    age(path, 48)
    files = {p: p.lstat().st_mtime_ns for p in elsewhere.rglob("*")}
    report = gc_store(path)
    assert ([(r.kind, r.key) for r in report.kept], report.removed) == ([("link", f"segments/{name}")], [])
    (path / "segments" / successor / "input_ids/c/0").unlink()  # nothing is left: it ends, and before it the first
    with pytest.raises(StoreError) as e:
        repair_store(path)
    assert [(p.code, p.severity) for p in e.value.problems] == [("HS506", "error")]
    assert {p: p.lstat().st_mtime_ns for p in elsewhere.rglob("*")} == files


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_no_age_is_refused(path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        gc_store(path, older_than=seconds)


def test_command(path: Path) -> None:
    run = CliRunner().invoke
    (path / "segments/0a-0").mkdir()
    (path / "segments/0a-0/ids").write_bytes(b"y")
    age(path / "segments/0a-0", 3)
    for wrong in ("0", "0h", "1", "soon", "-1h"):
        assert run(app, ["gc", str(path), f"--older-than={wrong}"]).exit_code == 2
    kept = run(app, ["gc", str(path)])
    assert (kept.exit_code, "kept orphan segments/0a-0: 1 file(s), 1 B, 3.0 h old" in kept.stdout) == (0, True)
    dry = run(app, ["gc", str(path), "--older-than", "90m", "--dry-run"])
    assert "would remove orphan segments/0a-0" in dry.stdout
    report = json.loads(run(app, ["gc", str(path), "--older-than", "90m", "--format", "json"]).stdout)
    assert (report["bytes"], report["removed"][0]["key"], report["exit_code"]) == (1, "segments/0a-0", 0)


def test_a_place_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge, repair and gc ask nothing of a place that its protocol does not promise."""
    place, out = InMemory("a", {}), InMemory("c", {})
    with hs.create(place, CONTRACT, chunk_tokens=16) as writer:
        for record in RECORDS:
            writer.append(record)
    assert merge_stores([place], out).exit_code == 0
    assert out.objects == place.objects
    (name,) = {k.split("/")[1] for k in out.objects if k.count("/") > 1}
    del out.objects[f"segments/{name}/stats/d1/c/0/0"]
    out.objects["segments/0a-0/ids"] = b"orphan"
    assert repair_store(out).exit_code == 0
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 48 * 3600)
    listing = {key: out.listing(key) for key in ("", "segments/0a-0", f"segments/{name}")}
    monkeypatch.undo()
    monkeypatch.setattr(InMemory, "listing", lambda _, key: [e for e in listing[key] if e.key in out.objects])
    report = gc_store(out)
    assert [(r.kind, r.key) for r in report.removed] == [
        ("replaced", f"segments/{name}"),
        ("orphan", "segments/0a-0"),
    ]
    monkeypatch.undo()
    assert hs.open(out).problems == []
    assert hs.content_digest(hs.open(out)) == hs.content_digest(hs.open(place))
