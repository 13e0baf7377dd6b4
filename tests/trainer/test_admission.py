"""What else the gate compares: an existing draft, an engine of one's own, the target, RoPE, norms, data on resume."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from runs import AUX, BOTH, contract_of, make_config, make_run, make_store, make_target, refused
from safetensors.numpy import save_file

import hsformat as hs
from hsformat.problems import NothingToOpen
from hsformat.testing import digest, tiny_record
from hsformat_trainer.admitted import differences
from hsformat_trainer.draft_files import draft_config, plain_config, weight_shapes
from hsformat_trainer.gate import admit

CUSTOM = {
    "hsformat_custom_layout": "1", "name": "ours", "version": "7", "aux": list(AUX), "norm_before_residual": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "later_layers_norm": "input_layernorm",
    "attention": "llama", "attention_bias": False, "output_bias": False, "mlp_bias": False, "fc_bias": False,
    "embedding": "target", "head": "own",
    "shift": {"token": 1, "position": 0, "distribution": 1, "target": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target and a store that fit."""
    folder = tmp_path_factory.mktemp("base")
    make_run(folder)
    return folder


def codes(problems):
    return {p.code for p in problems}


def custom(tmp, **changes):
    (tmp / "layout.json").write_text(json.dumps({**CUSTOM, **changes}))
    return f"custom:{tmp / 'layout.json'}"


def write_draft(base, folder, *, weights=(), **changes):
    """Write a draft folder as an export would, with changes of its config; names in ``weights`` are left out."""
    spec = admit(make_config(base)).spec
    about = {"architecture": "LlamaForCausalLM", "num_layers": 4}
    keys, _ = hs.engines.emit_for(AUX, draft_config(spec), dict(e.split("@") for e in BOTH), **about)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**plain_config(spec, keys), **changes}))
    tensors = {n: np.zeros(s, ml_dtypes.bfloat16) for n, s in weight_shapes(spec).items() if n not in weights}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_an_existing_draft_is_taken(base, tmp_path):
    draft = write_draft(base, tmp_path / "draft")
    for option in ({"init": draft}, {"draft_config": draft}, {"draft_config": f"{draft}/config.json"}):
        admitted = admit(make_config(base, **{"draft_kv_heads": None, **option}))
        assert admitted.spec == admit(make_config(base)).spec
        assert [s.keys for s in admitted.servings] == [AUX, AUX]


@pytest.mark.parametrize(
    ("changes", "weights", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, (), {"HS401", "HS402"}),
        ({"norm_before_residual": True}, (), {"HS405"}),  # SGLang has no such option
        ({"tie_word_embeddings": True}, (), {"HS412"}),
        ({"draft_vocab_size": 20}, (), {"HS408", "HS411"}),
        ({}, ("midlayer.hidden_norm.weight",), {"HS411"}),
        ({"hidden_act": "gelu"}, (), {"HS410"}),
        ({"attention_bias": True}, (), {"HS410"}),  # that of o_proj as well
        ({"rope_theta": 5.0}, (), {"HS407"}),  # and 10000 in rope_parameters
    ],
)
def test_an_existing_draft_that_is_served_otherwise(base, tmp_path, changes, weights, expected):
    draft = write_draft(base, tmp_path / "draft", weights=weights, **changes)
    found = refused(make_config(base, init=draft))
    assert expected <= codes(found)
    if "eagle_aux_hidden_state_layer_ids" in changes:
        assert any("[d1, d2]" in p.expected and "vllm 0.32.0" in p.where for p in found)


def test_options_that_contradict_an_existing_draft(base, tmp_path):
    draft = write_draft(base, tmp_path / "draft")
    found = refused(make_config(base, init=draft, norm_output=True, draft_heads=4, draft_kv_heads=4))
    assert {(p.code, p.where) for p in found} == {
        ("HS405", "--norm-output"), ("HS409", "--draft-heads"), ("HS409", "--draft-kv-heads"),
    }  # fmt: skip


def test_a_draft_that_is_not_there(base, tmp_path):
    for option in ("init", "draft_config", "target", "engine_profile"):
        with pytest.raises(NothingToOpen):
            admit(make_config(base, **{option: str(tmp_path / "none")}))
    with pytest.raises(hs.HsError) as e:
        admit(make_config(base, stores=[str(tmp_path / "none"), str(tmp_path / "nothing")]))
    assert [p.code for p in e.value.problems] == ["HS501", "HS501"]


