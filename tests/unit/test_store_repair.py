"""Repair: what is whole of a damaged segment is kept bit by bit, what is lost is named, and a resume fills it."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from factories import assert_same_record, tiny_contract, tiny_record
from mixed_records import CONTRACT, RECORDS, WANTED, record
from typer.testing import CliRunner

import hsformat.store as hs
from hsformat.cli.commands import app
from hsformat.maintain import RepairReport, repair_store
from hsformat.problems import Severity, StoreError
from hsformat.store.commit import load_commit
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import segment_names
from hsformat.validate import validate_store


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of each codec: a segment of r0..r5 with chunks of 16 states, a segment of s0."""
    folder = tmp_path_factory.mktemp("built")
    for codec in ("compact", "fast"):
        with hs.create(folder / codec, CONTRACT, codec=codec, chunk_tokens=16, producer={"run": 1}) as writer:  # type: ignore[arg-type]  # text
            for r in RECORDS:
                writer.append(r)
            writer.flush()
            writer.append(tiny_record(CONTRACT, "s0", seed=9))
    return folder


@pytest.fixture(params=["compact", "fast"])
def path(built: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy to damage."""
    return shutil.copytree(built / request.param, tmp_path / "s")


def first(path: Path) -> Path:
    return path / "segments" / segment_names(LocalBackend(str(path)))[0]


def check(path: Path, report: RepairReport, lost: set[str]) -> None:
    """Compare the store with what was written but for what is lost, then fill that and repair again."""
    assert set(report.lost) == lost
    assert report.exit_code == (1 if lost else 0)
    errors = [p for p in validate_store(path, level="full") if p.severity is Severity.ERROR]
    assert errors == []
    store = hs.open(path)
    assert set(store.ids) == {*WANTED, "s0"} - lost
    for r in RECORDS:
        if r.id not in lost:
            assert_same_record(store[r.id], r)
    with hs.append(path) as writer:
        for r in RECORDS:
            if r.id not in writer.ids:
                writer.append(r)
    store = hs.open(path)
    assert sorted(store.ids) == sorted([*WANTED, "s0"])
    for r in RECORDS:
        assert_same_record(store[r.id], r)
    again = repair_store(path)
    assert (again.segments, again.problems, again.exit_code) == ([], [], 0)


def test_nothing_to_repair(path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    report = repair_store(path, dedupe=True)
    assert (report.segments, report.problems, report.records, report.exit_code) == ([], [], 7, 0)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_shard_cut_to_half(path: Path) -> None:  # zarrs-python#185, iohub#415
    shard = first(path) / "hidden/d3/c/0/0"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    named = [p for p in validate_store(path) if p.code == "HS505"]
    assert [p.where.endswith("hidden/d3/c/0/0") for p in named] == [True]
    assert "'r0'" in named[0].got
    name = first(path).name
    report = repair_store(path)
    (segment,) = report.segments
    assert (segment.segment, segment.action) == (name, "replaced")
    assert 0 < len(report.lost) < 6  # by its chunks, without the index that was cut off
    assert set(report.lost) == {f"r{i}" for i in range(6 - len(report.lost), 6)}
    commit, _ = load_commit(LocalBackend(str(path)), segment.successor or "")
    assert commit is not None
    assert commit.replaces == (name,)
    assert commit.producer is not None
    assert commit.producer["original"] == {"run": 1}
    assert commit.producer["repair"]["lost"] == len(report.lost)
    check(path, report, set(report.lost))


def test_statistics_stay_as_they_were_written(path: Path) -> None:
    backend = LocalBackend(str(path))
    from hsformat.store.segment import SegmentReader

    def stats(name: str) -> Any:
        commit, _ = load_commit(backend, name)
        assert commit is not None
        return SegmentReader(backend, CONTRACT, commit).rows("stats/d2", slice(None))

    old, before = first(path).name, stats(first(path).name)
    flip(first(path) / "hidden/d3/c/0/0", 3)  # the first chunk: r0
    (segment,) = repair_store(path).segments
    assert segment.segment == old
    assert segment.successor is not None
    assert stats(segment.successor).tobytes() == before[1:].tobytes()


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def test_flipped_bit_costs_the_records_of_its_chunk(path: Path) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    report = repair_store(path)
    check(path, report, {"r0"})


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"")])
@pytest.mark.parametrize("name", ["hidden/d1/c/0/0", "input_ids/c/0", "fields/label/c/0/0"])
def test_array_that_is_gone_costs_all_records_of_its_segment(
    path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    segment = first(path)
    damage(segment / name)
    report = repair_store(path)
    assert [s.action for s in report.segments] == ["ended"]
    assert not (segment / "zarr.json").exists()
    check(path, report, set(WANTED))


@pytest.mark.parametrize(
    "name",
    ["loss_mask/zarr.json", "ids/c/0", "token_offsets/c/0", "stats/d1/c/0/0", "hidden/zarr.json"],
)
@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: flip(f, 3)])
def test_what_is_known_otherwise_costs_nothing(path: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(first(path) / name)
    check(path, repair_store(path), set())


def test_unusual_chunks_need_their_metadata(path: Path) -> None:  # 16 rows are no writer's own choice
    (first(path) / "hidden/d1/zarr.json").unlink()
    check(path, repair_store(path), set(WANTED))


def test_index_of_a_shard_that_is_lost(path: Path) -> None:
    shard = first(path) / "hidden/d4/c/0/0"
    flip(shard, len(shard.read_bytes()) - 3)
    check(path, repair_store(path), set())


def test_bytes_after_the_end_of_a_shard(path: Path) -> None:
    shard = first(path) / "hidden/d4/c/0/0"
    shard.write_bytes(shard.read_bytes() + b"more")
    check(path, repair_store(path), set())


def test_intact_file_of_another_array_is_not_taken_for_its_own(path: Path) -> None:
    segment = first(path)
    one, other = (segment / f"hidden/{k}/c/0/0" for k in ("d1", "d2"))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    report = repair_store(path)
    assert {p.code for s in report.segments for p in s.problems} <= {"HS504", "HS505"}
    check(path, report, set(WANTED))


def test_intact_tokens_of_another_segment_are_not_taken_for_its_own(path: Path, built: Path, tmp_path: Path) -> None:
    codec = hs.open(path).contract.codec
    with hs.create(tmp_path / "other", CONTRACT, codec=codec, chunk_tokens=16) as writer:
        for r in RECORDS:
            r = record(int(r.id[1:]))
            r.input_ids = (r.input_ids + 1) % 100
            writer.append(r)
    shutil.copy(first(tmp_path / "other") / "input_ids/c/0", first(path) / "input_ids/c/0")
    report = repair_store(path)
    check(path, report, set(WANTED))


def test_damaged_commit_record_ends_its_segment_and_its_ids_are_told(path: Path) -> None:
    segment = first(path)
    flip(segment / "zarr.json", 200)
    before = (segment / "zarr.json").read_bytes()
    with pytest.raises(StoreError):
        hs.open(path)
    assert hs.open(path, damaged="skip").ids == ["s0"]
    dry = repair_store(path, dry_run=True)
    assert (dry.lost, dry.exit_code) == (list(WANTED), 1)
    assert (segment / "zarr.json").exists()
    report = repair_store(path)
    assert not (segment / "zarr.json").exists()
    assert (segment / "hidden/d1/c/0/0").exists()  # a copy of zarr.json would bring it back
    assert (path / (report.segments[0].aside or "")).read_bytes() == before
    check(path, report, set(WANTED))


@pytest.mark.parametrize("broken", [b'{"zarr_format": 3', b'"node_type', b'"attributes"', b'": {"hsformat', b"}}"])
def test_commit_record_in_a_damaged_file_costs_nothing(path: Path, broken: bytes) -> None:
    """Whatever surrounds it; what it had replaced stays so."""
    flip(first(path) / "hidden/d2/c/0/0", 30)
    (segment,) = repair_store(path).segments
    file = path / "segments" / (segment.successor or "") / "zarr.json"
    before, found, after = file.read_bytes().rpartition(broken)
    file.write_bytes(before + b"?" * len(found) + after)
    report = repair_store(path)
    assert [(s.action, s.kept, s.lost) for s in report.segments] == [("replaced", 5, ())]
    assert [p.code for s in report.segments for p in s.problems] == ["HS504"]
    assert sorted(hs.open(path).ids) == ["r1", "r2", "r3", "r4", "r5", "s0"]
    for r in RECORDS[1:]:
        assert_same_record(hs.open(path)[r.id], r)
    assert repair_store(path).segments == []


def test_what_is_set_aside_brings_a_segment_back(path: Path) -> None:
    shard, name = first(path) / "input_ids/c/0", first(path).name
    data = shard.read_bytes()
    shard.unlink()
    (segment,) = repair_store(path).segments
    assert segment.action == "ended"
    shard.write_bytes(data)
    (path / (segment.aside or "")).rename(path / "segments" / name / "zarr.json")
    assert sorted(hs.open(path).ids) == sorted([*WANTED, "s0"])
    assert [p for p in validate_store(path, level="full") if p.severity is Severity.ERROR] == []


def test_file_that_is_no_commit_record_is_left_to_its_owner(path: Path) -> None:
    file = first(path) / "zarr.json"
    with file.open("wb") as f:
        f.truncate(2**24 + 2)
    report = repair_store(path)
    assert ([p.code for p in report.problems], report.segments, report.exit_code) == (["HS504"], [], 1)
    assert file.stat().st_size == 2**24 + 2


@pytest.mark.parametrize("name", ["loss_mask", "input_ids", "position_ids", "fields/weight"])
def test_index_of_a_shard_of_tokens_that_is_lost(path: Path, name: str) -> None:
    shard = first(path) / name / "c/0"
    data = shard.read_bytes()
    for damaged in (data[:-3] + b"?" + data[-2:], data[:-9] + b"?" + data[-8:], data + b"more"):
        shard.write_bytes(damaged)
        assert repair_store(path, dry_run=True).lost == []
    check(path, repair_store(path), set())


@pytest.fixture(scope="module", params=["compact", "fast"])
def long(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Return a store of three records of 4,096 tokens, each in chunks of its own, and one of two other records."""
    contract = tiny_contract(codec=request.param)
    for name, ids in (("three", "abc"), ("two", "de")):
        with hs.create(tmp_path_factory.getbasetemp() / f"{request.param}-{name}", contract) as writer:
            for i, seed in zip(ids, range(len(ids)), strict=True):
                writer.append(tiny_record(contract, i, tokens=4096, seed=seed + ord(ids[0])))
    one, other = (tmp_path_factory.getbasetemp() / f"{request.param}-{name}" for name in ("three", "two"))
    return one, other


def test_shard_of_tokens_that_is_damaged(long: tuple[Path, Path], tmp_path: Path) -> None:
    """Cut, flipped, both; and one in whose place another file is, whole, which tells nothing."""
    shard = "input_ids/c/0"
    data, other = ((first(path) / shard).read_bytes() for path in long)
    half = len(data) // 2
    flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
    three = {
        "cut": (data[: half + 4], {"b", "c"}),
        "flipped": (flipped, {"b"}),
        "flipped and its index": (flipped[:-3] + b"?" + flipped[-2:], {"b"}),
        "flipped and longer": (flipped + b"more", {"b"}),
        "other": (other, {"a", "b", "c"}),
        "empty": (b"", {"a", "b", "c"}),
    }
    for name, (damaged, lost) in three.items():
        path = shutil.copytree(long[0], tmp_path / name)
        (first(path) / shard).write_bytes(damaged)
        report = repair_store(path, dry_run=True)
        assert (name, set(report.lost)) == (name, lost)


def test_damaged_commit_record_whose_ids_are_damaged_too(path: Path) -> None:
    flip(first(path) / "zarr.json", 200)
    flip(first(path) / "ids/c/0", 3)
    report = repair_store(path)
    assert (report.lost, report.exit_code) == ([], 1)
    assert hs.open(path).ids == ["s0"]


def test_segment_of_an_unknown_version_is_left_alone(path: Path) -> None:
    from hsformat.store.commit import seal

    file = first(path) / "zarr.json"
    data = json.loads(file.read_text())
    attribute = {**data["attributes"]["hsformat"], "spec_version": "9.0"}
    attribute.pop("checksum")
    data["attributes"]["hsformat"] = seal(attribute)
    file.write_text(json.dumps(data))
    before = file.read_bytes()
    report = repair_store(path)
    assert ([p.code for p in report.problems], report.exit_code, report.segments) == (["HS507"], 1, [])
    assert file.read_bytes() == before


def test_ending_a_segment_does_not_bring_back_what_it_had_replaced(path: Path) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    (segment,) = repair_store(path).segments
    assert segment.successor is not None
    (path / "segments" / segment.successor / "loss_mask/c/0").unlink()
    report = repair_store(path)
    assert set(report.lost) == {*WANTED} - {"r0"}
    assert hs.open(path).ids == ["s0"]


def test_successor_names_all_that_were_replaced_before(path: Path) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    old = first(path).name
    (one,) = repair_store(path).segments
    assert one.successor is not None
    (path / "segments" / one.successor / "token_offsets/c/0").unlink()
    (two,) = repair_store(path).segments
    commit, _ = load_commit(LocalBackend(str(path)), two.successor or "")
    assert commit is not None
    assert set(commit.replaces) == {old, one.successor}


def test_dry_run_changes_nothing(path: Path) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    report = repair_store(path, dry_run=True)
    assert (report.lost, report.exit_code, report.segments[0].successor) == (["r0"], 1, None)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_group_of_the_segments_is_made_again(path: Path) -> None:
    (path / "segments/zarr.json").write_text("{")
    assert [p.code for p in repair_store(path, dry_run=True).problems] == ["HS504"]
    assert repair_store(path).exit_code == 0
    assert [p for p in validate_store(path) if p.severity is Severity.ERROR] == []


def test_full_disk_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    real = LocalBackend.publish

    def full(self: LocalBackend, key: str, data: bytes) -> None:
        if key.startswith("segments/") and key.count("/") == 2:
            raise OSError(28, "No space left on device")
        real(self, key, data)

    before = sorted(p for p in path.rglob("*"))
    monkeypatch.setattr(LocalBackend, "publish", full)
    with pytest.raises(StoreError) as e:
        repair_store(path)
    assert [(p.code, p.severity) for p in e.value.problems] == [("HS506", "error")]
    assert sorted(p for p in path.rglob("*")) == before


def test_two_repairs_at_once_do_not_write_records_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    import hsformat.maintain.repair as module

    monkeypatch.setattr(LocalBackend, "lock", lambda *_: nullcontext())  # as on an object store
    real, done = module.write_segment, []

    def late(*args: Any, **kwargs: Any) -> bool:
        if not done:
            done.append(True)
            done.append(repair_store(path))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "write_segment", late)
    report = repair_store(path)
    assert [s.action for s in report.segments] == ["superseded"]
    assert sorted(hs.open(path).ids) == ["r1", "r2", "r3", "r4", "r5", "s0"]


