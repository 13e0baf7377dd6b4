"""A model folder described without loading it; every fault of a folder is a problem, never a traceback."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hsformat.problems import ForeignFileError
from hsformat.target import MEASURED, describe, load_key_tensor
from hsformat.target.families import FAMILIES

TINY = Path(__file__).parents[1] / "data/tiny-llama"
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the tiny Llama that a test may change."""
    return Path(shutil.copytree(TINY, tmp_path / "m"))


def problems_of(folder, **options):
    with pytest.raises(ForeignFileError) as e:
        describe(folder, **options)
    return e.value.problems


def codes_of(folder, **options):
    return [p.code for p in problems_of(folder, **options)]


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_weights(folder, change):
    """Apply ``change`` to the dict of all tensors and save them again."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, folder / "model.safetensors")


def without_tensors(tensors, *names):
    return {n: t for n, t in tensors.items() if n not in names}


def shard(folder, files=3):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_tiny_llama():
    d = describe(TINY, weights_digest=True)
    m = d.model
    assert (m.name, m.revision, m.architecture, m.num_layers) == ("tiny-llama", None, "LlamaForCausalLM", 8)
    assert (m.hidden_size, m.vocab_size, m.dtype, m.quantization) == (64, 512, "bfloat16", None)
    assert (m.embedding.scale, m.embedding.tied) == (1.0, False)
    assert (m.final_norm.kind, m.final_norm.eps, m.final_norm.unit_offset) == ("rmsnorm", 1e-5, False)
    assert (m.head.bias, m.head.softcap, m.head.scale, m.head.padded_vocab) == (False, None, 1.0, 512)
    assert [(r.applies_to, r.kind, r.theta, r.rotary_dim) for r in m.rope] == [("all", "default", 10000.0, 32)]
    assert d.max_positions == 1024
    assert d.template == (TINY / "chat_template.jinja").read_text()
    assert m.weights_digest is not None
    assert describe(TINY).model.weights_digest is None


def test_digests_of_the_tiny_llama_are_those_of_yesterday():
    """A digest that changes refuses every store made before: then the spec's version must change too."""
    d = describe(TINY, weights_digest=True)
    assert d.model.config_digest == "sha256:9d9aea50f0a1106ba6408ab5aad26f2921266f2544dfcaba7a378aea83280a02"
    assert d.model.basis_digest == "sha256:98ddd53d7963e00cb44889cd038eaa4005c5736d81f1970be58ed1078bb1a81e"
    assert d.model.weights_digest == "sha256:602607ff587bc92823d16cea0b045216a83e0260e6328ec498f24a06c0abd529"
    assert d.tokenizer_digest == "sha256:ae2618c348a9e4e468764048fa7872c66e41cd779a9483d3589311d2837854d6"
    assert d.template_digest == "sha256:03e17af2ff24da0c659bbc430ead09a352e60c8598323329b54d91795f399b1b"


def test_nothing_heavy_is_imported():
    code = "import sys; from hsformat.target import describe; describe(sys.argv[1])\n"
    code += "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'zarr')))"
    assert subprocess.run([sys.executable, "-c", code, str(TINY)], check=False).returncode == 0


def test_key_tensors_are_read_alone_and_bit_exact():
    whole = load_file(TINY / "model.safetensors")
    for role, name in (("embedding", EMBED), ("final_norm", NORM), ("lm_head", HEAD)):
        got = load_key_tensor(TINY, role)
        assert got.dtype == ml_dtypes.bfloat16
        assert np.array_equal(got.view(np.uint16), whole[name].view(np.uint16))
    assert load_key_tensor(TINY, "lm_head_bias") is None


def test_sharded_checkpoint_has_the_same_basis(folder):
    shard(folder)
    assert describe(folder).model.basis_digest == describe(TINY).model.basis_digest
    assert (
        describe(folder, weights_digest=True).model.weights_digest
        != describe(TINY, weights_digest=True).model.weights_digest
    )


def test_rotated_target_has_another_basis(folder):  # vllm-ascend#5974: QuaRot
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 64)))[0]

    def rotate(tensors):
        for name in (EMBED, HEAD):
            tensors[name] = (tensors[name].astype(np.float32) @ q).astype(ml_dtypes.bfloat16)

    edit_weights(folder, rotate)
    assert describe(folder).model.config_digest == describe(TINY).model.config_digest
    assert describe(folder).model.basis_digest != describe(TINY).model.basis_digest


def test_fine_tune_that_keeps_the_basis_shows_in_the_weights_digest(folder):
    edit_weights(folder, lambda t: t["model.layers.3.mlp.up_proj.weight"].view(np.uint16).__setitem__((0, 0), 7))
    old, new = describe(TINY, weights_digest=True).model, describe(folder, weights_digest=True).model
    assert old.basis_digest == new.basis_digest
    assert old.weights_digest != new.weights_digest


