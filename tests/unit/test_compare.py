"""The refusals."""

from __future__ import annotations

import pytest
from factories import digest, tiny_contract

from hsformat.compare import compare
from hsformat.layout import Layout
from hsformat.problems import Severity


def contract_61(aux=("d0", "d3", "d31"), last="d61", depths=(0, 3, 31, 59)):
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in sorted({*depths, int(last[1:])})]
    return tiny_contract(target={"num_layers": 61}, captures=captures, layout={"aux": list(aux), "last": last})


def test_trained_on_embed_3_31_served_3_31_59():  # the seed fault: 74.7% accuracy, poor acceptance
    (p,) = compare(contract_61(), Layout(aux=("d3", "d31", "d59"), last="d61"))
    assert (p.code, p.severity) == ("HS401", Severity.ERROR)
    assert p.got == "[d0, d3, d31]"
    assert "[d3, d31, d59]" in p.expected
    assert "Layout(aux=('d3', 'd31', 'd59'), last='d61')" in p.fix  # d59 is stored, and still it is refused


def test_what_is_not_stored_is_named():
    c = contract_61(depths=(0, 3, 31))
    problems = compare(c, Layout(aux=("d3", "d31", "d59"), last="d61"))
    assert [p.code for p in problems] == ["HS401", "HS109"]
    assert "d59" in problems[1].expected
    assert "are stored" not in problems[0].fix


def test_every_slot_shifted_by_one():  # vllm PR#43671
    c = contract_61(aux=("d2", "d31", "d59"), depths=(2, 31, 59))
    problems = compare(c, Layout(aux=("d1", "d30", "d58"), last="d61"))
    assert problems[0].code == "HS401"
    assert "shifted by -1" in problems[0].expected


def test_another_order_is_another_layout():
    c = tiny_contract()
    assert [p.code for p in compare(c, Layout(aux=("d3", "d2", "d1"), last="d4"))] == ["HS401"]
    assert compare(c, Layout(aux=("d1", "d2", "d3"), last="d4")) == []


def test_slots_are_never_dropped_by_position():  # speculators#1065, PR#626
    problems = compare(tiny_contract(), Layout(aux=("d1", "d2"), last="d4"))
    assert [p.code for p in problems] == ["HS402", "HS401"]


def test_last_before_or_after_the_final_norm():  # TorchSpec#169
    problems = compare(tiny_contract(), Layout(aux=("d1", "d2", "d3"), last="d4n"))
    assert [p.code for p in problems] == ["HS405", "HS109"]


def test_last_of_another_depth():  # TorchSpec#87
    problems = compare(tiny_contract(), Layout(aux=("d1", "d2", "d3"), last="d3"))
    assert [p.code for p in problems] == ["HS401"]
    assert problems[0].where == "layout.last"


def test_a_store_without_a_last_capture():  # speculators#705
    c = tiny_contract(layout={"aux": ["d1", "d2", "d3"], "last": None})
    assert compare(c, Layout(aux=("d1", "d2", "d3"), last=None)) == []
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (1, 2, 3)]
    c = tiny_contract(captures=captures, layout={"aux": ["d1", "d2", "d3"], "last": None})
    assert [p.code for p in compare(c, Layout(aux=("d1", "d2", "d3"), last="d4"))] == ["HS109"]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ({"basis_digest": digest("9")}, "HS301"),  # vllm-ascend#5974: a rotated target
        ({"weights_digest": digest("9")}, "HS301"),
        ({"quantization": "fp8"}, "HS305"),
        ({"hidden_size": 16}, "HS409"),
    ],
)
def test_another_target(target, code):
    (p,) = compare(tiny_contract(), tiny_contract(target=target))
    assert (p.code, p.severity) == (code, Severity.ERROR)


def test_what_does_not_decide_meaning_is_a_note():
    a = tiny_contract()
    b = tiny_contract(
        codec="fast", target={"name": "other", "revision": "x"}, layout={"aux": ["d2", "d1"], "last": "d4"}
    )
    problems = compare(a, b)
    assert {p.where for p in problems} == {"codec", "layout.aux", "target.name", "target.revision"}
    assert {p.severity for p in problems} == {Severity.NOTE}
    assert a.compatibility_digest == b.compatibility_digest
    assert a.digest != b.digest


def test_nothing_else_is_compared():
    with pytest.raises(TypeError, match=r"store\.contract"):
        compare(object(), tiny_contract())  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError):
        compare(tiny_contract(), ["d1"])  # type: ignore[arg-type]  # wrong on purpose
