"""The refusals about serving, the two faults that began this project among them."""

from __future__ import annotations

import pytest
from draft_folders import draft_config, draft_weights, target_config, write_draft, write_target
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.layout import EAGLE3_SHIFT, AuxInput, ServingLayout, Shift
from hsformat.problems import Severity
from hsformat.testing import build_store
from hsformat.validate import DraftCheck, validate_store

TOP = "eagle_aux_hidden_state_layer_ids"


def serving(*keys: str, **changes: object) -> ServingLayout:
    """Return the layout of a draft that fits ``tiny_contract``."""
    contract = tiny_contract()
    aux = tuple(AuxInput(depth=int(k.strip("dn")), norm="final" if "n" in k else "none") for k in keys)
    facts: dict[str, object] = {
        "engine": "vllm", "version": "0.32.0", "evidence": "ran", "architecture": contract.target.architecture,
        "num_layers": contract.target.num_layers, "target_hidden_size": contract.target.hidden_size,
        "vocab_size": contract.target.vocab_size, "aux": aux, "hidden_size": 8, "num_draft_layers": 1,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "later_layers_norm": None, "rope": (), "max_positions": 64, "rms_norm_eps": 1e-5,
        "embedding": "target", "head": "draft", "draft_vocab_size": 100, "vocab_map": None, "shift": EAGLE3_SHIFT,
    }  # fmt: skip
    return ServingLayout.model_validate({**facts, **changes})


def contract_61(aux, depths, last=None):
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in depths]
    return tiny_contract(target={"num_layers": 61}, captures=captures, layout={"aux": list(aux), "last": last})


def test_what_is_fed_in_training_is_what_is_fed_when_served():
    contract = tiny_contract()
    assert hs.compare(contract, serving("d1", "d2", "d3")) == []


def test_trained_on_embed_3_31_served_3_31_59():  # the first fault: 74.7% accuracy, poor acceptance
    contract = contract_61(("d0", "d3", "d31"), (0, 3, 31, 59))
    problems = hs.compare(contract, serving("d3", "d31", "d59", num_layers=61))
    assert [p.code for p in problems] == ["HS401", "HS109"]
    mismatch, missing = problems
    assert mismatch.severity is Severity.ERROR
    assert (mismatch.got, mismatch.expected) == ("[d0, d3, d31]", "[d3, d31, d59]")
    assert "aux=('d3', 'd31', 'd59')" in mismatch.fix  # all of them are stored, and still it is refused
    assert "d61" in missing.expected  # d59 was the last one: none is left for the target distribution


def test_what_cannot_be_had_is_named():
    contract = contract_61(("d0", "d3", "d31"), (0, 3, 31, 61), last="d61")
    problems = hs.compare(contract, serving("d3", "d31", "d59", num_layers=61))
    assert [p.code for p in problems] == ["HS401", "HS109"]
    assert "d59" in problems[1].expected


def test_every_slot_is_one_off():  # vllm PR#43671
    contract = contract_61(("d2", "d31", "d59"), (2, 31, 59, 61), last="d61")
    (p, *rest) = hs.compare(contract, serving("d1", "d30", "d58", num_layers=61))
    assert (p.code, {r.code for r in rest}) == ("HS401", {"HS109"})
    assert "every slot is shifted by -1" in p.expected


@pytest.mark.parametrize(
    ("served", "codes"),
    [
        (serving("d3", "d2", "d1"), ["HS401"]),
        (serving("d1", "d2"), ["HS402", "HS401"]),  # speculators PR#626, #705: a slot is not dropped by position
        (serving("d1", "d2", "d3", "d4"), ["HS402", "HS401"]),
        (serving("d1", "d2", "d4n"), ["HS401", "HS109"]),
        (serving("d1", "d2", "d3", num_layers=5), ["HS301"]),
        (serving("d1", "d2", "d3", architecture="GptOssForCausalLM"), ["HS301"]),
        (serving("d1", "d2", "d3", target_hidden_size=16), ["HS409"]),
        (serving("d1", "d2", "d3", vocab_size=101), ["HS408"]),
        (serving("d1", "d2", "d3", shift=Shift(token=1, position=1, distribution=1, target=2)), ["HS406"]),
    ],
)
def test_each_disagreement(served, codes):
    assert [p.code for p in hs.compare(tiny_contract(), served)] == codes


def test_everything_is_said_at_once():
    wrong = serving(
        "d1", "d2", target_hidden_size=16, vocab_size=99, shift=Shift(token=0, position=0, distribution=1, target=2)
    )
    codes = [p.code for p in hs.compare(tiny_contract(), wrong)]
    assert codes == ["HS409", "HS408", "HS402", "HS401", "HS406"]


