"""The target writes the answers: its own tokens alone are supervised, and nothing of the folder leaks in."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import VOCAB, TinyModel, request_for, save_tiny

from hsformat.extraction.protocol import Rejected
from hsformat.problems import HsError
from hsformat.record import Generation, TokenSample
from hsformat_extractors._generate import _SampleNoise, prompt_width
from hsformat_extractors.transformers import TransformersExtractor

pytestmark = pytest.mark.needs("torch")

GREEDY = Generation(mode="greedy", max_new_tokens=12)
SAMPLED = Generation(mode="sampled", max_new_tokens=12, temperature=1.0, top_p=0.9, top_k=50, seed=7)


def prompts(*lengths: int) -> list[TokenSample]:
    rng = np.random.default_rng(3)
    return [
        TokenSample(id=f"p{i}", input_ids=rng.integers(3, VOCAB, n).astype(np.int32), loss_mask=np.zeros(n, np.uint8))
        for i, n in enumerate(lengths)
    ]


def run(tiny: TinyModel, samples: list[TokenSample], generation: Generation, **options: Any) -> dict[str, Any]:
    extractor = TransformersExtractor()
    request = request_for(tiny, "d0", "d2", "d4", generation=generation, **{"batch_tokens": 400, **options})
    assert extractor.preflight(request) == []
    extractor.load(request)
    return {(r.sample.id if isinstance(r, Rejected) else r.id): r for r in extractor.extract(samples)}


def plain_greedy(tiny: TinyModel, ids: np.ndarray, eos: int = 2) -> list[int]:
    """Argmax by argmax, without generate and without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder).eval()
    out = ids.tolist()
    for _ in range(12):
        with torch.inference_mode():
            out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
        if out[-1] == eos:
            break
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> TinyModel:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "granite"])
def test_greedy_answers_are_those_of_the_plain_model(tmp_path, family):
    tiny = save_tiny(family, tmp_path)
    samples = prompts(4, 9, 6)
    for sample in samples:
        record = run(tiny, samples, GREEDY)[sample.id]
        assert record.input_ids.tolist() == plain_greedy(tiny, sample.input_ids)


def test_exactly_the_generated_tokens_are_supervised_and_have_states(llama):
    """speculators PR#729, #774, #794: the mask is the prompt's length, not a search in rendered text."""
    for sample in (samples := prompts(4, 9)):
        record = run(llama, samples, GREEDY)[sample.id]
        n = len(record.input_ids)
        assert record.loss_mask.tolist() == [0] * len(sample) + [1] * (n - len(sample))
        assert record.num_states == n > len(sample)
        assert record.provenance.generation == GREEDY
        assert record.source_digest == sample.source_digest


def test_an_answer_ends_with_the_first_id_that_ends_a_turn(llama, tmp_path):
    sample = prompts(6)[0]
    answer = plain_greedy(llama, sample.input_ids, eos=-1)[6:]
    stop = answer[3]
    tiny = save_tiny("llama", tmp_path, eos_token_id=[2, stop])
    record = run(tiny, [sample, *prompts(3, 5)[1:]], GREEDY)["p0"]
    assert record.input_ids[6:].tolist() == answer[: answer.index(stop) + 1]
    assert record.loss_mask[-1] == 1


def test_an_answer_that_is_nothing_but_the_end_of_the_turn_is_rejected(llama, tmp_path):
    sample = prompts(6)[0]
    tiny = save_tiny("llama", tmp_path, eos_token_id=plain_greedy(llama, sample.input_ids, eos=-1)[6])
    found = run(tiny, [sample], GREEDY)["p0"]
    assert isinstance(found, Rejected)
    assert [p.code for p in found.problems] == ["HS103"]


def test_a_model_without_an_end_of_turn_is_refused(tmp_path):
    tiny = save_tiny("llama", tmp_path, eos_token_id=None)
    with pytest.raises(HsError) as e:
        run(tiny, prompts(4), GREEDY)
    assert [p.code for p in e.value.problems] == ["HS410"]


@pytest.mark.parametrize("generation", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_folders_generation_config_does_not_leak(llama, tmp_path, generation):
    tiny = save_tiny("llama", tmp_path)
    leaks = {
        "repetition_penalty": 5.0, "do_sample": True, "temperature": 9.0, "top_k": 3, "min_new_tokens": 11,
        "no_repeat_ngram_size": 2, "suppress_tokens": list(range(3, 60)), "num_beams": 2, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(leaks))
    want, got = (run(t, prompts(4, 9), generation) for t in (llama, tiny))
    for key in want:
        assert got[key].input_ids.tolist() == want[key].input_ids.tolist()


@pytest.mark.parametrize("generation", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_does_not_depend_on_what_is_generated_beside_it(llama, generation):
    samples = prompts(4, 9, 6, 5, 70, 66)
    whole = run(llama, samples, generation)
    for part in ([samples[3], samples[5]], samples[::-1], [samples[0]]):
        for key, record in run(llama, part, generation).items():
            assert record.input_ids.tolist() == whole[key].input_ids.tolist()


def test_sampled_answers_depend_on_seed_and_id(llama):
    first, *_ = prompts(8)
    twin = TokenSample(id="twin", input_ids=first.input_ids, loss_mask=first.loss_mask)
    a, again = (run(llama, [first, twin], SAMPLED) for _ in range(2))
    b = run(llama, [first], SAMPLED.model_copy(update={"seed": 8}))
    assert a["p0"].input_ids.tolist() == again["p0"].input_ids.tolist()
    assert a["p0"].input_ids.tolist() != a["twin"].input_ids.tolist()
    assert a["p0"].input_ids.tolist() != b["p0"].input_ids.tolist()


def test_noise_draws_from_the_softmax():
    scores = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    noise = _SampleNoise([0])
    drawn = torch.cat([noise(torch.zeros(1, 1), scores).argmax(-1) for _ in range(4000)])
    share = torch.bincount(drawn, minlength=4) / 4000
    assert share[3] == 0
    np.testing.assert_allclose(share.numpy(), scores.softmax(-1)[0].numpy(), atol=0.03)


def test_a_prompt_without_room_for_the_answer_is_rejected_and_the_others_are_not(llama):
    out = run(llama, prompts(117, 8, 116), GREEDY)
    assert [k for k, r in out.items() if isinstance(r, Rejected)] == ["p0"]
    assert [p.code for p in out["p0"].problems] == ["HS106"]


def test_generation_is_halved_for_lack_of_memory(llama, monkeypatch):
    from hsformat_extractors._generate import Generator

    generate, tried = Generator.__call__, []

    def small(self, samples, rows):
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, samples, rows)

    monkeypatch.setattr(Generator, "__call__", small)
    assert len(run(llama, prompts(4, 9, 6), GREEDY, batch_tokens=600)) == 3
    assert tried[0] > 2
    assert max(tried[-2:]) <= 2


def test_the_width_of_a_prompt_leaves_room_for_padding():
    assert [prompt_width(n) for n in (1, 63, 64, 65)] == [64, 64, 128, 128]
