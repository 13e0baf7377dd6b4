"""Export: what engines would read of the folder is what was trained, or there is no folder."""

from __future__ import annotations

import errno
import json
import shutil

import numpy as np
import pytest
import torch
from runs import BOTH, make_config, make_run, make_target
from safetensors.torch import load_file, save_file

import hsformat as hs
from hsformat_trainer import export as export_module
from hsformat_trainer.checkpoint import write_checkpoint
from hsformat_trainer.draft import Draft
from hsformat_trainer.draft_files import exported_name, weight_shapes
from hsformat_trainer.engines_named import engines_to_export, parse_serve
from hsformat_trainer.export import export_draft
from hsformat_trainer.gate import admit
from hsformat_trainer.target_head import TargetHead
from hsformat_trainer.vocabulary import vocabulary_for

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_run(folder)
    return folder


@pytest.fixture
def make_checkpoint(base, tmp_path):
    """Admit a run, make its draft, move its weights, and write it as a checkpoint."""

    def make(out="out", **changes):
        config = make_config(base, out=str(tmp_path / out), **changes)
        admitted = admit(config)
        target = TargetHead.load(config.target, admitted.target, dtype=torch.float32, device="cpu")
        torch.manual_seed(0)
        draft = Draft(admitted.spec, vocabulary=vocabulary_for(config, admitted), target=target)
        with torch.no_grad():
            for p in draft.parameters():
                p += 0.1 * torch.randn_like(p)
        state = {
            "config": config.model_dump(mode="json"), "admitted": admitted.record(),
            "spec": admitted.spec.model_dump(mode="json"), "tokens": 0, "loader": {}, "random": [],
            "evaluation": None,
        }  # fmt: skip
        tensors = {k: v.detach().contiguous() for k, v in draft.state_dict().items()}
        return write_checkpoint(config.out, 3, state=state, tensors={"model.safetensors": tensors})

    return make


def problems_of(call, *arguments, **named):
    with pytest.raises(hs.HsError) as refused:
        call(*arguments, **named)
    return {p.code for p in refused.value.problems}