def test_an_aux_input_after_the_final_norm():
    captures = [{"depth": 1, "norm": "none", "dtype": "bfloat16"}, {"depth": 4, "norm": "none", "dtype": "bfloat16"}]
    contract = tiny_contract(captures=captures, layout={"aux": ["d1", "d4"], "last": "d4"})
    codes = [p.code for p in hs.compare(contract, serving("d1", "d4n"))]
    assert codes == ["HS401", "HS405", "HS109"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"norm_before_fc": True}, "HS405"),
        ({"norm_before_residual": True}, "HS405"),
        ({"norm_output": True}, "HS405"),
        ({"fc_norm": True}, "HS405"),
        ({"shift": Shift(token=1, position=0, distribution=0, target=2)}, "HS406"),
        (
            {"rope": ({"applies_to": "all", "kind": "default", "theta": 1e4, "rotary_dim": 4, "parameters": {}},)},
            "HS407",
        ),
        ({"max_positions": 32}, "HS407"),
        ({"rms_norm_eps": 1e-6}, "HS405"),
        ({"draft_vocab_size": 50, "vocab_map": f"sha256:{'0' * 64}"}, "HS408"),
        ({"hidden_size": 16}, "HS409"),
        ({"num_draft_layers": 2, "later_layers_norm": "hidden_norm"}, "HS411"),
        ({"embedding": "target"}, "HS412"),
        ({"head": "target"}, "HS412"),
        ({"num_layers": 5}, "HS301"),
        ({"aux": [{"depth": 1, "norm": "none"}]}, "HS402"),
    ],
)
def test_training_against_serving(changes, code):
    trained = serving("d1", "d2", "d3", embedding="draft")
    codes = {p.code for p in hs.compare(trained, ServingLayout.model_validate({**trained.model_dump(), **changes}))}
    assert code in codes
    assert hs.compare(trained, trained) == []


def test_an_engine_that_uses_less_of_a_head_than_training_is_told_of_the_partial_head():  # speculators#613, #738
    full = {"applies_to": "all", "kind": "default", "theta": 1e7, "rotary_dim": 256, "parameters": {}}
    trained, served = serving("d1", rope=(full,)), serving("d1", rope=({**full, "rotary_dim": 64},))
    (p,) = hs.compare(trained, served)
    assert (p.code, p.where) == ("HS407", "rope")


def test_building_a_layout_changes_no_contract(tmp_path):  # speculators#454
    contract = tiny_contract()
    before = contract.digest
    hs.compare(contract, serving("d1", "d2"))
    assert contract.digest == before
    with pytest.raises(Exception, match="frozen"):
        serving("d1").engine = "x"


def test_a_layout_that_the_target_does_not_have():
    for keys in (("d5",), ("d3n",)):
        with pytest.raises(ValueError, match="has no state"):
            serving(*keys)


@pytest.fixture
def world(tmp_path):
    """A store of a target, and a draft of it that both engines feed [d1, d2, d3]."""
    contract = tiny_contract()
    t = contract.target
    target = target_config(
        num_hidden_layers=t.num_layers,
        hidden_size=t.hidden_size,
        vocab_size=t.vocab_size,
        architectures=[t.architecture],
    )
    write_target(tmp_path / "target", target)
    config = draft_config(
        hidden_size=8, vocab_size=t.vocab_size, draft_vocab_size=t.vocab_size, max_position_embeddings=64,
        **{TOP: [1, 2, 3], "eagle_config": {TOP: [0, 1, 2]}},
    )  # fmt: skip
    weights = draft_weights(width=8, target_width=8, size=t.vocab_size, ids=None)
    write_draft(tmp_path / "draft", config, weights)
    build_store(tmp_path / "x.hs.zarr", contract, [tiny_record(contract, id="a", tokens=6)])
    return tmp_path


def test_a_store_is_opened_for_a_draft(world):
    layout = hs.engines.resolve("vllm", draft=world / "draft", target=world / "target", version="0.32.0")
    assert len(hs.open(world / "x.hs.zarr", expect=layout)) == 1
    other = ServingLayout.model_validate({**layout.model_dump(), "aux": layout.aux[::-1]})
    with pytest.raises(hs.ContractMismatch) as e:
        hs.open(world / "x.hs.zarr", expect=other)
    assert [p.code for p in e.value.problems] == ["HS401"]


def test_a_store_is_validated_for_a_draft(world):
    check = DraftCheck(draft=world / "draft", engine="sglang", version="0.5.23")
    assert validate_store(world / "x.hs.zarr", level="metadata", draft=check) == []
    config = world / "draft/config.json"
    config.write_text(config.read_text().replace("[0, 1, 2]", "[0, 2]").replace("64", "4"))
    found = {p.code: p.severity.value for p in validate_store(world / "x.hs.zarr", level="metadata", draft=check)}
    assert found == {"HS404": "error", "HS402": "error", "HS401": "error", "HS407": "warning"}


def test_a_record_longer_than_the_drafts_positions(world):  # sglang#6783, vllm#48894
    config = world / "draft/config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 64', '"max_position_embeddings": 5'))
    for engine, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        check = DraftCheck(draft=world / "draft", engine=engine, version=version)
        (p,) = validate_store(world / "x.hs.zarr", level="metadata", draft=check)
        assert (p.code, p.severity) == ("HS407", Severity.WARNING)
        assert "5," in p.got
        assert "6 tokens" in p.got


@pytest.mark.parametrize("name", ["embedding", "head"])
@pytest.mark.parametrize(
    ("trained", "served", "codes"),
    [("draft", "target", ["HS412"]), ("target", "draft", ["HS412"]), ("target", "target", []),
     ("unknown", "draft", []), ("target", "unknown", [])],
)  # fmt: skip
def test_an_embedding_or_head_of_the_other_side(name, trained, served, codes):
    a, b = serving("d1", "d2", "d3", **{name: trained}), serving("d1", "d2", "d3", **{name: served})
    assert [p.code for p in hs.compare(a, b)] == codes