def test_an_engine_of_ones_own(base, tmp_path):
    admitted = admit(make_config(base, serve=[custom(tmp_path)]))
    assert [(s.engine, s.evidence) for s in admitted.servings] == [("custom:ours", "stated")]
    assert admit(make_config(base, serve=[custom(tmp_path), *BOTH]))
    (p,) = refused(make_config(base, serve=[custom(tmp_path, aux=["d1", "d3", "d2"])]))
    assert p.code == "HS401"
    assert "--aux d1,d3,d2 --last d4" in p.fix
    assert codes(refused(make_config(base, serve=[custom(tmp_path, norm_output=True), *BOTH]))) == {"HS405"}
    shift = {**CUSTOM["shift"], "position": 1}
    assert "HS406" in codes(refused(make_config(base, serve=[custom(tmp_path, shift=shift)])))
    assert "HS412" in codes(refused(make_config(base, serve=[custom(tmp_path)], train_embedding=True)))


@pytest.mark.parametrize("serve", ["vllm", "vllm@0.1.0", "tgi@1.0", "transformers@5.24.0", "vllm@latest"])
def test_an_engine_that_is_not_known_is_no_guess(base, cli, serve):
    config = make_config(base)
    words = ("train", config.stores[0].path, "--target", config.target, "--serve", serve, "--out", config.out)
    code, _, err = cli(*words)
    assert code == 2
    assert "HS410" in err


def test_what_to_name_instead_of_an_engine(base):
    (*_, p) = refused(make_config(base, serve=["foo@1"]))
    assert "transformers" not in p.expected  # it serves no drafts
    assert "vllm" in p.expected
    for p in refused(make_config(base, serve=["vllm"])):
        assert p.got == "none"
        assert "vllm@" in p.fix


def test_a_custom_layout_that_is_not_there(base, cli):
    config = make_config(base)
    words = ("train", config.stores[0].path, "--target", config.target, "--out", config.out)
    code, _, err = cli(*words, "--serve", "custom:/nope.json", "--draft-layers", 2)
    assert code == 2
    assert "/nope.json" in err
    assert "no such path" in err


def test_dynamic_rope_is_not_trained_for_sglang(base):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (p,) = refused(make_config(base, draft_rope=rope))
    assert p.code == "HS407"
    assert "sglang 0.5.23" in p.where
    assert admit(make_config(base, draft_rope=rope, serve=["vllm@0.32.0"]))


