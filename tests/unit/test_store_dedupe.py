"""Ids that two writers wrote: repair tells of them, and keeps one of each when it is asked to."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import assert_same_record, digest, tiny_record
from mixed_records import CONTRACT, RECORDS

import hsformat.store as hs
from hsformat.maintain import repair_store
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import segment_names


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """Return a store into which two writers wrote r1."""
    one = hs.create(tmp_path / "twice", CONTRACT)
    two = hs.append(tmp_path / "twice")
    for writer, ids in ((one, (0, 1)), (two, (1, 2))):
        for i in ids:
            writer.append(RECORDS[i])
        writer.close()
    return tmp_path / "twice"


def test_id_of_two_writers(twice: Path) -> None:
    report = repair_store(twice)
    assert ([p.code for p in report.problems], report.exit_code) == (["HS107"], 1)
    older, younger = segment_names(LocalBackend(str(twice)))
    report = repair_store(twice, dedupe=True)
    (segment,) = report.segments
    assert (segment.segment, segment.duplicates, segment.kept, segment.lost) == (younger, ("r1",), 1, ())
    assert (report.exit_code, report.records) == (0, 3)
    store = hs.open(twice)
    assert sorted(store.ids) == ["r0", "r1", "r2"]
    assert next(s for s in store.segments if "r1" in s.ids).name == older
    for i in range(3):
        assert_same_record(store[f"r{i}"], RECORDS[i])
    assert repair_store(twice, dedupe=True).segments == []


def test_duplicate_of_another_input_is_said(tmp_path: Path) -> None:
    one = hs.create(tmp_path / "s", CONTRACT)
    two = hs.append(tmp_path / "s")
    for writer, fill in ((one, "1"), (two, "2")):
        writer.append(tiny_record(CONTRACT, "x", source_digest=digest(fill)))
        writer.close()
    report = repair_store(tmp_path / "s", dedupe=True)
    assert [(p.code, p.severity) for p in report.problems] == [("HS107", "warning")]
    assert report.exit_code == 0
    assert hs.open(tmp_path / "s")["x"].source_digest == digest("1")


def test_whole_record_is_kept_where_the_older_one_is_damaged(twice: Path) -> None:
    (twice / "segments" / segment_names(LocalBackend(str(twice)))[0] / "hidden/d1/c/0/0").unlink()
    report = repair_store(twice, dedupe=True)
    assert report.lost == ["r0"]
    assert hs.open(twice).ids == ["r1", "r2"]


def test_segment_of_duplicates_alone_ends(tmp_path: Path) -> None:
    one, two = hs.create(tmp_path / "s", CONTRACT), None
    two = hs.append(tmp_path / "s")
    for writer in (one, two):
        writer.append(RECORDS[0])
        writer.close()
    report = repair_store(tmp_path / "s", dedupe=True)
    assert ([s.action for s in report.segments], report.lost, report.exit_code) == (["ended"], [], 0)
    assert hs.open(tmp_path / "s").ids == ["r0"]