def test_tied_head_stored_or_not_is_one_basis(folder):
    edit_config(folder, tie_word_embeddings=True)
    edit_weights(folder, lambda t: without_tensors(t, HEAD))
    without = describe(folder).model
    edit_weights(folder, lambda t: t.update({HEAD: t[EMBED].copy()}))
    stored = describe(folder).model
    edit_weights(folder, lambda t: without_tensors(t, EMBED))
    assert without == stored == describe(folder).model
    assert without.embedding.tied
    assert np.array_equal(load_key_tensor(folder, "lm_head"), load_key_tensor(folder, "embedding"))


def test_tied_head_that_differs_is_refused(folder):
    edit_config(folder, tie_word_embeddings=True)
    assert codes_of(folder) == ["HS412"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "llm.model.", "llm.", ""])
def test_aliases_of_multimodal_checkpoints(folder, prefix):  # speculators PR#1038
    names = {n: n.replace("model.", prefix, 1) for n in (EMBED, NORM)}
    edit_weights(folder, lambda t: {names.get(n, n): v for n, v in t.items()})
    assert describe(folder).model.basis_digest == describe(TINY).model.basis_digest


def test_no_final_norm_is_never_taken_as_ones(folder):  # speculators PR#1038
    edit_weights(folder, lambda t: {("x.norm.weight" if n == NORM else n): v for n, v in t.items()})
    (found,) = problems_of(folder)
    assert (found.code, "final_norm" in found.where) == ("HS411", True)


def test_two_candidates_are_both_named(folder):  # speculators PR#1038
    edit_weights(folder, lambda t: t.update({"llm.norm.weight": t[NORM] * 2}))
    (found,) = problems_of(folder)
    assert (found.code, found.got) == ("HS411", f"{NORM}, llm.norm.weight")


def test_missing_head_and_embedding_are_two_problems(folder):
    edit_weights(folder, lambda t: without_tensors(t, HEAD, EMBED))
    assert codes_of(folder) == ["HS411", "HS411"]


def test_shapes_against_the_config(folder):
    edit_config(folder, hidden_size=65, vocab_size=513)
    found = {(p.code, p.where.rsplit(": ")[-1]) for p in problems_of(folder)}
    assert found == {("HS411", EMBED), ("HS409", NORM), ("HS411", HEAD)}


def test_padded_head_is_recorded(folder):
    edit_config(folder, vocab_size=500)
    m = describe(folder).model
    assert (m.vocab_size, m.head.padded_vocab) == (500, 512)


def test_packed_embedding_is_refused(folder):
    edit_weights(folder, lambda t: t.update({EMBED: np.zeros((512, 64), np.int8)}))
    assert codes_of(folder) == ["HS411"]


def test_bias_that_the_family_has_not(folder):
    edit_weights(folder, lambda t: t.update({"lm_head.bias": np.zeros(512, np.float32)}))
    assert codes_of(folder) == ["HS411"]


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000, 500_000, 1_025_799])
def test_truncated_weights_name_the_missing_bytes(folder, size):  # osaurus PR#2333
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    (found,) = problems_of(folder)
    assert found.code == "HS602"
    if size > 8:
        assert "missing" in found.got


def header(folder, value, data=b"", length=None):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    length = len(raw) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + raw + data)


def tensor(begin, end, shape=(2,), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "value",
    [
        b"", b"[]", b"{", b"\xff\xff", b"[" * 100_000, {"a": 1}, {"a": {"dtype": "U8"}}, {"a": tensor(2, 0)},
        {"a": tensor(-2, 0)}, {"a": tensor(0, 2), "b": tensor(1, 3)}, {"a": tensor(1, 3)}, {"a": tensor(0, 2, (3,))},
        {"a": tensor(0, 9, (9,))}, {"a": tensor(0, 2, (-2,))}, {"a": tensor(0, 2, (2.0,))}, {"a": tensor(0, 1, (1,))},
        {"a": tensor(0, 2), "b": tensor(0, 2)}, {"a": tensor(0, 2**70, (2**70,))},
    ],
)  # fmt: skip
def test_hostile_header(folder, value):
    header(folder, value, data=b"123")
    assert set(codes_of(folder)) == {"HS602"}


@pytest.mark.parametrize("length", [50, 2**40, 2**63, 2**64 - 1])
def test_header_longer_than_the_file(folder, length):
    header(folder, b"{}", length=length)
    assert codes_of(folder) == ["HS602"]


