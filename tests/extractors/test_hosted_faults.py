"""Engines that misbehave in every way that was reported: each is caught, with its code, and nothing else is lost.

What they say is looked at here, so that they run in this process; ``test_hosted_deaths`` is about the child process.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toys import GIVEN, GREEDY, request_for, samples, toy

from hsformat.extraction.protocol import Rejected
from hsformat.problems import HsError
from hsformat.record import Record

LENGTHS = (5, 7, 9, 7, 3)
"""Of the samples; the faults are those of the two with 7 tokens."""


@pytest.fixture
def staging(tmp_path):
    """Return a folder to stage in, which is empty at the end."""
    folder = tmp_path / "staging"
    yield folder
    assert list(folder.iterdir()) == []


def run(driver, staging, *keys, generation=GIVEN, lengths=LENGTHS, **options):
    """Load and extract; return what came by id, and what the run died of."""
    extractor = toy(driver, direct=True)()
    request = request_for(*keys, generation=generation, staging=staging, **options)
    assert not [p for p in extractor.preflight(request) if p.severity == "error"]
    out, died = {}, None
    try:
        extractor.load(request)
        for found in extractor.extract(samples(*lengths, prompt=generation is not GIVEN)):
            rejected = isinstance(found, Rejected)
            out[found.sample.id if rejected else found.id] = found
    except HsError as e:
        died = e
    finally:
        extractor.close()
    return out, died


def codes(found):
    return [p.code for p in found.problems]


@pytest.mark.parametrize(
    ("driver", "keys", "wanted"),
    [
        ("SwapsNeighbours", ("d2", "d4"), {"HS206"}),  # speculators#279
        ("LeaksBetweenCalls", ("d2", "d4"), {"HS206"}),  # speculators#279
        ("RowOfNeighbour", ("d0", "d4"), {"HS206"}),  # sglang#26163
        ("RowOfNeighbour", ("d4", "d6"), {"HS206"}),
        ("ShiftedRows", ("d0", "d4"), {"HS206"}),
        ("ShiftedRows", ("d4", "d8"), {"HS206"}),
        ("CachedPrefix", ("d4",), {"HS101"}),  # sglang#4997, vllm#44485
        ("ForgetsResidual", ("d4", "d8"), {"HS206"}),  # nnsight#337
        ("LayerBefore", ("d1", "d4"), {"HS204"}),  # vllm PR#43671
        ("RepeatsALayer", ("d2", "d4", "d6"), {"HS204"}),
        ("NormedLast", ("d4", "d8"), {"HS205"}),  # transformers#13461
        ("ZeroRows", ("d4", "d8"), {"HS202"}),
        ("NanRow", ("d4", "d8"), {"HS201"}),
        ("OtherDtype", ("d4",), {"HS207"}),
        ("OneSlotOfThree", ("d2", "d4", "d8"), {"HS109"}),  # sglang PR#39644, vllm PR#45985
        ("MatchedByName", ("d4",), {"HS101"}),  # speculators PR#365
    ],
)
def test_states_that_are_not_the_requests_end_the_run_before_the_first_record(driver, keys, wanted, staging):
    out, died = run(driver, staging, *keys)
    assert out == {}
    assert wanted <= set(codes(died))


def test_the_proof_tells_a_fault_of_all_its_requests_once_for_each_capture(staging):
    _, died = run("OtherDtype", staging, "d4", "d8")
    assert [(p.code, p.where, p.record) for p in died.problems] == [
        ("HS207", "proof of the engine: hidden['d4']", None), ("HS207", "proof of the engine: hidden['d8']", None)
    ]  # fmt: skip
    assert all(p.got.endswith(", and 31 more requests") for p in died.problems)
    assert "proof-" not in str(died)


def test_answers_that_the_target_did_not_write_are_found_by_the_proof(staging):
    out, died = run("LayerBefore", staging, "d4", "d8", generation=GREEDY)
    assert (out, set(codes(died))) == ({}, {"HS206"})


@pytest.mark.parametrize(
    ("driver", "code", "options"),
    [
        ("CachedLater", "HS101", {}),  # sglang#4997, vllm#44485: rows 5 and 4 for lengths 5 and 7
        ("NoRows", "HS102", {}),
        ("OtherIds", "HS206", {}),  # vllm#56417
        ("Faults", "HS102", {}),
        ("BreaksAFile", "HS602", {}),
    ],
)
def test_only_the_records_that_are_wrong_fail(driver, code, options, staging):
    out, died = run(driver, staging, **options)
    assert died is None
    assert {i: codes(f) for i, f in out.items() if isinstance(f, Rejected)} == {"s1": [code], "s3": [code]}
    good, _ = run("Honest", staging)
    for i in ("s0", "s2", "s4"):
        assert isinstance(out[i], Record)
        for key, h in out[i].hidden.items():
            np.testing.assert_array_equal(h, good[i].hidden[key])


@pytest.mark.parametrize("driver", ["FewerRowsOnce", "FaultsOnce", "FaultsInTheProof"])
def test_another_try_gives_the_record(driver, staging):
    out, died = run(driver, staging)
    assert died is None
    assert {i: type(f) for i, f in out.items()} == {f"s{i}": Record for i in range(len(LENGTHS))}


def test_rows_of_the_last_chunk_alone_are_no_record(staging):  # vllm PR#39949, vLLM-Hook#22, PR#52074
    out, died = run("LastChunkAlone", staging, "d4", lengths=(500, 100, 129))
    assert died is None
    assert codes(out["s0"]) == codes(out["s2"]) == ["HS101"]
    assert out["s0"].problems[0].got == "rows: 116 of each capture"
    assert out["s1"].num_states == 100
    out, _ = run("Honest", staging, "d4", lengths=(500,))
    assert out["s0"].num_states == 500


@pytest.mark.parametrize(
    ("driver", "code"),
    [
        ("TruncatesAnswers", "HS101"),  # sglang#26163, PR#28496
        ("EndsEarly", "HS206"),
        ("GoesOn", "HS206"),
        ("SaysNothing", "HS103"),
    ],
)
def test_answers_that_are_none_are_rejected(driver, code, staging):
    out, died = run(driver, staging, "d4", generation=GREEDY)
    assert died is None
    assert {i: codes(f) for i, f in out.items()} == {f"s{i}": [code] for i in range(len(LENGTHS))}


def test_a_prompt_that_is_cut_is_no_record(staging):
    out, _ = run("CutsPrompts", staging, "d4")
    assert {i for i, f in out.items() if isinstance(f, Rejected)} == {"s1", "s2", "s3"}
    assert codes(out["s1"]) == ["HS206"]


def test_the_mask_follows_from_the_engines_ids(staging):  # speculators PR#729, #774, #794
    out, _ = run("Honest", staging, "d4", generation=GREEDY)
    for sample in samples(*LENGTHS):
        record, n = out[sample.id], len(sample)
        assert record.input_ids[:n].tolist() == sample.input_ids.tolist()
        assert record.loss_mask.tolist() == [0] * n + [1] * (record.num_tokens - n)
        assert record.num_states == record.num_tokens - 1
        assert record.provenance.generation == GREEDY


def test_answers_in_the_order_of_their_names_are_stored_by_id(staging):  # speculators PR#365
    lengths = (*range(2, 14),) * 6
    out, died = run("ByNameOfRequest", staging, "d0", lengths=lengths)
    good, _ = run("Honest", staging, "d0", lengths=lengths)
    assert died is None
    assert list(out) != list(good)
    assert sorted(out) == sorted(good)
    for i, record in out.items():
        np.testing.assert_array_equal(record.hidden["d0"], good[i].hidden["d0"])


def test_requests_that_are_never_answered_end_the_run_and_are_counted(staging):  # speculators PR#365
    out, died = run("OnlyThirtyTwo", staging, "d4", lengths=(3,) * 100, window=64)
    assert len(out) == 32
    (found,) = died.problems
    assert (found.code, found.got.split(",")[0]) == ("HS102", "missing 32 of 64 answers")


@pytest.mark.parametrize(("driver", "got"), [("AnswersTwice", "a second answer"), ("AnswersOthers", "was not made")])
def test_an_answer_that_nobody_asked_for_ends_the_run(driver, got, staging):
    _, died = run(driver, staging, "d4")
    assert codes(died) == ["HS206"]
    assert got in died.problems[0].got


def test_bfloat16_is_kept_bit_by_bit(staging):
    extractor = toy("Honest", direct=True)()
    request = request_for("d2", "d8", staging=staging)
    target = request.target.model_copy(update={"dtype": "bfloat16"})
    extractor.load(dataclasses.replace(request, target=target))
    found = {r.id: r for r in extractor.extract(samples(*LENGTHS))}
    extractor.close()
    exact, _ = run("Honest", staging, "d2", "d8")
    for i, record in found.items():
        for key, h in record.hidden.items():
            assert h.dtype.name == "bfloat16"
            np.testing.assert_array_equal(h, exact[i].hidden[key].astype(h.dtype))


def test_no_file_outside_the_staging_folder_is_read(staging):
    out, _ = run("NamesAnotherPlace", staging, "d4")
    assert {c for f in out.values() for c in codes(f)} == {"HS602"}