OPTIONS = [
    {},
    {"draft_vocab_size": 20},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "train_head": False, "draft_head_dim": 6},
    {"aux": ["d1", "d3"], "draft_kv_heads": 1},
    {"draft_rope": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    {"draft_rope": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_one_folder_for_both_engines(base, make_checkpoint, tmp_path, options):
    checkpoint = make_checkpoint(**options)
    done = export_draft(checkpoint, parse_serve(BOTH), out=tmp_path / "draft")
    assert done.notes == ()
    trained = load_file(checkpoint / "model.safetensors")
    served = load_file(done.folder / "model.safetensors")
    reduced = "draft_vocab_size" in options
    assert ("d2t" in served) == reduced
    assert set(served) == {exported_name(name) for name in trained}
    for name, tensor in trained.items():
        own = served[exported_name(name)]
        assert torch.equal(own, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == options.get("draft_vocab_size", 100)
    assert config["dtype"] == "bfloat16"
    aux = tuple(options.get("aux", ("d1", "d2", "d3")))
    for engine, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        layout = hs.engines.resolve(engine, draft=done.folder, target=base / "target", version=version)
        assert layout.keys == aux
        assert (layout.norm_before_fc, layout.norm_output) == ("norm_before_fc" in options, "norm_output" in options)
    note = json.loads((done.folder / "hsformat.json").read_text())
    assert note["layout"]["aux"] == list(aux)
    assert note["step"] == 3


def test_a_weight_that_the_dtype_of_the_export_cannot_hold_is_refused(make_checkpoint, tmp_path):
    """It was written as infinity, and read back as infinity."""
    checkpoint = tmp_path / "step-3"
    shutil.copytree(make_checkpoint(), checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"][5, 5] = 1e30
    save_file(tensors, checkpoint / "model.safetensors")
    out = tmp_path / "draft"
    assert problems_of(export_draft, checkpoint, parse_serve(BOTH), out=out, dtype="float16") == {"HS201"}
    assert not out.exists()
    assert export_draft(checkpoint, parse_serve(BOTH), out=out, dtype="float32").folder == out


def test_only_one_engine_can_serve_it(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(serve=["vllm@0.32.0"], norm_before_residual=True)
    out = tmp_path / "draft"
    assert problems_of(export_draft, checkpoint, parse_serve(BOTH), out=out) == {"HS405"}
    assert problems_of(export_draft, checkpoint, parse_serve(["sglang@0.5.23"]), out=out) == {"HS405"}
    assert list(tmp_path.glob("*draft*")) == []
    assert export_draft(checkpoint, parse_serve(["vllm@0.32.0"]), out=out).servings[0].norm_before_residual


def test_an_embedding_of_its_own(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(serve=["vllm@0.32.0"], train_embedding=True)
    assert problems_of(export_draft, checkpoint, parse_serve(BOTH), out=tmp_path / "draft") == {"HS412"}
    done = export_draft(checkpoint, parse_serve(["vllm@0.32.0"]), out=tmp_path / "draft")
    assert "embed_tokens.weight" in load_file(done.folder / "model.safetensors")
    assert done.servings[0].embedding == "draft"


def test_more_than_one_layer(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(serve=["vllm@0.32.0"], draft_layers=2)
    done = export_draft(checkpoint, parse_serve(["vllm@0.32.0"]), out=tmp_path / "draft")
    assert done.servings[0].num_draft_layers == 2
    assert "HS405" in problems_of(export_draft, checkpoint, parse_serve(["sglang@0.5.23"]), out=tmp_path / "other")


def test_the_speculators_layout(base, make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(draft_vocab_size=20, norm_before_fc=True, aux=["d1", "d3"])
    engines = parse_serve(["vllm@0.32.0"])
    done = export_draft(checkpoint, engines, out=tmp_path / "draft", style="speculators")
    config = json.loads((done.folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False  # where nothing is said, vLLM takes true in this layout
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(base / "target")
    assert done.servings[0].norm_before_fc
    assert "layers.0.self_attn.q_proj.weight" in load_file(done.folder / "model.safetensors")
    assert problems_of(
        export_draft, checkpoint, parse_serve(BOTH), out=tmp_path / "other", style="speculators"
    ) == {"HS410"}  # SGLang does not read it  # fmt: skip


def test_the_verifier_is_found_from_another_folder(base, make_checkpoint, tmp_path, monkeypatch):
    """An engine runs elsewhere, and took a relative path for a name on a hub."""
    checkpoint = make_checkpoint()
    monkeypatch.chdir(base)
    engines = parse_serve(["vllm@0.32.0"])
    done = export_draft(checkpoint, engines, out=tmp_path / "draft", target="target", style="speculators")
    named = json.loads((done.folder / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
    assert named == str(base / "target")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s["spec"].update(num_aux=2), ["spec.num_aux", "spec.num_aux"]),
        (lambda s: s["spec"].pop("rope"), ["spec.rope"]),
        (lambda s: s["admitted"].update(layout=5), ["admitted.layout"]),
        (lambda s: s["admitted"]["target"].update(architecture=5), ["admitted.target.architecture"]),
        (lambda s: s["admitted"]["target"].update(vocab_size=99), ["spec.vocab_size"]),
        (lambda s: s["config"].update(serve="x", steps=0), ["config.serve", "config.steps"]),
        (lambda s: s.update(step=4), ["step"]),
    ],
)
def test_a_damaged_state_is_named_by_its_field(make_checkpoint, change, named):
    file = make_checkpoint() / "state.json"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))
    with pytest.raises(hs.HsError) as refused:
        export_module.read_trained(file.parent)
    assert [(p.code, p.where) for p in refused.value.problems] == [("HS602", f"{file}: {name}") for name in named]


def damage(checkpoint, change):
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def nan(tensors):
    tensors["fc.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.pop("layers.0.hidden_norm.weight"), "HS411"),
        (lambda t: t.update({"layers.0.extra.weight": torch.ones(3)}), "HS411"),
        (lambda t: t.update({"fc.weight": torch.ones(8, 16)}), "HS411"),
        (nan, "HS201"),
        (lambda t: t.pop("d2t"), "HS411"),  # NeMo Automodel PR#2447: the map was not in the checkpoint
        (lambda t: t.update({"d2t": t["d2t"] + torch.arange(20)}), "HS408"),  # target ids, not offsets
        (lambda t: t.update({"t2d": ~t["t2d"]}), "HS408"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), "HS411"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)}), "HS411"),
    ],
)
def test_a_damaged_checkpoint_gives_no_folder(make_checkpoint, tmp_path, change, code):
    checkpoint = make_checkpoint(draft_vocab_size=20)
    damage(checkpoint, change)
    assert code in problems_of(export_draft, checkpoint, parse_serve(BOTH), out=tmp_path / "draft")
    assert list(tmp_path.glob("*draft*")) == []


@pytest.mark.parametrize(
    ("breaks", "code"),
    [
        (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), "HS401"),
        (lambda c, w: c.pop("eagle_config"), "HS403"),
        (lambda c, w: c.update(norm_output=True), "HS405"),
        (lambda c, w: c.update(rope_theta=77.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0}), "HS407"),
        (lambda c, w: c.update(tie_word_embeddings=True), "HS412"),
        (lambda c, w: c.update(draft_vocab_size=None), "HS408"),
        (lambda c, w: w.pop("midlayer.hidden_norm.weight"), "HS411"),
        (lambda c, w: w.update({"norm.weight": w["norm.weight"] * 2}), "HS411"),  # found by the forward pass alone
        (lambda c, w: w.update({"d2t": w["d2t"] * 0}), "HS408"),
    ],
)
def test_a_fault_of_the_export_is_found_when_it_is_read_back(make_checkpoint, tmp_path, monkeypatch, breaks, code):
    checkpoint = make_checkpoint(draft_vocab_size=20)
    own_config, own_named, made = export_module._config, export_module._named, {}

    def config(*arguments):
        made["config"] = own_config(*arguments)
        return made["config"]

    def named(*arguments, **more):
        weights = own_named(*arguments, **more)
        breaks(made["config"], weights)
        return weights

    monkeypatch.setattr(export_module, "_config", config)
    monkeypatch.setattr(export_module, "_named", named)
    assert code in problems_of(export_draft, checkpoint, parse_serve(BOTH), out=tmp_path / "draft")
    assert list(tmp_path.glob("*draft*")) == []


