"""The rules of a record: each broken on its own gives its own code, and all are reported together."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from factories import tiny_contract, tiny_record
from pydantic import ValidationError

from hsformat.checks import check_record, token_range_problem
from hsformat.dtypes import numpy_dtype
from hsformat.problems import InvalidRecord, Problem, Severity
from hsformat.record import Generation, Provenance, Record
from hsformat.scan import BLOCK_BYTES, to_stored

C = tiny_contract()


def check(record: Record, contract=C) -> list[Problem]:
    return check_record(contract, record)[0]


def codes(record: Record, contract=C) -> list[str]:
    return [p.code for p in check(record, contract)]


def test_valid_record_has_no_problem_and_exact_stats():
    record = tiny_record(C)
    problems, stats = check_record(C, record)
    assert problems == []
    h = record.hidden["d2"].astype(np.float64)
    assert stats["d2"].mean_l2 == pytest.approx(np.linalg.norm(h, axis=1).mean(), rel=1e-5)
    assert stats["d2"].max_abs == np.abs(h).max()


def test_mask_5147_for_4095_states():  # the seed fault
    (p,) = check(tiny_record(C, tokens=4095, loss_mask=np.ones(5147, np.uint8)))
    assert (p.code, p.got, p.severity, p.record) == ("HS101", "5147", Severity.ERROR, "r0")
    assert "4095" in p.expected


@pytest.mark.parametrize("shape", [(3, 7), (3, 6), (1, 7), (7, 1), (7, 3), (6,), (8,), ()])
def test_positions_are_one_a_token(shape):  # sglang PR#34154, vllm PR#10388, speculators PR#733: M-RoPE's [3, T]
    (p,) = check(tiny_record(C, position_ids=np.zeros(shape, np.int64)))
    assert (p.code, p.got, p.expected) == ("HS106", f"shape {list(shape)}", "[7]")


def test_states_100_mask_120_is_never_sliced():  # speculators PR#871
    (p,) = check(tiny_record(C, tokens=100, loss_mask=np.ones(120, np.uint8)))
    assert p.code == "HS101"
    assert {"120", "100, the number of input_ids"} == {p.got, p.expected}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"loss_mask": np.zeros(7, np.uint8)}, "HS103"),
        ({"loss_mask": np.full(7, 2)}, "HS104"),
        ({"loss_mask": np.ones(7)}, "HS104"),
        ({"input_ids": np.full(7, -100)}, "HS105"),
        ({"input_ids": np.full(7, 100)}, "HS105"),
        ({"input_ids": np.ones(7)}, "HS105"),
        ({"input_ids": np.ones((1, 7), int)}, "HS101"),
        ({"position_ids": np.arange(6)}, "HS106"),
        ({"position_ids": np.arange(7)[::-1]}, "HS106"),
        ({"position_ids": np.arange(7) - 1}, "HS106"),
        ({"position_ids": np.arange(7.0)}, "HS106"),
        ({"position_ids": np.arange(7, dtype=np.uint64) + np.uint64(2**63)}, "HS106"),
        ({"position_ids": np.arange(7, dtype=np.uint8)[::-1]}, "HS106"),
        ({"source_digest": "banana"}, "HS604"),
        ({"source_digest": f"sha256:{'A' * 64}"}, "HS604"),
        ({"source_digest": f"sha256:{'a' * 64}\n"}, "HS604"),
        ({"source_digest": 7}, "HS604"),
        ({"provenance": {"generation": {"mode": "none"}}}, "HS604"),
        ({"id": ""}, "HS107"),
        ({"id": "x" * 1025}, "HS107"),
        ({"id": "\ud800"}, "HS107"),
        ({"hidden": {"d9": np.ones((7, 8), np.float32)}}, "HS109"),
        ({"hidden": {"d2": np.ones((7, 9), np.float32)}}, "HS409"),
        ({"hidden": {"d2": np.ones((6, 8), np.float32)}}, "HS101"),
        ({"hidden": {"d2": np.ones((1, 7, 8), np.float32)}}, "HS101"),
        ({"hidden": {"d2": np.ones((7, 8), np.int32)}}, "HS207"),
        ({"fields": {"weights": np.ones(7)}}, "HS109"),
    ],
)
def test_one_fault_one_code(changes, code):
    assert set(codes(tiny_record(C, **changes))) == {code}


def test_missing_capture_is_named():
    record = tiny_record(C)
    del record.hidden["d3"]
    (p,) = check(record)
    assert p.code == "HS109"
    assert p.expected.startswith("d3")


def test_all_problems_are_returned():
    record = tiny_record(C, loss_mask=np.full(8, 3), input_ids=np.full(7, 100), position_ids=np.arange(3))
    assert codes(record) == ["HS105", "HS101", "HS106"]


def test_a_generated_record_may_lack_the_last_state():
    h = {k: np.ones((6, 8), np.float32) for k in C.keys}
    assert "HS101" in codes(tiny_record(C, hidden=h))
    generated = Provenance(generation=Generation(mode="greedy", max_new_tokens=4))
    assert codes(tiny_record(C, hidden=h, provenance=generated)) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_names_record_capture_and_token(value):  # speculators PR#615, PR#966
    h = np.ones((40, 8), ml_dtypes.bfloat16)
    h[17, 3] = value
    (p,) = check(tiny_record(C, tokens=40, hidden={"d2": h}))
    assert p.code == "HS201"
    assert p.where == "record 'r0': hidden['d2'] token 17 channel 3"


def test_scan_in_blocks_finds_the_same(monkeypatch):
    h = np.ones((40, 8), np.float32)
    h[17, 3], h[39, 0] = np.nan, np.inf
    record = tiny_record(C, tokens=40, hidden={"d2": h})
    whole = check(record)
    monkeypatch.setattr("hsformat.scan.BLOCK_BYTES", 4 * 8 * 3)
    assert check(record) == whole
    assert "2 such value(s)" in whole[0].got


def test_the_memory_of_a_scan_does_not_grow_with_the_record():  # speculators PR#615: in chunks
    """64 MB of states, and at most a few blocks beside them."""
    h = np.ones((4096, 8192), ml_dtypes.bfloat16)
    c = tiny_contract(target={"hidden_size": 8192})
    record = tiny_record(c, tokens=4096, hidden=dict.fromkeys(c.keys, h))  # the same array, so that it is there once
    tracemalloc.start()
    assert check(record, c) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * BLOCK_BYTES < h.nbytes


def test_all_zero_states_of_unwritten_slots():  # vllm PR#46301, speculators#613
    h = np.ones((1000, 8), np.float32)
    h[:10] = 0
    (note,) = check(tiny_record(C, tokens=1000, hidden={"d1": h}))
    assert (note.code, note.severity) == ("HS202", Severity.NOTE)
    assert "10 of 1000" in note.got
    h[10] = 0
    (error,) = check(tiny_record(C, tokens=1000, hidden={"d1": h}))
    assert (error.code, error.severity) == ("HS202", Severity.ERROR)
    (error,) = check(tiny_record(C, tokens=1000, hidden={"d3": h * 0}))  # one slot of four, all of it
    assert (error.code, error.severity, error.where) == ("HS202", Severity.ERROR, "record 'r0': hidden['d3']")


def test_zero_rows_of_the_embedding_are_a_note_unless_all_are():
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (0, 1, 2, 3, 4)]
    c = tiny_contract(captures=captures)
    h = np.ones((7, 8), np.float32)
    h[1:] = 0
    (note,) = check(tiny_record(c, hidden={"d0": h}), c)
    assert (note.code, note.severity) == ("HS202", Severity.NOTE)
    (error,) = check(tiny_record(c, hidden={"d0": h * 0}), c)
    assert (error.code, error.severity) == ("HS202", Severity.ERROR)
    (error,) = check(tiny_record(c, hidden={"d1": h}), c)
    assert (error.code, error.severity) == ("HS202", Severity.ERROR)


def nearest_bfloat16(x: float) -> float:
    """Round a number once, to nearest, ties to even, in exact arithmetic."""
    if x == 0 or not np.isfinite(x):
        return x
    unit = Fraction(2) ** (max(int(np.frexp(x)[1]), -125) - 8)
    units = Fraction(x) / unit
    y = float(np.copysign(float(round(units) * unit), x))  # round() of a fraction is to even
    return y if abs(y) < 2.0**128 else float(np.copysign(np.inf, x))


@pytest.mark.parametrize("order", ["<", ">"])
def test_float64_is_rounded_once(order):  # rule R-12
    rng = np.random.default_rng(0)
    near = 1 + rng.integers(0, 256, 500) / 256 + rng.choice([-1, 0, 1], 500) * 2.0 ** -rng.integers(20, 52, 500)
    values = np.concatenate([
        [1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, np.inf, -np.inf, 3.4e38, 1e300, 5e-324, 2.0**-134],
        near * 2.0 ** rng.integers(-140, 120, 500) * rng.choice([-1, 1], 500),
        rng.standard_normal(100),
    ])  # fmt: skip
    array = np.resize(values, (77, 8)).astype(f"{order}f8")
    stored = to_stored(C.capture("d2"), array)
    assert stored[0, 0] == 1.0078125
    wanted = np.array([nearest_bfloat16(float(x)) for x in array.ravel()]).reshape(array.shape)
    np.testing.assert_array_equal(stored.astype(np.float64), wanted)
    np.testing.assert_array_equal(np.signbit(stored), np.signbit(wanted))
    assert np.isnan(to_stored(C.capture("d2"), np.full((1, 8), np.nan))).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("stored", ["float16", "float32", "bfloat16"])
def test_any_conversion_is_the_one_of_exact_arithmetic(dtype, stored):
    rng = np.random.default_rng(1)
    array = (rng.standard_normal((50, 8)) * 2.0 ** rng.integers(-12, 12, (50, 8))).astype(numpy_dtype(dtype))
    captures = [{"depth": 4, "norm": "none", "dtype": stored}]
    capture = tiny_contract(captures=captures, layout={"aux": ["d4"], "last": None}).capture("d4")
    wanted = array.astype(np.float64)
    if stored == "bfloat16":
        wanted = np.vectorize(nearest_bfloat16)(wanted)
    else:
        wanted = wanted.astype(stored).astype(np.float64)  # the hardware, or NumPy, rounds once
    np.testing.assert_array_equal(to_stored(capture, array).astype(np.float64), wanted)


def test_token_range_names_the_first_place():
    assert token_range_problem([0, 99], 100, where="x") is None
    assert token_range_problem([], 100, where="x") is None
    p = token_range_problem([5, 100, -1], 100, where="row 3: input_ids", record="a")
    assert p is not None
    assert (p.code, p.where, p.got, p.expected, p.record) == (
        "HS105", "row 3: input_ids[1]", "100 (2 such token(s))", "0 <= id < 100", "a",
    )  # fmt: skip


def test_bfloat16_target_overflows_float16():  # elk#208
    captures = [{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)]
    half = tiny_contract(captures=captures)
    h = np.full((7, 8), 7e4, ml_dtypes.bfloat16)
    assert codes(tiny_record(half, hidden={"d2": h}), half) == ["HS207"]
    assert codes(tiny_record(C, hidden={"d2": h})) == []
    h = np.full((7, 8), 3.4e38, np.float32)  # finite, and rounds to infinity in bfloat16
    assert codes(tiny_record(C, hidden={"d2": h})) == ["HS207"]


def test_float8_without_scales():  # vllm PR#39160; speculators PR#461, PR#491, PR#1028: not offered, README, Limits
    h = np.ones((7, 8), ml_dtypes.float8_e4m3fn)
    assert codes(tiny_record(C, hidden={"d2": h})) == ["HS207"]


def test_a_quantised_cache_says_nothing_of_the_states():  # vllm PR#39160: the capture took the cache's dtype
    """What the target's weights and cache are is one fact, the dtype of each capture another."""
    c = tiny_contract(target={"quantization": "fp8"})
    assert {capture.dtype for capture in c.captures} == {"bfloat16"}
    assert check(tiny_record(c), c) == []
    with pytest.raises(ValidationError, match="float8"):
        tiny_contract(captures=[{"depth": 2, "norm": "none", "dtype": "float8_e4m3fn"}])