def test_one_repair_at_a_time(path: Path) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    with LocalBackend(str(path)).lock("zarr.json"):  # as another process does
        with pytest.raises(StoreError) as e:
            repair_store(path)
        assert [(p.code, p.severity) for p in e.value.problems] == [("HS506", "error")]
        assert repair_store(path, dry_run=True).lost == ["r0"]
        assert sorted(hs.open(path).ids) == sorted([*WANTED, "s0"])
    assert repair_store(path).lost == ["r0"]


def test_repairs_at_once_leave_one_record_of_each_id(tmp_path: Path) -> None:
    with hs.create(tmp_path / "s", CONTRACT, chunk_tokens=16) as writer:
        for r in RECORDS:
            writer.append(r)
            writer.flush()
    for shard in (tmp_path / "s").glob("segments/*/token_offsets/c/0"):
        flip(shard, 3)
    start, refused = threading.Barrier(3), []

    def run() -> None:
        start.wait()
        try:
            repair_store(tmp_path / "s")
        except StoreError as e:
            refused.append(e)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {p.got for e in refused for p in e.problems} <= {"another repair of this store is at work"}
    assert len(refused) < 3
    assert sorted(hs.open(tmp_path / "s").ids) == sorted(WANTED)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_disk_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert repair_store(path).exit_code == 0


def test_command(path: Path) -> None:
    flip(first(path) / "hidden/d2/c/0/0", 30)
    run = CliRunner().invoke
    shown = run(app, ["repair", str(path), "--dry-run"])
    assert shown.exit_code == 1
    assert "would be lost" in shown.stdout
    done = run(app, ["repair", str(path), "--format", "json"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["exit_code"], report["lost"]) == (1, 1, ["r0"])
    assert report["segments"][0]["action"] == "replaced"
    clean = run(app, ["repair", str(path)])
    assert (clean.exit_code, "nothing to repair; 6 record(s)" in clean.stdout) == (0, True)
    name = hs.open(path).segments[0].name
    (path / "segments" / name / "zarr.json").write_text("{")
    assert f"  its zarr.json is kept as segments/{name}/zarr.json." in run(app, ["repair", str(path)]).stdout
    with pytest.raises(StoreError):
        run(app, ["repair", str(path / "nothing")], catch_exceptions=False)
