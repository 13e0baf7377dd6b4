"""Embedding, final norm and head of a target against Transformers, over families that differ in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tiny_models import HIDDEN, LAYERS, VOCAB, save_tiny

from hsformat.dtypes import BFLOAT16
from hsformat.problems import ForeignFileError
from hsformat_trainer.target_head import TargetHead

pytestmark = pytest.mark.needs("torch")


def load(tiny, dtype=torch.float32, **facts):
    return TargetHead.load(tiny.folder, tiny.target.model_copy(update=facts), dtype=dtype, device="cpu")


def test_weights_of_the_target_that_are_not_finite_are_named(tmp_path):
    tiny = save_tiny("llama", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ForeignFileError) as e:
        load(tiny)
    assert [(p.code, p.where) for p in e.value.problems] == [("HS201", f"{tmp_path}: final_norm")]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "granite", "cohere", "gpt2"])
def test_logits_and_depth_0_equal_transformers(family, tmp_path):
    """TorchSpec#169: the head was applied to states without the final norm; both kinds are told apart here."""
    tiny = save_tiny(family, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, VOCAB, (1, 7))
    norm = next(m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in ("norm", "ln_f", "final_layer_norm"))
    seen = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    head = load(tiny)
    torch.testing.assert_close(head.logits(seen[0], normed=False), out.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(out.hidden_states[LAYERS], normed=True), out.logits, rtol=1e-4, atol=1e-4)
    rows = torch.tensor([5, 2, 90])
    torch.testing.assert_close(
        head.logits(seen[0], normed=False, rows=rows), out.logits[..., rows], rtol=1e-4, atol=1e-4
    )
    if family != "gpt2":  # which adds a learned position to depth 0
        torch.testing.assert_close(head.embed(ids), out.hidden_states[0])
    assert not head.state_dict()
    assert not list(head.parameters())


def test_rows_that_pad_the_vocabulary_never_win(tmp_path):
    tiny = save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = np.random.default_rng(0).standard_normal((1, HIDDEN)).astype(np.float32)
    pads = np.repeat(100 * last, 3, 0)  # rows that would win by far
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = np.concatenate((tensors[name], pads))
    save_file(tensors, tmp_path / "model.safetensors")
    head = load(tiny, head=tiny.target.head.model_copy(update={"padded_vocab": VOCAB + 3}))
    logits = head.logits(torch.from_numpy(last), normed=True)
    expected = last @ tensors["lm_head.weight"][:VOCAB].T
    assert logits.shape == (1, VOCAB)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert head.embed_weight.shape == head.head_weight.shape == (VOCAB, HIDDEN)


@pytest.mark.parametrize("capped", [False, True])
def test_split_head_gives_the_same_logits(capped, tmp_path):
    tiny = save_tiny("gemma2" if capped else "llama", tmp_path)
    head = load(tiny)
    hidden = head.final_norm(torch.randn(6, HIDDEN))
    ids = torch.tensor([0, 3, 4, 50, 95])
    split = head.split(ids, torch.float32)
    assert head.split(ids, torch.float32) is split
    whole = head.logits(hidden, normed=True)
    inside = head.shaped(hidden @ split.inside.T, split.inside_bias)
    outside = head.shaped(hidden @ split.outside.T, split.outside_bias)
    torch.testing.assert_close(inside, whole[:, ids])
    torch.testing.assert_close(outside, whole[:, split.outside_ids])
    assert sorted([*ids.tolist(), *split.outside_ids.tolist()]) == list(range(VOCAB))
    assert len(head.split(None, torch.float32).outside_ids) == 0


def test_final_norm_that_is_not_found_is_an_error_never_ones(tmp_path):
    """speculators PR#1038, Model-Optimizer PR#1846: no norm was applied where none was found, without a word."""
    tiny = save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.another_norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ForeignFileError) as e:
        load(tiny)
    assert [p.code for p in e.value.problems] == ["HS411"]


def test_folder_of_another_model_is_refused(tmp_path):
    tiny = save_tiny("llama", tmp_path)
    with pytest.raises(ForeignFileError) as e:
        load(tiny, hidden_size=HIDDEN * 2)
    assert [p.code for p in e.value.problems] == ["HS409"]
    with pytest.raises(ForeignFileError) as e:
        load(tiny, vocab_size=VOCAB + 1)
    assert [p.code for p in e.value.problems] == ["HS409"]
    with pytest.raises(ForeignFileError) as e:
        load(tiny, head=tiny.target.head.model_copy(update={"bias": True}))
    assert [p.code for p in e.value.problems] == ["HS411"]


def test_dtype_is_that_of_the_folder_unless_another_is_asked_for(tmp_path):
    tiny = save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v.astype(BFLOAT16) for k, v in tensors.items()}, tmp_path / "model.safetensors")
    stored, wide = load(tiny, dtype=None), load(tiny)
    assert (stored.embed_weight.dtype, wide.embed_weight.dtype) == (torch.bfloat16, torch.float32)
    last = torch.randn(3, HIDDEN)
    torch.testing.assert_close(stored.logits(last, normed=False), wide.logits(last, normed=False))
