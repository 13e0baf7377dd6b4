"""The driver with extractors that misbehave: nothing is lost, nothing silent, everything is said."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from factories import tiny_contract, tiny_record
from fake_extractor import CONTRACT, REQUEST, Fake, answer, run, sample

import hsformat as hs
from hsformat.maintain import repair_store
from hsformat.problems import Severity, problem
from hsformat.record import Generation, Provenance, Record, TokenSample
from hsformat.store.pending import Pending


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "data.hs.zarr"


def test_all_records_once_and_a_second_run_has_nothing_to_do(out):
    fake = Fake()
    report = run(fake, map(sample, range(5)), out)
    assert (report.written, report.skipped, report.exit_code) == (5, 0, 0)
    assert report.tokens == 30
    again = Fake()
    report = run(again, map(sample, range(5)), out)
    assert (report.written, report.skipped, report.exit_code) == (0, 5, 0)
    assert (again.loaded, fake.loaded, fake.closed) == (0, 1, 1)
    store = hs.open(out)
    assert list(store.ids) == [f"s{i}" for i in range(5)]
    assert store.segments[0].producer == {"name": "fake"}


def test_resume_goes_on(out):
    run(Fake(), map(sample, range(3)), out)
    report = run(Fake(), map(sample, range(8)), out)
    assert (report.written, report.skipped) == (5, 3)
    assert sorted(hs.open(out).ids) == [f"s{i}" for i in range(8)]


def test_a_record_that_no_segment_holds_does_not_take_others_with_it(out, monkeypatch):
    monkeypatch.setattr(Pending, "excess", lambda self, row: "too much" if row.id == "s2" else None)
    with pytest.raises(hs.StoreError, match="HS501"):
        run(Fake(), map(sample, range(4)), out)
    assert hs.open(out).ids == ["s0", "s1"]


def test_one_nan_record_is_quarantined_and_99_are_committed(out):  # SpecForge#104
    class Nan(Fake):
        def one(self, s):
            if s.id != "s17":
                return answer(s)
            h = np.ones((6, 8), ml_dtypes.bfloat16)
            h[2, 1] = np.nan
            return answer(s, hidden={"d2": h})

    report = run(Nan(), map(sample, range(100)), out)
    assert (report.written, dict(report.quarantined), report.exit_code) == (99, {"HS201": 1}, 1)
    (line,) = [json.loads(x) for x in report.quarantine_path.read_text().splitlines()]
    assert line["id"] == "s17"
    assert "hidden['d2'] token 2" in line["problems"][0]["where"]
    report = run(Fake(), map(sample, range(100)), out)  # the next run tries it again
    assert (report.written, report.skipped, report.quarantine_path) == (1, 99, None)


def test_the_quarantine_quotes_single_tokens_and_no_text(out):
    """SECURITY.md says so: a long conversation leaves one id and two numbers there."""
    long = TokenSample(id="s", input_ids=np.arange(4000, dtype=np.int32) % 97, loss_mask=np.ones(4000, np.uint8))

    class Other(Fake):
        def one(self, s):
            ids = s.input_ids.copy()
            ids[3000] = 98
            return answer(s, input_ids=ids)

    report = run(Other(), [long], out)
    text = report.quarantine_path.read_text()
    assert dict(report.quarantined) == {"HS206": 1}
    assert len(text) < 1000
    assert "3000" in text


def test_engine_that_returns_32_of_70(out):  # speculators PR#365
    class Lossy(Fake):
        def one(self, s):
            return answer(s) if int(s.id[1:]) < 32 else None

    report = run(Lossy(), map(sample, range(70)), out)
    assert (report.written, dict(report.quarantined), report.exit_code) == (32, {"HS102": 38}, 1)


def test_records_in_any_order_are_matched_by_id(out):  # speculators PR#365: sorted as req_0, req_1, req_10, ...
    class Shuffled(Fake):
        def extract(self, samples, *, stopping):
            yield from (answer(s) for s in sorted(samples, key=lambda s: s.id))

    assert run(Shuffled(), map(sample, range(12)), out).exit_code == 0
    store = hs.open(out)
    for i in range(12):
        assert store[f"s{i}"].input_ids.tolist() == sample(i).input_ids.tolist()


def test_rows_of_another_request(out):  # speculators#279
    class Swapped(Fake):
        def one(self, s):
            return answer(s, input_ids=(s.input_ids + 1) % 100)

    report = run(Swapped(), map(sample, range(2)), out)
    assert (report.written, dict(report.quarantined)) == (0, {"HS206": 2})


def test_prefix_cache_gives_fewer_rows(out):  # vllm#44485
    class Cached(Fake):
        def one(self, s):
            return answer(s, hidden={k: np.ones((4, 8), ml_dtypes.bfloat16) for k in CONTRACT.keys})

    report = run(Cached(), [sample(0)], out)
    assert (report.written, dict(report.quarantined)) == (0, {"HS101": 1})


def test_records_that_nobody_asked_for(out):
    class Eager(Fake):
        def one(self, s):
            return answer(s, id="unasked")

    report = run(Eager(), [sample(0)], out)
    assert dict(report.quarantined) == {"HS206": 1, "HS102": 1}


GREEDY = replace(REQUEST, generation=Generation(mode="greedy", max_new_tokens=4))


def written(s: TokenSample, *new: int, **changes: Any) -> Record:
    """Return the record of a sample whose answer the target wrote."""
    ids = np.append(s.input_ids, new)
    mask = np.array([0] * len(s) + [1] * len(new), np.uint8)
    changes.setdefault("provenance", Provenance(generation=GREEDY.generation))
    return tiny_record(CONTRACT, **{"id": s.id, "tokens": len(ids), "input_ids": ids, "loss_mask": mask, **changes})


class Writes(Fake):
    def one(self, s):
        return written(s, 7, 8)


def test_generated_records(out):
    report = run(Writes(), map(sample, range(3)), out, request=GREEDY)
    assert (report.written, report.exit_code) == (3, 0)
    record = hs.open(out)["s1"]
    assert record.loss_mask.tolist() == [0] * 6 + [1, 1]
    assert record.source_digest == sample(1).source_digest


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (lambda s: written(s), "HS206"),
        (lambda s: written(s, 1, 2, 3, 4, 5), "HS206"),
        (lambda s: written(s, 7, input_ids=np.append([99], s.input_ids)), "HS206"),
        (lambda s: written(s, 7, loss_mask=np.ones(7, np.uint8)), "HS110"),
        (lambda s: written(s, 7, 8, loss_mask=np.array([0] * 7 + [1], np.uint8)), "HS110"),
        (lambda s: written(s, 7, provenance=Provenance()), "HS604"),
        (
            lambda s: written(s, 7, provenance=Provenance(generation=Generation(mode="greedy", max_new_tokens=9))),
            "HS604",
        ),
    ],
)
def test_generated_record_that_is_not_what_was_asked(out, bad, code):
    class Bad(Fake):
        def one(self, s):
            return bad(s)

    report = run(Bad(), [sample(0)], out, request=GREEDY)
    assert (report.written, dict(report.quarantined)) == (0, {code: 1})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"loss_mask": np.roll(sample(0).loss_mask, -1)}, "HS110"),  # SpecForge#885, by an extractor
        ({"loss_mask": np.ones(6, np.uint8)}, "HS110"),
        ({"position_ids": np.arange(6) + 1}, "HS106"),
        ({"provenance": Provenance(generation=Generation(mode="greedy", max_new_tokens=1))}, "HS604"),
        ({"hidden": {"d2": np.ones((6, 8), np.float16)}}, "HS207"),
    ],
)
def test_record_that_is_not_what_was_asked(out, changes, code):
    class Bad(Fake):
        def one(self, s):
            record = answer(s)
            return answer(s, **{"loss_mask": record.loss_mask, **changes})

    report = run(Bad(), [sample(0)], out)
    assert (report.written, dict(report.quarantined)) == (0, {code: 1})


def test_lost_row_cannot_be_excused_as_generated(out):
    class Short(Fake):
        def one(self, s):
            states = {k: np.ones((5, 8), ml_dtypes.bfloat16) for k in CONTRACT.keys}
            return answer(s, hidden=states, provenance=Provenance(generation=GREEDY.generation))

    assert dict(run(Short(), [sample(0)], out).quarantined) == {"HS604": 1}


def test_driver_sets_the_source_digest(out):
    class Forgets(Fake):
        def one(self, s):
            return answer(s, source_digest=None)

    run(Forgets(), [sample(0)], out)
    assert hs.open(out)["s0"].source_digest == sample(0).source_digest


def test_resume_with_other_generation(out):  # NeMo Automodel PR#2478: another seed
    run(Writes(), [sample(0)], out, request=GREEDY)
    other = replace(REQUEST, generation=Generation(mode="sampled", max_new_tokens=8, temperature=0.9, seed=3))
    report = run(Writes(), [sample(0)], out, request=other)
    assert (report.skipped, dict(report.quarantined), report.exit_code) == (0, {"HS507": 1}, 1)
    lines = report.quarantine_path.read_text()
    assert all(f"generation.{name}" in lines for name in ("mode", "max_new_tokens", "temperature", "seed"))


def test_two_runs_into_one_store_at_once(out):
    class Bad(Fake):
        def one(self, s):
            return answer(s, loss_mask=1 - s.loss_mask)

    class Inner(Bad):
        def extract(self, samples, *, stopping):  # another run, begun and ended while this one is under way
            inner = run(Bad(), [sample(7)], out)
            assert "s7" in inner.quarantine_path.read_text()
            self.inner = inner.quarantine_path
            yield from super().extract(samples, stopping=stopping)

    fake = Inner()
    report = run(fake, [sample(0)], out)
    assert report.quarantine_path != fake.inner
    assert "s0" in report.quarantine_path.read_text()
    assert "s7" in fake.inner.read_text()


def test_two_runs_of_the_same_data_at_once_are_found_out(out):
    class Inner(Fake):
        def extract(self, samples, *, stopping):  # another run of the same data, begun and ended meanwhile
            self.inner = run(Fake(), map(sample, range(3)), out)
            yield from super().extract(samples, stopping=stopping)

    fake = Inner()
    report = run(fake, map(sample, range(5)), out)
    assert fake.inner.exit_code == 0
    assert (report.exit_code, [p.code for p in report.problems]) == (1, ["HS107"])
    assert "3 id(s) in both" in report.problems[0].got
    assert f"hsformat repair --dedupe {report.problems[0].where.partition(': ')[0]}" in report.problems[0].fix
    assert run(Fake(), map(sample, range(5)), out).exit_code == 1  # as long as they are there
    assert repair_store(out, dedupe=True).lost == []  # as the fix says
    report = run(Fake(), map(sample, range(5)), out)
    assert (report.exit_code, sorted(hs.open(out).ids)) == (0, [f"s{i}" for i in range(5)])


def test_records_of_mixed_origin_are_reported(out):
    run(Fake(), [sample(0)], out)
    report = run(Writes(), [sample(1)], out, request=GREEDY)
    assert (report.exit_code, report.written) == (0, 1)
    assert [(p.code, p.severity) for p in report.problems] == [("HS507", Severity.WARNING)]


def test_store_that_another_process_made_meanwhile(out):
    class Late(Fake):
        def load(self, request):
            hs.create(out, CONTRACT).close()

    assert run(Late(), [sample(0)], out).written == 1
    assert list(hs.open(out).ids) == ["s0"]


def test_engine_that_dies_leaves_what_is_whole(out):
    class Dies(Fake):
        def one(self, s):
            if s.id == "s3":
                raise RuntimeError("engine is gone")
            return answer(s)

    fake = Dies()
    with pytest.raises(hs.ResolveError) as e:
        run(fake, map(sample, range(5)), out)
    assert "engine is gone" in e.value.problems[0].got
    assert fake.closed
    assert list(hs.open(out).ids) == ["s0", "s1", "s2"]


def test_target_that_cannot_be_loaded_leaves_no_store(out):
    class Broken(Fake):
        def load(self, request):
            raise hs.ForeignFileError(problem("HS602", where="model", got="x", expected="y"))

    with pytest.raises(hs.ForeignFileError):
        run(Broken(), [sample(0)], out)
    assert not out.exists()


def test_nothing_to_extract_makes_no_store_and_loads_no_model(out):
    fake = Fake()
    assert run(fake, [], out).exit_code == 0
    assert (fake.loaded, out.exists()) == (0, False)


def test_output_path_that_holds_something_else_is_refused_before_the_model_is_loaded(out):
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    fake = Fake()
    with pytest.raises(hs.StoreError) as e:
        run(fake, [sample(0)], out)
    assert ([p.code for p in e.value.problems], fake.loaded) == (["HS501"], 0)
    assert os.listdir(out) == ["thesis.txt"]


def test_resume_with_another_contract_is_refused_field_by_field(out):  # NeMo Automodel PR#2478
    run(Fake(), [sample(0)], out)
    other = tiny_contract(codec="fast", target={"basis_digest": f"sha256:{'9' * 64}", "name": "moved"})
    with pytest.raises(hs.ContractMismatch) as e:
        run(Fake(), [sample(1)], out, contract=other)
    assert {p.code for p in e.value.problems} == {"HS507"}
    assert {p.where.split(": ")[-1] for p in e.value.problems} == {"codec", "target.basis_digest"}
    assert len(hs.open(out)) == 1


def test_a_moved_target_is_a_note(out):
    run(Fake(), [sample(0)], out)
    report = run(Fake(), [sample(1)], out, contract=tiny_contract(target={"name": "moved"}))
    assert report.exit_code == 0
    assert [(p.code, p.severity) for p in report.problems] == [("HS507", Severity.NOTE)]


def test_resume_with_other_data_under_the_same_id(out):  # NeMo Automodel PR#3396, SpecForge PR#115
    run(Fake(), [sample(0), sample(1)], out)
    changed = TokenSample(id="s1", input_ids=sample(5).input_ids, loss_mask=sample(1).loss_mask)
    report = run(Fake(), [sample(0), changed], out)
    assert (report.skipped, dict(report.quarantined), report.exit_code) == (1, {"HS507": 1}, 1)


def test_same_id_twice_in_the_data(out):
    class Late(Fake):
        def extract(self, samples, *, stopping):
            yield from [answer(s) for s in samples]

    report = run(Late(), [sample(0), sample(0)], out)
    assert (report.written, dict(report.quarantined)) == (1, {"HS107": 1})


def test_commit_by_time(out):
    class Watch(Fake):
        def one(self, s):
            if s.id == "s3":
                assert len(hs.open(out)) == 3
            return answer(s)

    run(Watch(), map(sample, range(5)), out, commit_seconds=0)


def test_listener_sees_every_record(out):
    seen = []
    run(Fake(), map(sample, range(4)), out, listener=lambda r: seen.append(r.written))
    assert seen == [1, 2, 3, 4, 4]