def test_pickles_alone_are_unsafe(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert codes_of(folder) == ["HS601"]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.gguf"])
def test_weights_under_another_name(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    assert codes_of(folder) == ["HS603"]


def test_no_weights_and_no_tokenizer_are_both_reported(folder):
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    assert sorted(codes_of(folder)) == ["HS411", "HS602"]


def test_all_missing_shards_are_named(folder):
    for file in sorted(set(shard(folder).values()))[:2]:
        (folder / file).unlink()
    assert codes_of(folder) == ["HS411", "HS411"]


def test_index_that_disagrees_with_its_shards(folder):
    weight_map = shard(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {**weight_map, "x.weight": weight_map[NORM]}}))
    assert codes_of(folder) == ["HS602"]
    for bad in ("", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 1}}'):
        path.write_text(bad)
        assert codes_of(folder) == ["HS602"]


def test_two_sets_of_weights(folder):
    shutil.copy(folder / "model.safetensors", folder / "copy")
    shard(folder)
    (folder / "copy").rename(folder / "model.safetensors")
    assert codes_of(folder) == ["HS603"]


def test_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none", tmp_path / "file"):
        assert codes_of(path) == ["HS602"]
    assert codes_of(tmp_path) == ["HS602", "HS602", "HS411"]  # no config, no tokenizer, no weights


def test_dtype_is_given_or_refused(folder):
    edit_config(folder, dtype="absent")
    assert codes_of(folder) == ["HS603"]
    assert describe(folder, dtype="float32").model.dtype == "float32"
    edit_config(folder, torch_dtype="bfloat16")
    assert describe(folder).model.dtype == "bfloat16"
    assert codes_of(folder, dtype="int8") == ["HS603"]
    edit_config(folder, torch_dtype="auto")
    assert codes_of(folder) == ["HS603"]


def test_quantization(folder):
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    fp8 = describe(folder).model
    assert fp8.quantization == "fp8"
    edit_config(folder, quantization_config={"bits": 4})
    assert codes_of(folder) == ["HS603"]
    edit_config(folder, quantization_config="absent")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    modelopt = describe(folder).model
    assert modelopt.quantization == "modelopt"
    assert len({m.config_digest for m in (fp8, modelopt, describe(TINY).model)}) == 3


MEASURED_LLAMA = {
    "final_norm": {"kind": "rmsnorm", "eps": 1e-5, "unit_offset": False}, "embedding_scale": 1.0, "head_scale": 1.0,
    "softcap": None,
}  # fmt: skip


def test_unknown_family_is_refused_unless_measured(folder):
    edit_config(folder, model_type="brand_new")
    (found,) = problems_of(folder)
    assert found.code == "HS410"
    assert all(name in found.expected for name in FAMILIES)
    assert set(MEASURED_LLAMA) == set(MEASURED)
    assert describe(folder, measured=MEASURED_LLAMA).model.final_norm == describe(TINY).model.final_norm
    assert codes_of(folder, measured={"softcap": None}) == ["HS410"]
    assert codes_of(folder, measured={**MEASURED_LLAMA, "head_scale": -1.0, "final_norm": 3}) == ["HS410"]


def test_measured_facts_must_agree_with_the_table(folder):
    assert describe(folder, measured=MEASURED_LLAMA) == describe(folder)
    assert codes_of(folder, measured={**MEASURED_LLAMA, "head_scale": 0.5}) == ["HS301"]


def test_softcap_that_the_wrapper_ignores_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    text = {**config, "model_type": "gemma3_text", "final_logit_softcapping": 30.0, "dtype": None}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False, "text_config": text}))
    assert codes_of(folder) == ["HS410"]


def test_softcap_that_the_wrapper_heeds_is_described(folder):
    config = json.loads((folder / "config.json").read_text())
    text = {**config, "model_type": "gemma4_text", "final_logit_softcapping": 30.0, "dtype": None}
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        text.pop(key, None)
    outer = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False, "text_config": text}))
    model = describe(folder).model
    assert (model.architecture, model.head.softcap) == ("Gemma4ForConditionalGeneration", 30.0)


def test_problems_of_all_parts_come_at_once(folder):
    edit_config(folder, dtype="absent", rms_norm_eps="small", rope_parameters={"rope_type": "spiral"})
    edit_weights(folder, lambda t: without_tensors(t, NORM))
    (folder / "tokenizer.json").write_text("{")
    assert sorted(codes_of(folder)) == ["HS411", "HS602", "HS603", "HS603", "HS603"]


def test_broken_config_does_not_hide_the_rest(folder):
    (folder / "config.json").write_text("{")
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    assert codes_of(folder) == ["HS602", "HS602", "HS411"]


def test_name_of_a_hub_snapshot(tmp_path):
    path = tmp_path / "models--org--Tiny-1B" / "snapshots" / "abc123"
    shutil.copytree(TINY, path)
    model = describe(path).model
    assert (model.name, model.revision) == ("org/Tiny-1B", "abc123")
    assert (model.config_digest, model.basis_digest) == (
        describe(TINY).model.config_digest, describe(TINY).model.basis_digest,
    )  # fmt: skip
