"""The probe's tiny targets and drafts, its reference, and what it sees inside a process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from hsformat.engines import inspect
from hsformat.problems import HsError, Severity
from hsformat.target import describe
from hsformat_extractors.probes import tiny
from hsformat_extractors.probes.analysis import TOLERANCE, identify, row_error
from hsformat_extractors.probes.reference import reference
from hsformat_extractors.probes.serve import FEATURES, LOGITS, Job, job_of
from hsformat_extractors.probes.trials import DEPTHS, capture_trials, id_keys
from hsformat_extractors.probes.watch import watching

pytestmark = pytest.mark.needs("torch")

N = DEPTHS[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "target"
    tiny.save_target(folder, "LlamaForCausalLM", N, dtype="float32")
    return folder


def save_draft(folder: Path, ids: list[int]) -> None:
    config = tiny.draft_config(id_keys(ids, len(ids)), dtype="float32")
    tiny.write_draft(folder, config, tiny.draft_weights(len(ids)))


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM",
     "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"],
)  # fmt: skip
def test_depths_of_a_tiny_target_are_far_apart_and_are_transformers_own(architecture, tmp_path):
    tiny.save_target(tmp_path, architecture, N, dtype="float32")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    states = reference(tmp_path, tiny.PROMPT, N).states
    assert list(states) == [*(f"d{d}" for d in range(N + 1)), f"d{N}n"]
    for key, state in states.items():
        assert state.shape == (len(tiny.PROMPT), tiny.HIDDEN)
        assert [s.key for s in identify(state[:, None], states, tolerance=TOLERANCE["bfloat16"])] == [key]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        own = model(torch.tensor([tiny.PROMPT]), output_hidden_states=True).hidden_states
    for d in range(N):
        assert row_error(own[d][0].numpy(), states[f"d{d}"]) < 1e-5
    assert row_error(own[N][0].numpy(), states[f"d{N}n"]) < 1e-5


def test_a_tiny_target_is_a_whole_model_folder(llama):
    described = describe(llama)
    assert (described.model.num_layers, described.model.hidden_size) == (N, tiny.HIDDEN)
    assert described.model.vocab_size == tiny.VOCAB
    assert transformers.AutoTokenizer.from_pretrained(llama).decode([5]) == "w5"


def test_a_target_is_the_same_every_time(llama, tmp_path):
    tiny.save_target(tmp_path, "LlamaForCausalLM", N, dtype="float32")
    a, b = load_file(llama / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert a.keys() == b.keys()
    assert all((a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize("architecture", ["NoSuchModel", "", "LlamaModel", "BertForMaskedLM"])
def test_an_architecture_that_is_none_is_refused(architecture, tmp_path):
    with pytest.raises(HsError) as e:
        tiny.save_target(tmp_path, architecture, N, dtype="float32")
    assert [p.code for p in e.value.problems] == ["HS410"]


def test_no_width_of_the_models_is_taken_for_fc(llama, tmp_path):
    """``watch`` finds ``fc`` by its widths: nothing else may have them, fused projections included."""
    widths = {trial.slots * tiny.HIDDEN for trial in capture_trials()}
    for folder in (llama, tmp_path / "draft"):
        if folder != llama:
            save_draft(folder, [1, 2, 3])
        for name, w in load_file(folder / "model.safetensors").items():
            if w.ndim == 2 and name != "fc.weight" and w.shape[0] == tiny.HIDDEN:
                assert w.shape[1] not in widths, name


@pytest.mark.parametrize(("engine", "version", "aux"), [("vllm", "0.32.0", [2, 4, 7]), ("sglang", "0.5.23", [3, 5, 8])])
def test_a_draft_is_what_hsformat_takes_for_one(engine, version, aux, llama, tmp_path):
    save_draft(tmp_path / "d", [2, 4, 7])
    layout, problems = inspect(engine, draft=tmp_path / "d", target=llama, version=version)
    # It has the ids where either engine looks, and is given to one of them: the other would make other layers of them.
    assert [(p.code, p.severity) for p in problems] == [("HS404", Severity.WARNING)]
    assert layout is not None
    assert [a.depth for a in layout.aux] == aux


def test_the_map_of_a_draft_gives_ids_of_the_target(tmp_path):
    save_draft(tmp_path / "d", [2, 4, 7])
    target_ids = np.arange(tiny.DRAFT_VOCAB) + load_file(tmp_path / "d" / "model.safetensors")["d2t"]
    assert len(set(target_ids.tolist())) == tiny.DRAFT_VOCAB
    assert target_ids.max() < tiny.VOCAB


class Draft(torch.nn.Module):
    """An ``fc`` under another name, beside modules of other widths, called as engines call it."""

    def __init__(self, *, tuples: bool) -> None:
        super().__init__()
        self.combine = torch.nn.Linear(3 * tiny.HIDDEN, tiny.HIDDEN, bias=False)
        self.other = torch.nn.Linear(2 * tiny.HIDDEN, tiny.HIDDEN)
        self.wide = torch.nn.Linear(3 * tiny.HIDDEN, 3 * tiny.HIDDEN)
        self.tuples = tuples

    def forward(self, x):
        y = self.combine(self.wide(x))
        return (y, None) if self.tuples else self.other(torch.cat([y, y], dim=-1))


@pytest.mark.parametrize("tuples", [False, True])
def test_the_input_of_fc_and_logits_are_seen_and_nothing_else(tuples, tmp_path):
    job = Job(target="", draft="", out=str(tmp_path), prompt=tiny.PROMPT, slots=3, hidden=tiny.HIDDEN,
              vocabularies=(tiny.DRAFT_VOCAB,), dtype="float32")  # fmt: skip
    assert job_of(json.loads(json.dumps(asdict(job)))) == job
    draft, head = Draft(tuples=tuples), torch.nn.Linear(tiny.HIDDEN, tiny.DRAFT_VOCAB)
    x = torch.randn(13, 3 * tiny.HIDDEN)
    with torch.inference_mode(), watching(job):
        draft(x[:3])
        draft(x)
        draft(-x)
        y = head(x[:2, : tiny.HIDDEN])
    head(x[:, : tiny.HIDDEN])
    assert {p.name for p in tmp_path.iterdir()} == {FEATURES, LOGITS.format(0)}
    features = np.load(tmp_path / FEATURES)
    assert features.dtype == np.float32
    assert np.allclose(features, draft.wide(x)[:11].detach().numpy(), atol=1e-6)
    assert np.array_equal(np.load(tmp_path / LOGITS.format(0)), y.numpy())