def test_shapes_are_those_of_the_draft(make_checkpoint):
    for i, options in enumerate([*OPTIONS, {"serve": ["vllm@0.32.0"], "draft_layers": 2, "train_embedding": True}]):
        checkpoint = make_checkpoint(str(i), **options)
        spec = export_module.read_trained(checkpoint).spec
        shapes = weight_shapes(spec, first_layer="layers.0")
        own = {k: tuple(v.shape) for k, v in load_file(checkpoint / "model.safetensors").items() if k != "t2d"}
        assert shapes == own


def test_the_command(base, make_checkpoint, tmp_path, cli):
    checkpoint = make_checkpoint()
    code, out, _ = cli("export-draft", checkpoint, "--engine", "both", "--out", tmp_path / "draft")
    assert code == 0
    assert "read back" in out
    assert "sglang 0.5.23 feeds it [d1, d2, d3]" in out
    code, _, err = cli("export-draft", checkpoint, "--engine", "vllm", "--out", tmp_path / "draft")
    assert code == 2
    assert "HS602" in err  # something is there
    code, _, err = cli(
        "export-draft", checkpoint, "--engine", "vllm", "--engine-version", "0.1", "--out", tmp_path / "x"
    )
    assert code == 2
    assert "HS410" in err
    code, _, err = cli("export-draft", tmp_path / "none", "--engine", "vllm", "--out", tmp_path / "x")
    assert code == 2
    code, _, err = cli("export-draft", base / "target", "--engine", "vllm", "--out", tmp_path / "x")
    assert code == 2
    code, _, err = cli("export-draft", tmp_path / "out", "--engine", "vllm", "--out", tmp_path / "x")
    assert code == 2
    assert f"name a checkpoint of this run: {checkpoint}" in err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["config_digest", "basis_digest"])
def test_another_target_is_no_place_to_export_for(base, make_checkpoint, tmp_path, name):
    checkpoint = make_checkpoint()
    other = make_target(tmp_path / "target", **({"rms_norm_eps": 1e-6} if name == "config_digest" else {}))
    if name == "basis_digest":
        tensors = load_file(other / "model.safetensors")
        tensors["lm_head.weight"] *= 2
        save_file(tensors, other / "model.safetensors")
    with pytest.raises(hs.ContractMismatch) as refused:
        export_draft(checkpoint, parse_serve(BOTH), out=tmp_path / "draft", target=other)
    assert [(p.code, p.where) for p in refused.value.problems] == [("HS301", f"{other}: target.{name}")]
    assert list(tmp_path.glob("*draft*")) == []
    shutil.copytree(base / "target", tmp_path / "moved")
    assert export_draft(checkpoint, parse_serve(BOTH), out=tmp_path / "draft", target=tmp_path / "moved")


