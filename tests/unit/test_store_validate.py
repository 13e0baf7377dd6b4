"""Validation of whole stores: what is counted, what is shown on the way, and what stays in memory."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.store.commit import CommitRecord, FileEntry, seal
from hsformat.validate import Level, run
from hsformat.validate.ids import SeenIds
from hsformat.validate.segment import SegmentCheck

CONTRACT = tiny_contract()


def write(path: Path, segments: int, records: int = 6) -> hs.Store:
    with hs.create(path, CONTRACT) as out:
        for s in range(segments):
            for i in range(records):
                out.append(tiny_record(CONTRACT, f"r{s}-{i}", tokens=40, seed=i))
            out.flush()
    return hs.open(path)


@pytest.mark.parametrize("level", [Level.SAMPLE, Level.FULL])
def test_bytes_are_counted_and_shown(tmp_path: Path, level: Level) -> None:
    store = write(tmp_path / "s", 3)
    shown: list[tuple[int, int]] = []
    report = run(tmp_path / "s", level=level, tick=lambda done, total: shown.append((done, total)))
    assert report.problems == []
    if level is Level.FULL:
        assert report.bytes_checked == store.nbytes
    assert report.bytes_checked > 0
    assert len(shown) > 20
    assert shown == sorted(shown, key=lambda pair: pair[0])
    assert all(done <= total for done, total in shown)
    assert shown[-1][0] == shown[-1][1] >= report.bytes_checked
    if level is Level.FULL:
        assert abs(shown[0][1] - shown[-1][1]) <= 0.1 * shown[-1][1]


def test_segments_are_let_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s", 6)
    most, real = [0], SegmentCheck.arrays

    def arrays(self: SegmentCheck, rows: Any) -> Any:
        gc.collect()
        alive = sum(isinstance(o, CommitRecord) for o in gc.get_objects())
        most[0] = max(most[0], alive)
        return real(self, rows)

    gc.collect()
    before = sum(isinstance(o, CommitRecord) for o in gc.get_objects())
    monkeypatch.setattr(SegmentCheck, "arrays", arrays)
    assert run(tmp_path / "s", level=Level.FULL).problems == []
    assert 1 <= most[0] - before <= 2


def test_commit_records_share_what_is_the_same(tmp_path: Path) -> None:
    store = write(tmp_path / "s", 3)
    a, *others = store.segments
    for b in others:
        assert b.provenance[0] is a.provenance[0]
        assert all(x is y for x, y in zip(a.files, b.files, strict=True))
    raw = json.loads((tmp_path / "s" / a.prefix / "zarr.json").read_bytes())["attributes"]["hsformat"]
    assert {k: {"size": f.size, "checksum": f.checksum} for k, f in a.files.items()} == raw["files"]
    assert a.files["input_ids/c/0"] == FileEntry(**raw["files"]["input_ids/c/0"])
    assert (list(a.ids), list(a.tokens), list(a.states)) == (raw["ids"], raw["tokens"], raw["states"])
    assert list(a.source_digests) == raw["source_digests"]


def test_source_digests_are_kept(tmp_path: Path) -> None:
    given = [None, f"sha256:{'0' * 64}", f"sha256:{'f' * 63}e"]
    with hs.create(tmp_path / "s", CONTRACT) as out:
        for i, digest in enumerate(given):
            out.append(tiny_record(CONTRACT, f"r{i}", source_digest=digest))
            assert out.source_digest(f"r{i}") == digest
    store = hs.open(tmp_path / "s")
    assert [r.source_digest for r in store] == given
    assert list(store.segments[0].source_digests[-2:]) == given[-2:]
    with hs.append(tmp_path / "s") as again:
        assert [again.source_digest(i) for i in store.ids] == given


def test_segment_that_goes_while_it_is_validated_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write(tmp_path / "s", 2)
    real = SegmentCheck.checksums

    def checksums(self: SegmentCheck) -> Any:
        shutil.rmtree(tmp_path / "s" / store.segments[1].prefix, ignore_errors=True)
        return real(self)

    monkeypatch.setattr(SegmentCheck, "checksums", checksums)
    assert {p.code for p in run(tmp_path / "s", level=Level.FULL).problems} == {"HS506"}


def test_seal_is_that_of_the_disk(tmp_path: Path) -> None:
    store = write(tmp_path / "s", 1)
    raw = json.loads((tmp_path / "s" / store.segments[0].prefix / "zarr.json").read_bytes())["attributes"]["hsformat"]
    assert seal({k: v for k, v in raw.items() if k != "checksum"}) == raw


def test_a_segment_under_a_name_that_is_none_is_told(tmp_path: Path) -> None:
    store = write(tmp_path / "s", 2)
    segments = tmp_path / "s" / "segments"
    (segments / store.segments[0].name).rename(segments / "backup of it")
    (segments / "notes").mkdir()  # rule S-3: ignored, and nothing is lost with it
    (segments / "notes" / "zarr.json").write_text("{}")
    for level in Level:
        report = run(tmp_path / "s", level=level)
        (note,) = report.problems
        assert (note.code, note.severity, note.where.endswith("segments/backup of it")) == ("HS506", "note", True)
        assert report.records == 6


def test_ids_in_two_segments_are_found_without_keeping_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hs.create(tmp_path / "s", CONTRACT) as one:
        one.append(tiny_record(CONTRACT, "a"))
        one.append(tiny_record(CONTRACT, "é" * 200))
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    with hs.append(tmp_path / "s") as two, hs.append(tmp_path / "t") as three:
        two.append(tiny_record(CONTRACT, "b"))
        three.append(tiny_record(CONTRACT, "b"))
        three.flush()
        three.append(tiny_record(CONTRACT, "c"))
    for segment in (tmp_path / "t" / "segments").iterdir():
        if segment.is_dir() and not (tmp_path / "s" / "segments" / segment.name).exists():
            shutil.copytree(segment, tmp_path / "s" / "segments" / segment.name)
    (twice,) = run(tmp_path / "s", level="metadata").problems
    assert (twice.code, twice.record) == ("HS107", "b")
    first = sorted(p.name for p in (tmp_path / "s" / "segments").iterdir() if p.is_dir())[1]
    assert first in twice.got
    # Two texts of one hash are no copies.
    monkeypatch.setattr("hsformat.validate.ids.xxhash.xxh3_64_intdigest", lambda data: len(data) % 2)
    assert [p.record for p in run(tmp_path / "s", level="metadata").problems] == ["b"]


def test_what_is_kept_of_an_id_is_8_bytes() -> None:
    seen, many = SeenIds(), 20_000
    commit = SimpleNamespace(name="a-0", ids=[f"conversation-{i:09}" for i in range(many)])
    tracemalloc.start()
    try:
        seen.add(cast("Any", commit))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 * many