def test_longrope_is_trained_for_no_engine(base):
    """Training rotates by the short factors at every position, the engines by the long ones in long contexts."""
    factors = {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2, "original_max_position_embeddings": 64}
    found = refused(make_config(base, draft_rope={"rope_type": "longrope", "rope_theta": 1e4, **factors}))
    assert {p.code for p in found} == {"HS407"}
    assert {w for p in found for w in ("vllm 0.32.0", "sglang 0.5.23") if w in p.where} == {
        "vllm 0.32.0",
        "sglang 0.5.23",
    }


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"draft_head_dim": 5}, "rope.partial_rotary_factor"),
        ({"draft_rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.3}},
         "rope.partial_rotary_factor"),
        ({"draft_rope": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope.low_freq_factor"),
        ({"draft_rope": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope.factor"),
        ({"draft_rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}}, "rope.factor"),
        ({"draft_rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "rope.factor"),
        ({"draft_rope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}},
         "rope.short_factor"),
    ],
)  # fmt: skip
def test_a_rope_without_frequencies_is_refused_before_weights(base, options, place):
    found = refused(make_config(base, serve=["vllm@0.32.0"], **options))
    assert ("HS407", place) in {(p.code, p.where) for p in found}


def test_the_rope_of_gemma4_is_not_the_drafts(base, tmp_path):
    """Its full layers have ``proportional``, with which nothing is trained: the target's own is no default then."""
    proportional = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    both = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": proportional}
    target = make_target(
        tmp_path / "target", model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], rope_parameters=both,
        rope_theta=None, head_dim=4, global_head_dim=8, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    contract = contract_of(target)
    assert [(r.kind, r.rotary_dim, r.parameters) for r in contract.target.rope] == [
        ("proportional", 4, {"head_dim": 8}),
        ("default", 4, {}),
    ]
    make_store(tmp_path / "data.hs.zarr", contract)
    (p,) = [p for p in refused(make_config(tmp_path)) if p.where == "rope.rope_type"]
    assert p.code == "HS407"
    assert '{"rope_type": "default", "rope_theta": 1000000.0}' in p.fix
    asked = {"rope_type": "default", "rope_theta": 1e6}
    assert admit(make_config(tmp_path, draft_rope=asked)).spec.rope == asked

    found = refused(make_config(base, draft_rope=proportional))
    assert ("HS407", "rope.rope_type") in {(p.code, p.where) for p in found}
    draft = write_draft(base, tmp_path / "draft", rope_parameters=proportional, rope_theta=1e6,
                        partial_rotary_factor=0.5, rope_scaling={"rope_type": "proportional"})  # fmt: skip
    found = refused(make_config(base, init=draft))
    assert ("HS407", "rope.rope_type") in {(p.code, p.where) for p in found}


def test_a_draft_vocabulary_above_the_targets(base):
    (p,) = refused(make_config(base, draft_vocab_size=101))
    assert (p.code, p.where, p.got) == ("HS408", "--draft-vocab-size", "101")
    assert admit(make_config(base, draft_vocab_size=100)).spec.draft_vocab_size == 100


def test_what_engines_cannot_serve_is_said_before_training(base):
    assert codes(refused(make_config(base, norm_before_residual=True))) == {"HS405"}
    assert codes(refused(make_config(base, train_embedding=True))) == {"HS412"}
    assert codes(refused(make_config(base, draft_layers=2))) == {"HS405"}
    assert codes(refused(make_config(base, aux=["d2"]))) == {"HS402"}  # SGLang leaves fc out
    assert codes(refused(make_config(base, aux=["d3", "d1"]))) == {"HS401"}  # both feed them ascending
    assert codes(refused(make_config(base, aux=["d1", "d4"]))) == {"HS304"}  # depth N: SGLang dies of it
    assert codes(refused(make_config(base, draft_hidden_size=16))) == {"HS409"}
    for options in ({"norm_before_residual": True}, {"train_embedding": True}, {"draft_layers": 2}, {"aux": ["d2"]}):
        assert admit(make_config(base, serve=["vllm@0.32.0"], **options))


def test_all_problems_are_said_at_once(base, tmp_path):
    make_target(tmp_path / "target", vocab_size=90)
    found = refused(make_config(base, target=str(tmp_path / "target"), aux=["d1", "d9"], mask_rule="feature"))
    assert {"HS301", "HS109", "HS110"} <= codes(found)


def test_two_versions_of_an_engine(base):
    admitted = admit(make_config(base, serve=["vllm@0.32.0", "vllm@0.24.0"]))
    assert [s.version for s in admitted.servings] == ["0.32.0", "0.24.0"]


def test_another_target_is_refused(base, tmp_path):
    make_target(tmp_path / "eps", rms_norm_eps=1e-6)
    found = refused(make_config(base, target=str(tmp_path / "eps")))
    assert {"target.config_digest", "target.final_norm.eps"} <= {p.where.rpartition(": ")[2] for p in found}
    make_target(tmp_path / "tokenizer")
    tokenizer = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
    assert codes(refused(make_config(base, target=str(tmp_path / "tokenizer")))) == {"HS302"}
    make_target(tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    assert "HS305" in codes(refused(make_config(base, target=str(tmp_path / "fp8"))))


def test_quarot_rotates_the_target(base, tmp_path):  # vllm-ascend#5974, PR#6914: config and sizes are the same
    folder = make_target(tmp_path / "target")
    rng = np.random.default_rng(1)
    q, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = (tensors[name].astype(np.float32) @ q).astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (p,) = refused(make_config(base, target=str(folder)))
    assert p.code == "HS301"
    assert p.where.endswith("target.basis_digest")
    assert p.fix == "give the right target, or extract again with the one that will be served"


def test_weights_of_the_target_that_are_not_its_configs(base, tmp_path):
    folder = make_target(tmp_path / "target")
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"][:50]}, folder / "model.safetensors")
    (p,) = refused(make_config(base, target=str(folder)))
    assert p.code == "HS411"
    assert "the target's own folder" in p.fix


def test_resuming_on_other_data_is_refused_with_the_difference(base, tmp_path):
    admitted = admit(make_config(base))
    recorded = json.loads(json.dumps(admitted.record()))
    assert differences(admitted.record(), recorded) == []
    moved = json.loads(json.dumps(recorded))
    moved["sources"][0]["name"] = "/elsewhere/data.hs.zarr"
    assert differences(admitted.record(), moved) == []

    def differs(**changes):
        return {
            (p.code, p.where.removeprefix("resume: "))
            for p in differences(admit(make_config(base, **changes)).record(), recorded)
        }

    assert ("HS401", "layout.aux") in differs(aux=["d1", "d3"])
    assert {("HS507", "sources[0].train.ids"), ("HS507", "sources[0].held_out.ids")} <= differs(seed=7)
    assert differs(stores=[{"path": str(base / "data.hs.zarr"), "weight": 2.0}]) == {("HS507", "sources[0].weight")}
    assert differs(norm_output=True) >= {("HS405", "spec.norm_output")}
    assert {("HS401", "servings[0].engine"), ("HS401", "servings[1]")} <= differs(serve=["vllm@0.32.0"])
    contract = contract_of(base / "target")
    make_store(tmp_path / "other", contract, first=40)
    assert differs(stores=[str(tmp_path / "other")]) >= {("HS507", "sources[0].train.ids")}
    text = "\n".join(map(str, differences(admit(make_config(base, seed=7)).record(), recorded)))
    assert "as the run had" in text


def test_the_whole_difference_is_shown_field_by_field(base):
    """It was cut at 200 characters: which fields of an engine or a store differed could not be read."""
    admitted = admit(make_config(base))
    recorded = json.loads(json.dumps(admitted.record()))
    (found,) = differences(admit(make_config(base, serve=BOTH[:1])).record(), recorded)
    assert found.where == "resume: servings[1]"
    lines = str(found).splitlines()
    for key, value in recorded["servings"][1].items():
        if key != "evidence" and not isinstance(value, (dict, list)):
            assert f"    {key}: {'none' if value is None else value}" in lines
    assert any(line.startswith("    rope[0].theta: ") for line in lines)
    (more,) = differences(recorded, admit(make_config(base, serve=BOTH[:1])).record())
    assert "    engine: vllm" in str(more).splitlines()
    assert more.expected == "none, as the run had"
    longer = json.loads(json.dumps(recorded))
    longer["spec"]["rope"] = {"rope_type": "yarn", "factors": [1.5] * 100}
    wheres = [p.where for p in differences(longer, recorded)]
    assert wheres == ["resume: spec.rope.factors", "resume: spec.rope.rope_theta", "resume: spec.rope.rope_type"]
    assert differences(longer, recorded)[0].got.count("1.5") == 100


def test_frozen_contracts_are_not_changed(base):  # speculators#454: a config was changed by what was built of it
    store = hs.open(base / "data.hs.zarr")
    before = store.contract.digest
    admit(make_config(base, aux=["d1", "d3"]), sources=[("data", store, 1.0)])
    assert store.contract.digest == before


def test_a_store_that_grows_keeps_its_contract_and_not_its_resume(tmp_path):
    config = make_run(tmp_path, held_out="none")
    admitted = admit(config)
    recorded = admitted.record()
    with hs.append(tmp_path / "data.hs.zarr") as writer:
        writer.append(tiny_record(admitted.contract, "new"))
    found = differences(admit(config).record(), recorded)
    changed = {"train.records", "train.ids", "content"}
    assert {p.where for p in found} == {f"resume: sources[0].{part}" for part in changed}
    assert recorded["compatibility_digest"] == admit(config).record()["compatibility_digest"] != digest("0")


def test_data_that_trains_nothing_is_refused(tmp_path):
    contract = contract_of(make_target(tmp_path / "target"))
    lone = [tiny_record(contract, f"r{i}", tokens=3, loss_mask=np.array([0, 0, 1], np.uint8)) for i in range(2)]
    make_store(tmp_path / "data.hs.zarr", contract, records=lone)
    (p,) = refused(make_config(tmp_path, held_out="none"))
    assert (p.code, p.where) == ("HS103", "stores")
    assert "2 training record(s)" in p.got
    admit(make_config(tmp_path, held_out="none", mask_rule="target"))  # it trains what is in the span
    more = [tiny_record(contract, f"r{i}", tokens=9 + i) for i in range(2, 6)]
    make_store(tmp_path / "more", contract, records=more)
    config = make_config(tmp_path, stores=[str(tmp_path / "more")], held_out=f"store:{tmp_path / 'data.hs.zarr'}")
    (note,) = admit(config).notes  # it was evaluated, at an acceptance length of 1.0
    assert (note.code, note.severity.value, note.where) == ("HS103", "warning", "held-out records")


def test_a_share_that_holds_nothing_out_is_a_warning(base):
    (note,) = admit(make_config(base, held_out="0.0001")).notes
    assert (note.code, note.severity.value, note.where) == ("HS102", "warning", "held-out records")
    assert admit(make_config(base, held_out="none")).notes == ()
