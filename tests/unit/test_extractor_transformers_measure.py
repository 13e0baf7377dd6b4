"""What the Transformers extractor measures of a target: the table's facts, of other families a store, or a refusal."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_models import FAMILIES as TINY
from tiny_models import GATED, HIDDEN, LAYERNORM, LAYERS, RMS, SIZES, save_tiny
from torch import nn

import hsformat as hs
from hsformat.cli.commands import app
from hsformat.cli.output import guarded
from hsformat.extraction.protocol import Measures
from hsformat.problems import ForeignFileError, HsError
from hsformat.target import FAMILIES, describe
from hsformat.target.describe import UnknownFamily
from hsformat_extractors._load import load_model
from hsformat_extractors._measure import measure
from hsformat_extractors.transformers import TransformersExtractor

pytestmark = pytest.mark.needs("torch")

TOKENIZER = Path(__file__).parents[1] / "data" / "tiny-llama"
MODEL_TYPES = {"gemma3": "gemma3_text"}
PLAIN = {"embedding_scale": 1.0, "head_scale": 1.0, "softcap": None}
ROWS = [{"id": f"r{i}", "input_ids": [5, 6 + i, 7, 8, 9 + i], "loss_mask": [0, 0, 1, 1, 1]} for i in range(3)]
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

OTHERS = {
    "stablelm": (GATED, {"final_norm": LAYERNORM}),  # LayerNorm with a bias
    "olmo": (GATED, {"final_norm": LAYERNORM, "final_norm_weight": False}),  # its eps stands in no config
    "phi": ({**GATED, "rope_parameters": HALF}, {"final_norm": LAYERNORM}),  # lm_head with a bias
    "nemotron": (GATED, {"final_norm": {**LAYERNORM, "unit_offset": True}}),
    "opt": ({**SIZES, "ffn_dim": 64, "word_embed_proj_dim": HIDDEN}, {"final_norm": LAYERNORM}),  # learned positions
    "mpt": ({"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 64}, {"final_norm": LAYERNORM}),
    "xglm": (
        {"d_model": HIDDEN, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 64},
        {"final_norm": LAYERNORM, "embedding_scale": HIDDEN**0.5},
    ),
    "vaultgemma": (
        {**GATED, "head_dim": 8, "final_logit_softcapping": 30.0},
        {"final_norm": {**RMS, "unit_offset": True}, "embedding_scale": HIDDEN**0.5, "softcap": 30.0},
    ),
    "falcon": (SIZES, {"final_norm": LAYERNORM}),
    "lfm2": (GATED, {"final_norm": {**RMS, "eps": 1e-5}}),
    "recurrent_gemma": (  # its embedding scale is rounded to bfloat16
        {**GATED, "head_dim": 8, "lru_width": HIDDEN},
        {"final_norm": {**RMS, "unit_offset": True}, "embedding_scale": 5.65625, "softcap": 30.0},
    ),
    "cohere": ({**GATED, "logit_scale": 0.3}, {"final_norm": LAYERNORM, "head_scale": 0.3}),
}
"""Families outside the table: options of their config, and the facts that are not plain, read in Transformers."""

ROTARY = {"stablelm": [2], "phi": [4], "nemotron": [4], "recurrent_gemma": [4], "opt": [], "mpt": [], "xglm": []}
"""Rotated dimensions where they are not all 8 of a head."""


def save(model_type: str, folder: Path) -> Path:
    """Save a random model with the tiny Llama's tokenizer."""
    torch.manual_seed(0)
    options = OTHERS[model_type][0] if model_type in OTHERS else {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4}
    config = transformers.AutoConfig.for_model(model_type, **{**options, "vocab_size": 512})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p += (0.1 if p.ndim == 1 else 0.2) * torch.randn_like(p)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def measured(folder: Path) -> dict:
    return TransformersExtractor().measure(folder, options={"device": "cpu"})


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def extract(monkeypatch, capsys, tmp_path):
    """Run ``hsformat extract`` in this process; return (exit code, stdout, stderr)."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in ROWS))

    def run(model: Path) -> tuple[int, str, str]:
        words = ["--model", model, "--data", data, "--out", tmp_path / "out.hs.zarr", "--layers", "1,2,3"]
        monkeypatch.setattr("sys.argv", ["hsformat", "extract", *map(str, words), "--option", "device=cpu"])
        capsys.readouterr()
        code = guarded(app)
        return code, *capsys.readouterr()

    return run


def codes(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("error HS")]


@pytest.mark.parametrize("family", [f for f in TINY if MODEL_TYPES.get(f, f) in FAMILIES])
def test_measuring_gives_exactly_the_facts_of_the_table(family, tmp_path):
    target = save_tiny(family, tmp_path).target
    found = measured(tmp_path)
    assert found == {
        "final_norm": target.final_norm.model_dump(), "embedding_scale": target.embedding.scale,
        "head_scale": target.head.scale, "softcap": target.head.softcap,
    }  # fmt: skip
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    assert describe(tmp_path, measured=found) == describe(tmp_path)  # else HS301


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_outside_the_table_is_measured_and_extracted(family, tmp_path, extract):
    folder = save(family, tmp_path / "m")
    assert family not in FAMILIES
    facts = {**PLAIN, **OTHERS[family][1]}
    assert measured(folder) == facts
    code, _, err = extract(folder)
    assert code == 0, err
    assert [x for x in err.splitlines() if f"model_type '{family}' is not in the table" in x]
    assert hs.validate_store(tmp_path / "out.hs.zarr", level="full") == []
    store = hs.open(tmp_path / "out.hs.zarr")
    target = store.contract.target
    assert target.final_norm.model_dump() == facts["final_norm"]
    scales = (target.embedding.scale, target.head.scale, target.head.softcap)
    assert scales == tuple(facts[k] for k in PLAIN)
    assert target.head.bias == (family == "phi")
    assert [r.rotary_dim for r in target.rope] == ROTARY.get(family, [8])
    assert sorted(store.ids) == ["r0", "r1", "r2"]
    assert store["r1"].hidden["d4"].shape == (5, HIDDEN)


def test_a_second_run_measures_the_same(tmp_path, extract):
    folder = save("nemotron", tmp_path / "m")
    assert extract(folder)[0] == 0
    code, out, _ = extract(folder)
    assert (code, "3 were there already" in out) == (0, True)  # no HS507: the contract is the same


def test_embeddings_that_are_normed_are_refused(tmp_path, extract):
    """Bloom: depth 0 is a LayerNorm of the rows, which no contract can say."""
    code, _, err = extract(save("bloom", tmp_path / "m"))
    assert (code, codes(err)) == (2, ["HS410"])
    assert not (tmp_path / "out.hs.zarr").exists()


def test_other_problems_of_the_folder_come_before_the_model_is_run(tmp_path, extract, monkeypatch):
    folder = save("stablelm", tmp_path / "m")
    monkeypatch.setattr(TransformersExtractor, "measure", lambda *_args, **_options: pytest.fail("it was run"))
    (folder / "tokenizer.json").unlink()
    code, _, err = extract(folder)
    assert (code, codes(err)) == (2, ["HS410", "HS602"])
    with pytest.raises(ForeignFileError) as e:
        describe(folder)
    assert not isinstance(e.value, UnknownFamily)


def test_an_extractor_that_cannot_measure_leaves_the_refusal(tmp_path, extract, monkeypatch):
    folder = save("stablelm", tmp_path / "m")
    assert isinstance(TransformersExtractor(), Measures)
    monkeypatch.setattr("hsformat.extraction.find_extractor", lambda _name: SimpleNamespace(name="plain"))
    code, _, err = extract(folder)
    assert (code, codes(err), "measured" in err) == (2, ["HS410"], True)


def test_nothing_stays_loaded_after_measuring(tmp_path, monkeypatch):
    """The model is loaded again for the run: both do not fit a device that one of them fills."""
    kept = []

    def load(*args, **options):
        model = load_model(*args, **options)
        kept.append(weakref.ref(model.get_input_embeddings().weight))
        return model

    monkeypatch.setattr("hsformat_extractors._load.load_model", load)
    measured(save("stablelm", tmp_path / "m"))
    assert [ref() for ref in kept] == [None]


def test_measuring_refuses_an_unknown_option(tmp_path):
    with pytest.raises(HsError) as e:
        TransformersExtractor().measure(tmp_path, options={"speed": "high"})
    assert [p.code for p in e.value.problems] == ["HS410", "HS602"]


def test_a_norm_without_weight_is_told_from_a_lost_one(tmp_path):  # speculators PR#1038
    folder = save("olmo", tmp_path / "olmo")
    facts = measured(folder)
    assert describe(folder, measured=facts).model.final_norm.kind == "layernorm"
    with pytest.raises(ForeignFileError) as e:
        describe(folder, measured={k: v for k, v in facts.items() if k != "final_norm_weight"})
    assert [p.code for p in e.value.problems] == ["HS411"]
    other = save("stablelm", tmp_path / "stablelm")
    with pytest.raises(ForeignFileError) as e:
        describe(other, measured=facts)
    assert [p.code for p in e.value.problems] == ["HS411"]


def test_sizes_under_two_other_names_are_refused(tmp_path):
    folder = save("mpt", tmp_path / "m")
    edit_config(folder, n_embd=HIDDEN)
    with pytest.raises(ForeignFileError) as e:
        describe(folder)
    assert [(p.code, p.where.rsplit(": ")[-1]) for p in e.value.problems] == [("HS603", "hidden_size")]


def test_a_multimodal_model_outside_the_table_is_not_measured(tmp_path):
    folder = save("stablelm", tmp_path / "m")
    edit_config(folder, model_type="stable_vision", text_config={"model_type": "stablelm"})
    with pytest.raises(ForeignFileError) as e:
        describe(folder)
    assert ([p.code for p in e.value.problems], isinstance(e.value, UnknownFamily)) == (["HS410"], False)


class L1Norm(nn.Module):
    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + 1e-6)


class TanhEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids).tanh()


class ClampedLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.clamp(-30, 30)
        return out


def toy(cls: type = transformers.LlamaForCausalLM) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return cls(transformers.LlamaConfig(**GATED)).eval()


def refusals(model: nn.Module) -> list[tuple[str, str]]:
    with pytest.raises(HsError) as e:
        measure(model)
    return [(p.code, p.where) for p in e.value.problems]


@pytest.mark.parametrize(
    "norm", [L1Norm(), nn.Softmax(-1), nn.RMSNorm(HIDDEN, eps=1.2345e-6), nn.LayerNorm(HIDDEN, eps=0.0)]
)
def test_a_norm_that_is_neither_is_refused(norm):
    model = toy()
    model.model.norm = norm
    assert refusals(model) == [("HS205", "target: final_norm")]


def test_a_weight_of_zeros_does_not_tell_its_norm():
    model = toy()
    nn.init.zeros_(model.model.norm.weight)
    assert refusals(model) == [("HS205", "target: final_norm")]


def test_everything_that_no_contract_can_say_is_named_with_what_was_tried():
    model = toy(ClampedLlama)
    table = model.model.embed_tokens.weight
    model.model.embed_tokens = TanhEmbedding(*table.shape, _weight=table.detach() + 1)
    model.model.norm = L1Norm()
    with pytest.raises(HsError) as e:
        measure(model)
    norm, embedding, head = e.value.problems
    assert [norm.code, embedding.code, head.code] == ["HS205", "HS410", "HS410"]
    assert all(kind in norm.got for kind in ("L1Norm", "rmsnorm", "layernorm"))
    assert "x row" in embedding.got
    assert "softcap" in head.got


def test_several_residual_streams_have_no_depth():
    config = transformers.Gemma3nTextConfig(**{
        **GATED, "head_dim": 8, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "laurel_rank": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * LAYERS,
        "layer_types": ["full_attention"] * LAYERS, "intermediate_size": [64] * LAYERS,
    })  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert refusals(model) == [("HS410", "target: the model's modules")]
