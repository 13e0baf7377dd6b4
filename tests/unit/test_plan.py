"""From what a user asks to a contract: depths, captures, layout."""

from __future__ import annotations

import pytest
from factories import digest, tiny_contract

import hsformat as hs
from hsformat.extraction import eagle3_depths, make_contract
from hsformat.extraction.plan import parse_layers


@pytest.mark.parametrize(
    ("layers", "depths"),
    [(61, (2, 30, 58)), (36, (2, 18, 33)), (30, (2, 15, 27)), (27, (2, 13, 24)), (7, (2, 3, 4)), (6, None)],
)
def test_eagle3_default_of_odd_and_even_models(layers, depths):  # SpecForge PR#239
    if depths is None:
        with pytest.raises(hs.ContractMismatch) as e:
            eagle3_depths(layers)
        assert [p.code for p in e.value.problems] == ["HS304"]
    else:
        assert eagle3_depths(layers) == depths


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_shallow_target_names_the_collision(layers):  # NeMo Automodel PR#2256: [1, 1, 1] became [1], silently
    with pytest.raises(hs.ContractMismatch) as e:
        parse_layers("eagle3", layers)
    assert str([2, layers // 2, layers - 3]) in e.value.problems[0].got
    assert parse_layers(",".join(str(d) for d in range(layers)), layers) == tuple(range(layers))


def test_every_bad_depth_is_reported():
    with pytest.raises(hs.ContractMismatch) as e:
        parse_layers("2,x,2,31,-1", 30)
    assert [p.code for p in e.value.problems] == ["HS304"] * 4


@pytest.mark.parametrize("last", ["pre", "post", "none"])
def test_order_of_the_draft_is_kept_and_captures_ascend(last):
    target = tiny_contract().target
    c = make_contract(target, tokenizer_digest=digest("3"), aux=(4, 0, 2), last=last, codec="fast")
    assert c.layout.aux == ("d4", "d0", "d2")
    extra = {"pre": (), "post": ("d4n",), "none": ()}[last]
    assert c.keys == ("d0", "d2", "d4", *extra)
    assert c.layout.last == {"pre": "d4", "post": "d4n", "none": None}[last]
    assert {k.dtype for k in c.captures} == {target.dtype}


def test_embedding_is_a_capture_with_a_name_of_its_own():  # the seed fault began with an unnamed embedding slot
    c = make_contract(tiny_contract().target, tokenizer_digest=digest("3"), aux=(0, 1, 2), last="pre", codec="compact")
    assert c.keys[0] == "d0"
