"""Norms of records against the others (HS203): what is found, and that ordinary data gives no finding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conformance.tamper import rewrite_array
from factories import tiny_contract, tiny_record
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import hsformat as hs
from hsformat.cli.commands import app
from hsformat.problems import Problem
from hsformat.validate import Level, levels, run
from hsformat.validate.levels import SegmentNorms
from hsformat.validate.norms import norm_problems
from hsformat.validate.segment import SegmentCheck

DEMO = json.loads((Path(__file__).parents[1] / "data" / "demo_norms.json").read_text())
KEYS = DEMO["captures"]
CAPTURES = [{"depth": int(k[1:]), "norm": "none", "dtype": "bfloat16"} for k in KEYS]
CONTRACT = tiny_contract(
    captures=CAPTURES, target={"num_layers": 30}, layout={"aux": KEYS[:-1], "last": KEYS[-1]}
)  # fmt: skip


def demo(**changes: object) -> SegmentNorms:
    """Return the statistics of the demo's 48 records: SmolLM2-135M, greedy answers, 40 to 268 states."""
    rows = len(DEMO["states"])
    norms = SegmentNorms(
        name="aa-0",
        ids=[f"r{i}" for i in range(rows)],
        states=np.array(DEMO["states"]),
        mean_l2=np.array(DEMO["mean_l2"], np.float32),
        max_abs=np.array(DEMO["max_abs"], np.float32),
    )
    return replace(norms, **changes)


def part(norms: SegmentNorms, rows: slice, name: str) -> SegmentNorms:
    return SegmentNorms(
        name=name,
        ids=norms.ids[rows],
        states=norms.states[rows],
        mean_l2=norms.mean_l2[rows],
        max_abs=norms.max_abs[rows],
    )


def check(*segments: SegmentNorms, contract: hs.Contract = CONTRACT) -> list[Problem]:
    found = list(norm_problems(contract, segments, where="s"))
    assert {(p.code, p.severity) for p in found} <= {("HS203", hs.Severity.WARNING)}
    return found


def column(key: str) -> int:
    return KEYS.index(key)


def test_real_records_are_not_told():
    assert check(demo()) == []
    assert check(*(part(demo(), slice(i, i + 3), f"aa-{i}") for i in range(0, 48, 3))) == []
    assert check(*(part(demo(), slice(i, i + 16), f"{w}-0") for i, w in ((0, "aa"), (16, "bb"), (32, "cc")))) == []


@pytest.mark.parametrize("row", range(0, 48, 5))
def test_exchanged_captures_of_one_record(row):
    mean = demo().mean_l2.copy()
    mean[row, [column("d15"), column("d27")]] = mean[row, [column("d27"), column("d15")]]
    (p,) = check(demo(mean_l2=mean))
    assert p.record == f"r{row}"
    assert p.where.startswith(f"s/segments/aa-0: record 'r{row}': hidden/")
    assert "exchanged" in p.fix


@pytest.mark.parametrize("factor", [2.0, 0.5, 576**0.5, 576**-0.5])
@pytest.mark.parametrize("keys", [*([k] for k in KEYS), KEYS])
def test_scaled_record(factor, keys):  # sqrt(hidden_size): the scale of Gemma's embedding, lost or applied twice
    for row in (0, 7, 30):
        mean = demo().mean_l2.copy()
        mean[row, [column(k) for k in keys]] *= factor
        (p,) = check(demo(mean_l2=mean))
        assert p.record == f"r{row}"
        assert p.where.endswith(f"hidden/{', '.join(keys)}")
        assert ("a scale was lost or applied twice" in p.fix) == (len(keys) == len(KEYS))


@pytest.mark.parametrize(("first", "factor"), [(30, 24.0), (24, 2.0), (24, 0.5), (40, 0.1)])
def test_two_extractors_in_one_store(first, factor):
    """One finding for the writer, and none for its records, whatever share of the store is its."""
    mine, theirs = part(demo(), slice(0, first), "aa-0"), part(demo(), slice(first, 48), "bb-0")
    theirs = replace(theirs, mean_l2=theirs.mean_l2 * np.float32([1, 1, 1, factor]))
    (p,) = check(mine, theirs)
    odd = "bb" if factor > 1 or first > 24 else "aa"  # of two halves the lower one is taken for right
    assert p.where == f"s/segments/{odd}-0: hidden/d30"
    assert f"all that writer {odd} has written" in p.got
    assert p.record is None


