"""What preflight and the probe refuse: requests that cannot be done, descriptions that the numbers contradict."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tiny_models import LAYERS, VOCAB, TinyModel, captures, request_for, save_tiny

from hsformat.problems import HsError
from hsformat.record import Generation
from hsformat_extractors import _preflight
from hsformat_extractors._capture import Capturer
from hsformat_extractors._probe import last_convention
from hsformat_extractors.transformers import TransformersExtractor

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def load_codes(request) -> list[str]:
    with pytest.raises(HsError) as e:
        TransformersExtractor().load(request)
    return [p.code for p in e.value.problems]


def claims(tiny: TinyModel, part: str, **changes) -> TinyModel:
    inner = getattr(tiny.target, part).model_copy(update=changes)
    return dataclasses.replace(tiny, target=tiny.target.model_copy(update={part: inner}))


@pytest.mark.parametrize(
    ("family", "part", "changes", "code"),
    [
        ("llama", "final_norm", {"unit_offset": True}, "HS205"),
        ("llama", "final_norm", {"kind": "layernorm"}, "HS205"),
        ("llama", "final_norm", {"eps": 1e-5}, "HS205"),
        ("gemma2", "final_norm", {"unit_offset": False}, "HS205"),
        ("gpt2", "final_norm", {"kind": "rmsnorm"}, "HS205"),
        ("gemma2", "head", {"softcap": None}, "HS301"),
        ("gemma2", "head", {"softcap": 50.0}, "HS301"),
        ("llama", "head", {"softcap": 30.0}, "HS301"),
        ("granite", "head", {"scale": 1.0}, "HS301"),
        ("llama", "head", {"bias": True}, "HS301"),
        ("llama", "head", {"padded_vocab": 128}, "HS301"),
        ("gemma3", "embedding", {"scale": 1.0}, "HS301"),
        ("granite", "embedding", {"scale": 1.0}, "HS301"),
        ("gpt2", "embedding", {"scale": 1.1}, "HS301"),
        ("gpt2", "embedding", {"tied": False}, "HS301"),
    ],
)
def test_a_wrong_claim_of_the_target_is_caught(models, family, part, changes, code):
    assert load_codes(request_for(claims(models(family), part, **changes))) == [code]


def test_a_model_that_numbers_its_states_otherwise_is_refused(models):
    """Transformers' Mamba returns the output of its first layer, not the embedding, as hidden_states[0]."""
    assert load_codes(request_for(models("mamba"))) == ["HS204"] * LAYERS


def test_all_wrong_claims_are_returned(models):
    tiny = claims(claims(models("granite"), "head", scale=1.0), "embedding", scale=1.0)
    assert load_codes(request_for(claims(tiny, "final_norm", unit_offset=True))) == ["HS205", "HS301", "HS301"]