@pytest.mark.parametrize("hidden", [None, [np.ones((7, 8))], np.ones((4, 7, 8))])
def test_captures_without_names(hidden):  # speculators#705: slots have names
    with pytest.raises(InvalidRecord) as e:
        Record(id="r0", input_ids=[1], loss_mask=[1], hidden=hidden)
    assert [p.code for p in e.value.problems] == ["HS109"]


@pytest.mark.needs("torch")
def test_masked_and_sparse_arrays():
    import torch

    for states in (np.ma.masked_array(np.ones((7, 8))), torch.ones(7, 8).to_sparse(), torch.ones(7, 8, device="meta")):
        with pytest.raises(InvalidRecord) as e:
            tiny_record(C, hidden={"d1": states})
        assert [p.code for p in e.value.problems] == ["HS207"]


@pytest.mark.parametrize("changes", [{"input_ids": ["a"]}, {"loss_mask": [[1], [1, 2]]}, {"hidden": {"d1": object()}}])
def test_no_array_at_all(changes):
    with pytest.raises(InvalidRecord) as e:
        tiny_record(C, **changes)
    assert e.value.problems[0].id == "r0"


def test_declared_fields():
    fields = [
        {"name": "logprob", "axis": "token", "dtype": "float32", "shape": [2], "must_understand": False},
        {"name": "score", "axis": "record", "dtype": "int32", "shape": [], "must_understand": False},
    ]
    c = tiny_contract(fields=fields)
    assert codes(tiny_record(c), c) == []
    wrong = {"logprob": np.ones((7, 3), np.float32), "score": np.float64(1)}
    assert codes(tiny_record(c, fields=wrong), c) == ["HS101", "HS207"]
    assert codes(tiny_record(c, fields={}), c) == ["HS109", "HS109"]