def test_small_segments_of_one_writer_count_together():
    segments = [part(demo(), slice(i, i + 4), f"aa-{i}") for i in range(0, 32, 4)]
    for i in range(32, 48, 4):
        s = part(demo(), slice(i, i + 4), f"bb-{i}")
        segments.append(replace(s, mean_l2=s.mean_l2 / 3))
    (p,) = check(*segments)
    assert p.where == f"s/segments/bb-*: hidden/{', '.join(KEYS)}"
    assert "0.3" in p.fix


def test_one_segment_of_a_writer():
    segments = [part(demo(), slice(i, i + 12), f"aa-{i}") for i in range(0, 48, 12)]
    segments[2] = replace(segments[2], mean_l2=segments[2].mean_l2 * 2)
    (p,) = check(*segments)
    assert p.where.startswith("s/segments/aa-24: ")
    assert "all that writer" not in p.got


def test_wrong_records_beside_a_wrong_writer():
    mine, theirs = part(demo(), slice(0, 24), "aa-0"), part(demo(), slice(24, 48), "bb-0")
    mean = mine.mean_l2.copy()
    mean[3] *= 2
    found = check(replace(mine, mean_l2=mean), replace(theirs, mean_l2=theirs.mean_l2 * 10))
    assert [p.record for p in found] == [None, "r3"]


def test_few_records_short_records_and_unknown_statistics():
    mean = demo().mean_l2.copy()
    mean[3] *= 3
    wrong = demo(mean_l2=mean)
    assert check(part(wrong, slice(0, levels.FEWEST_RECORDS - 1), "aa-0")) == []
    assert len(check(part(wrong, slice(0, levels.FEWEST_RECORDS), "aa-0"))) == 1
    states = wrong.states.copy()
    states[3] = levels.FEWEST_STATES - 1
    assert check(replace(wrong, states=states)) == []
    for value in (np.nan, np.inf, 0.0, -1.0):
        mean[3] = value
        assert check(demo(mean_l2=mean)) == []
    assert check(demo(mean_l2=np.full_like(mean, np.nan))) == []
    assert check() == []


def embedding_like(norms: list[float], largest: float = 0.5, records: int = 3) -> list[Problem]:
    table = SegmentNorms(
        name="aa-0",
        ids=[f"r{i}" for i in range(records)],
        states=np.full(records, 100),
        mean_l2=np.tile(np.float32(norms), (records, 1)),
        max_abs=np.tile(np.float32([largest, 30, 150, 100]), (records, 1)),
    )
    return check(table)


def test_embedding_in_an_aux_slot():  # the seed fault: captures [embed, 3, 31 | 59] with norms 1.04, 37, 174, 111
    (p,) = embedding_like([1.04, 37, 174, 111])
    assert p.where == "s: hidden/d2"
    assert "d2 1.04" in p.got
    assert "--target" in p.fix
    assert embedding_like([37, 174, 111, 1.04]) == []  # the last capture may be after a norm
    assert embedding_like([5, 37, 174, 111]) == []
    assert embedding_like([1.04, 37, 174, 111], largest=30) == []  # massive activations are not in an embedding


def test_embedding_declared_as_such_is_none():
    captures = [{**CAPTURES[0], "depth": 0}, *CAPTURES[1:]]
    contract = tiny_contract(
        captures=captures, target={"num_layers": 30}, layout={"aux": ["d0", "d15", "d27"], "last": "d30"}
    )
    mean = demo().mean_l2 * np.float32([1 / 60, 1, 1, 1])
    assert check(demo(mean_l2=mean), contract=contract) == []