@pytest.mark.parametrize("size", [{"num_layers": 3}, {"hidden_size": 64}, {"vocab_size": VOCAB + 1}])
def test_wrong_sizes_are_caught(models, size):
    tiny = models("llama")
    assert load_codes(request_for(dataclasses.replace(tiny, target=tiny.target.model_copy(update=size)))) == ["HS301"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_hook_that_is_off_by_one_layer_is_caught(models, family, monkeypatch):  # TorchSpec#87
    install = Capturer._install

    def shifted(self, capture):
        moved = capture.model_copy(update={"depth": capture.depth + 1})
        install(self, moved)
        site = self._handles.pop()  # the same hook under the name of the capture that was asked for
        site.remove()
        layers = (*self.anatomy.layers, self.anatomy.final_norm)
        self._handles.append(layers[moved.depth].register_forward_pre_hook(
            lambda _m, args, kwargs: self._keep(capture.key, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True))  # fmt: skip

    monkeypatch.setattr(Capturer, "_install", shifted)
    assert load_codes(request_for(models(family), "d1", "d3")) == ["HS204", "HS204"]


def test_a_module_that_does_not_run_is_a_missing_capture(models, monkeypatch):  # sglang#32226, PR#32334
    monkeypatch.setattr(Capturer, "_keep", lambda *_: None)
    assert load_codes(request_for(models("llama"), "d2")) == ["HS109"]


@pytest.mark.parametrize(("tied", "convention"), [(True, "post"), (False, "pre")])
def test_norm_of_the_last_state_is_decided_by_numbers(tmp_path, tied, convention):  # transformers PR#48087
    tiny = save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_last_hidden_states": tied}))
    extractor = TransformersExtractor()
    extractor.load(request_for(tiny))
    assert extractor.producer()["hidden_states_last"] == convention


def test_norm_of_the_last_state_that_numbers_do_not_tell_is_an_error():  # transformers PR#26142
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert last_convention(x, x, 2 * x, tolerance=1e-4) == "pre"
    assert last_convention(2 * x, x, 2 * x, tolerance=1e-4) == "post"
    for last, norm_out in ((x, x), (3 * x, 2 * x), (x * torch.nan, 2 * x)):
        with pytest.raises(HsError) as e:
            last_convention(last, x, norm_out, tolerance=1e-4)
        assert [p.code for p in e.value.problems] == ["HS205"]


def test_a_padded_sequence_that_sees_its_padding_is_caught(models, monkeypatch):  # speculators#279
    from hsformat_extractors import _capture

    real = _capture.call

    def leaking(module, batch, **extra):
        everything = dataclasses.replace(batch, mask_BT=torch.ones_like(batch.mask_BT))
        turned = dataclasses.replace(everything, ids_BT=batch.ids_BT.flip(1))
        return real(module, turned if len(batch.lengths) == 1 else everything, **extra)

    monkeypatch.setattr(_capture, "call", leaking)  # the states pass alone; the probe's reference is as it was
    assert "HS206" in load_codes(request_for(models("llama"), "d2"))


def test_several_residual_streams_have_no_depth(tmp_path):
    import transformers
    from tiny_models import GATED

    config = transformers.Gemma3nTextConfig(**{
        **GATED, "head_dim": 8, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
        "laurel_rank": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * LAYERS,
        "layer_types": ["full_attention"] * LAYERS, "intermediate_size": [64] * LAYERS,
    })  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    target = save_tiny("llama", tmp_path / "other").target
    assert load_codes(request_for(TinyModel(folder=tmp_path, target=target))) == ["HS410"]


def preflight_codes(request) -> list[str]:
    return [p.code for p in TransformersExtractor().preflight(request)]


def test_preflight_returns_all_problems(models):
    request = request_for(models("llama"), "d5", "d3n", batch_tokens=0, device="tpu", speed="high")
    assert preflight_codes(request) == ["HS410", "HS410", "HS410", "HS304", "HS304"]


def test_preflight_refuses_a_device_that_is_not_here(models):
    assert preflight_codes(request_for(models("llama"), device="cuda:99")) == ["HS410"]


@pytest.mark.parametrize(
    "generation",
    [
        Generation(mode="greedy"),
        Generation(mode="greedy", max_new_tokens=4, temperature=0.5),
        Generation(mode="sampled", max_new_tokens=4, seed=1),
        Generation(mode="sampled", max_new_tokens=4, temperature=1.0),
    ],
)
def test_preflight_refuses_a_generation_that_is_not_fully_said(models, generation):
    assert preflight_codes(request_for(models("llama"), generation=generation)) == ["HS410"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "HS410"),
        ({"model_type": "own"}, "HS410"),
        ({"model_type": "vit"}, "HS410"),
        ([], "HS410"),
        ("{", "HS602"),
        (None, "HS602"),
    ],
)
def test_preflight_refuses_a_folder_that_needs_code_or_is_no_causal_lm(models, tmp_path, config, code):
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    request = request_for(dataclasses.replace(models("llama"), folder=tmp_path))
    assert preflight_codes(request) == [code]


def test_preflight_names_the_pip_command_for_what_is_not_installed(models, monkeypatch):
    monkeypatch.setattr(_preflight.importlib.util, "find_spec", lambda _name: None)
    (found,) = TransformersExtractor().preflight(request_for(models("llama")))
    assert found.code == "HS410"
    assert found.fix == "pip install 'hsformat[transformers]'"


def test_captures_are_named_by_key():
    assert [c.key for c in captures("d0", "d4", "d4n")] == ["d0", "d4", "d4n"]