def test_dynamic_rope_is_not_exported_for_sglang(make_checkpoint, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    checkpoint = make_checkpoint(serve=["vllm@0.32.0"], draft_rope=rope)
    assert problems_of(export_draft, checkpoint, parse_serve(BOTH), out=tmp_path / "draft") == {"HS407"}
    assert export_draft(checkpoint, parse_serve(["vllm@0.32.0"]), out=tmp_path / "draft").folder.is_dir()


def test_what_an_export_left_behind_is_cleared(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint()
    (tmp_path / ".draft.new").mkdir()
    (tmp_path / ".draft.new" / "model.safetensors").write_bytes(b"half")
    export_draft(checkpoint, parse_serve(BOTH), out=tmp_path / "draft")
    assert not (tmp_path / ".draft.new").exists()


def test_a_folder_that_cannot_be_written(make_checkpoint, tmp_path, monkeypatch, cli):
    checkpoint = make_checkpoint()
    (tmp_path / "file").write_text("")
    code, _, err = cli("export-draft", checkpoint, "--engine", "both", "--out", tmp_path / "file" / "draft")
    assert code == 1
    assert "HS506" in err
    assert "give --out a folder that can be made" in err

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module, "write_tensors", full)
    with pytest.raises(hs.StoreError) as e:
        export_draft(checkpoint, parse_serve(BOTH), out=tmp_path / "draft")
    assert "free space" in e.value.problems[0].fix
    assert list(tmp_path.glob("*draft*")) == list(tmp_path.glob(".draft*")) == []


def test_both_engines_of_a_run_for_one(make_checkpoint, tmp_path, cli):
    checkpoint = make_checkpoint(serve=["vllm@0.32.0"])
    code, _, err = cli("export-draft", checkpoint, "--engine", "both", "--out", tmp_path / "draft")
    assert code == 2
    assert "got       none" in err
    assert "give the version that will serve: sglang@0.5.23" in err


def test_versions_are_those_of_the_training():
    def named(*arguments):
        return [str(e) for e in engines_to_export(*arguments)]

    assert named("both", None, BOTH) == ["sglang 0.5.23", "vllm 0.32.0"]
    assert named("vllm", "0.33.0", BOTH) == ["vllm 0.33.0"]
    assert named("vllm@0.24.0,sglang", None, BOTH) == ["vllm 0.24.0", "sglang 0.5.23"]
    assert named("vllm", None, ["custom:x.json"]) == ["vllm"]  # HS410 where it is looked up
    with pytest.raises(hs.HsError):
        named("both", "1.0", BOTH)


def test_a_run_that_begins_with_an_exported_draft_has_its_weights_and_map(base, make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(draft_vocab_size=20)
    folder = export_draft(checkpoint, parse_serve(BOTH), out=tmp_path / "draft", dtype="float32").folder
    config = make_config(base, init=str(folder))
    admitted = admit(config)
    assert admitted.spec == export_module.read_trained(checkpoint).spec
    vocabulary = vocabulary_for(config, admitted)
    trained = load_file(checkpoint / "model.safetensors")
    assert np.array_equal(vocabulary.d2t, trained["d2t"].numpy())
    assert np.array_equal(vocabulary.t2d, trained["t2d"].numpy())
    target = TargetHead.load(config.target, admitted.target, dtype=torch.float32, device="cpu")
    draft = Draft(admitted.spec, vocabulary=vocabulary, target=target, init=folder)
    assert all(torch.equal(v, trained[k]) for k, v in draft.state_dict().items())


@pytest.mark.parametrize(
    ("name", "weight", "code"),
    [
        ("midlayer.mlp.up_proj.weight", float("nan"), "HS201"),
        ("fc.weight", float("inf"), "HS201"),
        ("norm.weight", None, "HS411"),
    ],
)
def test_weights_to_begin_with_that_are_not_finite_are_named(base, make_checkpoint, tmp_path, name, weight, code):
    """The first loss was NaN, and the learning rate was blamed."""
    folder = export_draft(make_checkpoint(), parse_serve(BOTH), out=tmp_path / "draft", dtype="float32").folder
    config = make_config(base, init=str(folder))
    admitted = admit(config)
    target = TargetHead.load(config.target, admitted.target, dtype=torch.float32, device="cpu")
    tensors = load_file(folder / "model.safetensors")
    if weight is None:
        tensors[name] = tensors[name].to(torch.int8)
    else:
        tensors[name].view(-1)[1] = weight
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(hs.HsError) as refused:
        Draft(admitted.spec, vocabulary=None, target=target, init=folder)
    (found,) = refused.value.problems
    assert found.code == code
    if weight is not None:
        assert found.where == f"{folder / 'model.safetensors'}: {name}"


def test_from_a_store_to_a_served_draft(base, tmp_path, cli):
    """Train, export and look at it, by the commands alone."""
    words = ("train", base / "data.hs.zarr", "--target", base / "target", "--serve", ",".join(BOTH))
    words += ("--out", tmp_path / "out", "--precision", "fp32", "--device", "cpu", "--steps", 2, "--workers", 0)
    words += ("--max-steps", 2, "--held-out", "none", "--draft-vocab-size", 20, "--eval-every", 0)
    code, _, err = cli(*words)
    assert code == 0, err
    checkpoint = tmp_path / "out" / "checkpoints" / "step-2"
    assert cli("export-draft", checkpoint, "--engine", "both", "--out", tmp_path / "draft")[0] == 0
    for engine in BOTH:
        name, _, version = engine.partition("@")
        look = ("layout", tmp_path / "draft", "--engine", name, "--engine-version", version)
        code, out, _ = cli(*look, "--target", base / "target", "--format", "json")
        assert code == 0, out
        assert [a["depth"] for a in json.loads(out)["layout"]["aux"]] == [1, 2, 3]