@given(st.data())
def test_ordinary_spread_is_not_told(data):
    """Attention sinks of any size, lengths from 2 to 5,000 and texts whose norms differ by some per cent."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    sinks = data.draw(st.lists(st.floats(0, 5000), min_size=4, max_size=4))
    spread = data.draw(st.floats(0, 0.08))
    rows = data.draw(st.integers(1, 300))
    rng = np.random.default_rng(seed)
    states = np.exp(rng.uniform(np.log(2), np.log(5000), rows)).astype(np.int64)
    mean = np.float32([60, 150, 550, 800]) * (1 + np.outer(1 / states, sinks))
    mean = (mean * np.exp(spread * rng.standard_normal((rows, 4)))).astype(np.float32)
    norms = SegmentNorms(name="aa-0", ids=[f"r{i}" for i in range(rows)], states=states, mean_l2=mean, max_abs=mean * 9)
    cut = data.draw(st.integers(0, rows))
    pieces = [part(norms, slice(0, cut), "aa-0"), part(norms, slice(cut, rows), "bb-0")]
    assert check(*(p for p in pieces if len(p.states))) == []


# Whole stores.


def write(path: Path, odd: int | None = None) -> Path:
    with hs.create(path, tiny_contract()) as writer:
        for i in range(24):
            record = tiny_record(writer.contract, f"r{i}", tokens=40, seed=i)
            if i == odd:
                record.hidden.update({k: h * 16 for k, h in record.hidden.items()})
            writer.append(record)
    return path


@pytest.mark.parametrize("level", [Level.SAMPLE, Level.FULL])
def test_store_with_a_scaled_record_is_valid_with_a_warning(tmp_path, level):
    assert run(write(tmp_path / "good"), level=level).problems == []
    report = run(write(tmp_path / "odd", odd=5), level=level)
    assert [(p.code, p.record) for p in report.problems] == [("HS203", "r5")]
    assert report.to_dict()["valid"]
    assert run(tmp_path / "odd", level=Level.METADATA).problems == []  # which reads no array


def test_annotations_of_github_actions(tmp_path):
    result = CliRunner().invoke(app, ["validate", str(write(tmp_path / "s", odd=5)), "--format", "github"])
    (line,) = result.output.splitlines()
    assert result.exit_code == 0
    assert line.startswith("::warning title=HS203 norm-outlier::")
    assert "record 'r5'" in line


def test_sample_reads_the_norms_of_a_bounded_number_of_segments(tmp_path, monkeypatch):
    with hs.create(tmp_path / "s", tiny_contract()) as writer:
        for i in range(24):
            writer.append(tiny_record(writer.contract, f"r{i}", tokens=40, seed=i))
            writer.flush()
    read: list[str] = []
    real = SegmentCheck.norms
    monkeypatch.setattr(SegmentCheck, "norms", lambda self: read.append(self.commit.name) or real(self))
    monkeypatch.setattr("hsformat.validate.NORM_SEGMENTS", 6)
    monkeypatch.setattr("hsformat.validate.SAMPLE_SEGMENTS", 3)
    for level, count in ((Level.METADATA, 0), (Level.SAMPLE, 7), (Level.FULL, 24)):
        read.clear()
        assert run(tmp_path / "s", level=level).problems == []
        assert len(set(read)) == len(read) == count, level


def test_statistics_that_cannot_be_read_are_told_once(tmp_path):
    store = write(tmp_path / "s", odd=5)
    path = next((store / "segments").glob("*-0")) / "stats" / "d2" / "c" / "0" / "0"
    path.write_bytes(path.read_bytes()[:-1])
    for level in (Level.SAMPLE, Level.FULL):
        assert [p.code for p in run(store, level=level).problems] == ["HS505", "HS203"]


def test_mean_norms_are_those_of_the_states(tmp_path):  # rule G-10
    store = write(tmp_path / "s")
    rewrite_array(store, "stats/d2", lambda s: s * np.float32([1.0005, 1]))
    assert run(store, level=Level.FULL).problems == []
    rewrite_array(store, "stats/d2", lambda s: s * np.float32([1.01, 1]))
    for level in (Level.SAMPLE, Level.FULL):
        found = run(store, level=level).problems
        assert [p.code for p in found] == ["HS504"] * 4
        assert all("mean L2 norm" in p.got for p in found)
