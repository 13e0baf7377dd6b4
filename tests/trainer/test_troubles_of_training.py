"""Troubles that people have reported of training drafts, each as the test that this trainer passes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from runs import AUX, BOTH, contract_of, make_config, make_run, make_store, make_target, refused

import hsformat as hs
from hsformat.problems import Severity
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.draft_files import plain_config, trained_layout
from hsformat_trainer.gate import admit
from hsformat_trainer.rope import Rotary

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_run(folder)
    return folder


def draft_of(base, tmp, **changes):
    """Write the config of the draft that would be trained on ``base``, with changes."""
    config = plain_config(admit(make_config(base)).spec, {"num_aux_hidden_states": 3})
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    config = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    (tmp / "config.json").write_text(json.dumps(config))
    return str(tmp / "config.json")


def test_minimax_m2_trained_for_sglang_and_served_by_vllm(tmp_path):  # vllm PR#43671: acceptance 10%, not 45%
    target = make_target(tmp_path / "target", num_hidden_layers=62)
    aux = ("d2", "d31", "d59")
    make_store(tmp_path / "data.hs.zarr", contract_of(target, captures=(*aux, "d62"), aux=aux, last="d62"))
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 30, 58]}
    spec = admit(make_config(tmp_path)).spec
    (tmp_path / "draft.json").write_text(json.dumps({**plain_config(spec, ids), "eagle_config": ids}))
    found = refused(make_config(tmp_path, draft_config=str(tmp_path / "draft.json")))
    (own,) = [p for p in found if "vllm 0.32.0" in p.where and p.where.endswith("layout.aux")]
    assert own.code == "HS401"
    assert "every slot is shifted by -1" in own.expected
    assert not [p for p in found if p.where.startswith(str(tmp_path / "data.hs.zarr: sglang"))]
    # What would match is what a run without --draft-config writes.
    admitted = admit(make_config(tmp_path))
    assert [s.keys for s in admitted.servings] == [aux, aux]


def test_one_key_two_conventions(tmp_path):  # sglang PR#25454: ids not beginning with 1 stand for depths, since 0.5.13
    target = make_target(
        tmp_path / "target", num_hidden_layers=30, architectures=["DeepseekV3ForCausalLM"], hidden_act="silu"
    )
    aux = ("d2", "d15", "d27")
    make_store(tmp_path / "data.hs.zarr", contract_of(target, captures=(*aux, "d30"), aux=aux, last="d30"))
    for version, ids in (("0.5.23", [2, 15, 27]), ("0.5.12", [1, 14, 26])):
        config = make_config(tmp_path, serve=[f"sglang@{version}"])
        admitted = admit(config)
        assert admitted.servings[0].keys == aux
        listed = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, "num_aux_hidden_states": 3}
        (tmp_path / "draft.json").write_text(json.dumps(plain_config(admitted.spec, listed)))
        assert admit(config.model_copy(update={"draft_config": str(tmp_path / "draft.json")}))
        other = config.model_copy(
            update={"draft_config": str(tmp_path / "draft.json"),
                    "serve": ("sglang@0.5.12" if version == "0.5.23" else "sglang@0.5.23",)}
        )  # fmt: skip
        if version == "0.5.23":
            (p,) = [p for p in refused(other) if p.code == "HS401"]
            assert "[d3, d16, d28]" in p.expected
        else:
            assert admit(other)  # a list that begins with 1 means the same to both


def test_four_captures_and_an_fc_for_three(base, tmp_path):  # vllm#54526, speculators#1065, vllm PR#54598
    contract = contract_of(base / "target", captures=("d0", *AUX, "d4"), aux=("d0", *AUX))
    make_store(tmp_path / "data.hs.zarr", contract)
    config = make_config(base, stores=[str(tmp_path / "data.hs.zarr")], serve=["vllm@0.32.0"])
    assert admit(config).spec.num_aux == 4  # num_aux_hidden_states is written beside the ids
    draft = draft_of(base, tmp_path)
    found = refused(config.model_copy(update={"draft_config": draft}))
    assert {"HS401", "HS402"} <= {p.code for p in found}
    (p,) = [p for p in found if p.code == "HS402"]
    assert "[d0, d1, d2, d3]" in p.got
    assert "[d1, d2, d3]" in p.expected


def test_the_last_capture_among_the_aux_ones_stays_there(tmp_path):  # speculators PR#626: the last id was stripped
    target = make_target(tmp_path / "target", num_hidden_layers=36)
    contract = contract_of(target, captures=("d2", "d18", "d36"), aux=("d2", "d18", "d36"), last="d36")
    make_store(tmp_path / "data.hs.zarr", contract)
    admitted = admit(make_config(tmp_path, serve=["vllm@0.32.0"]))
    assert admitted.spec.num_aux == 3
    assert admitted.layout.keys == ("d2", "d18", "d36")  # read once, used twice
    two = admit(make_config(tmp_path, serve=["vllm@0.32.0"], aux=["d2", "d18"])).spec
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 18], "num_aux_hidden_states": 2}
    (tmp_path / "draft.json").write_text(json.dumps(plain_config(two, ids)))
    found = refused(make_config(tmp_path, serve=["vllm@0.32.0"], draft_config=str(tmp_path / "draft.json")))
    assert {p.code for p in found} == {"HS401", "HS402"}


def test_norm_before_fc_on_one_side(base, tmp_path):  # sglang#32226, PR#32334: gpt-oss-120b-Eagle3-v3
    older = ["sglang@0.5.16"]  # which ignores the option
    assert "HS405" in {p.code for p in refused(make_config(base, serve=older, norm_before_fc=True))}
    draft = draft_of(base, tmp_path, norm_before_fc=True)
    assert admit(make_config(base, draft_config=draft)).spec.norm_before_fc
    assert "HS405" in {p.code for p in refused(make_config(base, draft_config=draft, serve=[*older, "vllm@0.32.0"]))}


def test_norm_output_is_applied_as_it_is_served(base):  # SpecForge PR#879: EAGLE-3, and 3.1
    for wanted in (False, True):
        admitted = admit(make_config(base, norm_output=wanted, fc_norm=wanted))
        assert {(s.norm_output, s.fc_norm) for s in (admitted.trained, *admitted.servings)} == {(wanted, wanted)}


def test_a_state_after_the_final_norm_is_no_state_before_it(base, tmp_path):  # TorchSpec#169
    contract = contract_of(base / "target", captures=(*AUX, "d4n"), last="d4n")
    make_store(tmp_path / "data.hs.zarr", contract)
    config = make_config(base, stores=[str(tmp_path / "data.hs.zarr")])
    assert admit(config).layout.last == "d4n"  # and the trainer knows by its key that the norm is in it
    assert {p.code for p in refused(config.model_copy(update={"last": "d4"}))} == {"HS109"}


@pytest.mark.parametrize(("rule", "rows"), [("serving", [2]), ("input", [2, 3]), ("target", [1, 2])])
def test_masks_move_with_the_token_that_is_predicted(rule, rows):  # SpecForge#885, PR#895; SafeAILab/EAGLE#317, PR#341
    from hsformat.torch import TensorRecord, pack

    states = torch.zeros(6, 8)
    record = TensorRecord(
        id="a", input_ids=torch.arange(6), loss_mask=torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.bool),
        position_ids=torch.arange(6), hidden=dict.fromkeys((*AUX, "d4"), states), token_fields={}, record_fields={},
    )  # fmt: skip
    batch = TrainBatch.from_packed(pack([record]), aux=AUX, last="d4", steps=2, rule=rule)
    assert batch.supervised[0].nonzero().flatten().tolist() == rows
    assert not bool(batch.supervised[:, -2:].any())  # no target beyond the end


def test_the_mask_of_the_feature_is_refused(base):  # SpecForge#885: the first useful position is never trained
    (p,) = refused(make_config(base, mask_rule="feature"))
    assert p.code == "HS110"


def test_partial_rotation_is_the_same_in_training_and_serving(base, tmp_path):  # speculators#613, #738, PR#733
    target = make_target(tmp_path / "target", hidden_size=8, head_dim=16, partial_rotary_factor=0.25)
    make_store(tmp_path / "data.hs.zarr", contract_of(target))
    admitted = admit(make_config(tmp_path))
    dims = {s.rope[0].rotary_dim for s in (admitted.trained, *admitted.servings)}
    assert dims == {4}
    assert Rotary(admitted.spec).rotary_dim == 4
    # A trainer that rotates all 16 dimensions is not what would be served.
    whole = admitted.spec.model_copy(update={"rope": {"rope_type": "default", "rope_theta": 10000.0}})
    trained = trained_layout(whole, admitted.layout, admitted.contract.target, [])
    assert {p.code for p in hs.compare(trained, admitted.servings[0])} == {"HS407"}


ROPES = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_rope_in_both_layouts_of_transformers(base, rope):  # sfllm PR#32, Model-Optimizer PR#917
    serve = ["vllm@0.32.0"] if rope["rope_type"] == "dynamic" else BOTH  # SGLang has another table: HS407
    admitted = admit(make_config(base, draft_rope=rope, serve=list(serve)))
    ropes = [s.rope for s in (admitted.trained, *admitted.servings)]
    assert all(r == ropes[0] for r in ropes)
    assert (ropes[0][0].kind, ropes[0][0].theta) == (rope["rope_type"], rope["rope_theta"])
    config = plain_config(admitted.spec, {})
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"]["rope_type"] == rope["rope_type"]
    assert bool(torch.isfinite(Rotary(admitted.spec)(torch.arange(100))[0]).all())


def test_a_kind_of_rope_that_is_not_known_is_refused(base):  # NeMo Automodel PR#2399: yarn fell back to llama3's
    found = refused(make_config(base, draft_rope={"rope_type": "spiral", "rope_theta": 1e4}))
    assert any("spiral" in p.got for p in found)
    assert refused(make_config(base, draft_rope={"rope_theta": 1e4}))  # and nothing is taken for a default


def test_a_record_longer_than_the_drafts_positions(base, tmp_path):  # sglang#6783, vllm#48894
    admitted = admit(make_config(base, draft_max_positions=10))
    found = [p for p in admitted.notes if p.code == "HS407"]
    assert {p.severity for p in found} == {Severity.WARNING}
    (p,) = [p for p in found if "a record of" in p.got]
    assert p.got.startswith("10")
    assert "12" in p.expected  # tokens of the longest record


def test_ids_in_one_place_alone_are_read_there(base, tmp_path):  # llama.cpp PR#27040: nested ids fell back to a default
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "eagle_aux_hidden_state_layer_ids": ...}
    draft = draft_of(base, tmp_path, **nested)
    assert admit(make_config(base, serve=["sglang@0.5.23"], draft_config=draft)).servings[0].keys == AUX
    found = refused(make_config(base, draft_config=draft))  # vLLM's newer runner looks elsewhere, and takes a default
    assert {"HS404", "HS403"} & {p.code for p in found if "vllm" in p.where}


def test_exactly_what_an_engine_serves_is_in_the_checkpoint_record(base):  # NeMo Automodel PR#2478: never compared
    record = admit(make_config(base)).record()
    assert [s["engine"] for s in record["servings"]] == ["sglang", "vllm"]
    assert record["layout"] == {"aux": list(AUX), "last": "d4"}
    assert json.loads(json.dumps(record)) == record
    assert np.isfinite(record["spec"]["rms_norm_eps"])
    assert tuple(f"{s['engine']}@{s['version']}" for s in record["servings"]) == BOTH
