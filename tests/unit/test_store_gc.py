"""Garbage: what no reader uses goes, in an order that changes nothing for readers; a live writer's segment stays."""

from __future__ import annotations

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
    with pytest.raises(OSError, match="stopped"):
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


def test_what_cannot_be_removed_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "segments/0a-0").mkdir()
    (path / "segments/0a-0/ids").write_bytes(b"y")
    age(path / "segments/0a-0", 48)
    monkeypatch.setattr(LocalBackend, "discard", lambda *_: None)
    with pytest.raises(OSError, match="cannot be removed"):
        gc_store(path)


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
