"""The Transformers extractor on tiny random models: states against Transformers' own, batching, rejections."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import ALL_KEYS, FAMILIES, LAYERS, VOCAB, TinyModel, request_for, save_tiny

from hsformat.dtypes import to_float32
from hsformat.extraction.protocol import Extractor, Rejected
from hsformat.problems import HsError
from hsformat.record import Record, TokenSample
from hsformat_extractors._batching import Forward, batches, windows
from hsformat_extractors.transformers import TransformersExtractor

pytestmark = pytest.mark.needs("torch")

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Mean relative error of a row after 4 layers: float32 sums in another order in another batch shape (about 1e-6 seen);
bfloat16 rounds to 8 bits some ten times a layer."""


def make_samples(*lengths: int, seed: int = 0) -> list[TokenSample]:
    rng = np.random.default_rng(seed)
    return [
        TokenSample(
            id=f"s{i}",
            input_ids=rng.integers(3, VOCAB, n).astype(np.int32),
            loss_mask=np.r_[np.zeros(n // 2, np.uint8), np.ones(n - n // 2, np.uint8)],
        )
        for i, n in enumerate(lengths)
    ]


def extract(tiny: TinyModel, samples: list[TokenSample], *keys: str, **options: Any) -> dict[str, Any]:
    extractor = TransformersExtractor()
    request = request_for(tiny, *keys, **options)
    assert extractor.preflight(request) == []
    extractor.load(request)
    out = {(r.sample.id if isinstance(r, Rejected) else r.id): r for r in extractor.extract(samples)}
    extractor.close()
    extractor.close()
    return out


def own_states(tiny: TinyModel, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Transformers' hidden states of one sequence alone; the last, which is normed, as d4n."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=tiny.target.dtype).eval()
    with torch.inference_mode():
        states = model(torch.tensor(ids[None].astype(np.int64)), output_hidden_states=True).hidden_states
    keys = [*ALL_KEYS[:LAYERS], f"d{LAYERS}n"]
    return {k: h[0].float().numpy() for k, h in zip(keys, states, strict=True)}


def error(got: np.ndarray, want: np.ndarray) -> float:
    got, want = to_float32(got), to_float32(want)
    return float(np.mean(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> TinyModel:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mamba"])
def test_every_depth_equals_transformers_own_hidden_state(family, tmp_path):  # BaldEagle#18
    tiny = save_tiny(family, tmp_path)
    samples = make_samples(5, 17, 9)
    records = extract(tiny, samples)
    for sample in samples:
        record, own = records[sample.id], own_states(tiny, sample.input_ids)
        assert list(record.hidden) == list(ALL_KEYS)
        np.testing.assert_array_equal(record.input_ids, sample.input_ids)
        for key, want in own.items():
            assert error(record.hidden[key], want) < TOLERANCE["float32"], key
        assert error(record.hidden["d4"], own["d4n"]) > 0.05  # depth N before the norm is another tensor


def test_states_of_a_bfloat16_run_are_bfloat16(tmp_path):
    tiny = save_tiny("llama", tmp_path, dtype="bfloat16")
    (sample,) = make_samples(12)
    record = extract(tiny, [sample])["s0"]
    for key, want in own_states(tiny, sample.input_ids).items():
        assert record.hidden[key].dtype.name == "bfloat16"
        assert error(record.hidden[key], want) < TOLERANCE["bfloat16"]


def test_a_record_in_a_batch_is_the_record_alone(llama):  # speculators#279
    samples = make_samples(3, 20, 11, 7)
    together = extract(llama, samples, batch_tokens=80)
    for sample in samples:
        alone = extract(llama, [sample])[sample.id]
        for key, h in together[sample.id].hidden.items():
            assert error(h, alone.hidden[key]) < TOLERANCE["float32"]


def test_twelve_samples_of_any_order_are_matched_by_id(llama):  # speculators PR#365
    samples = make_samples(*range(2, 14))
    shuffled = [samples[i] for i in np.random.default_rng(1).permutation(12)]
    records = extract(llama, shuffled, "d2", batch_tokens=24)
    assert sorted(records) == sorted(s.id for s in samples)
    for sample in samples:
        record = records[sample.id]
        np.testing.assert_array_equal(record.input_ids, sample.input_ids)
        np.testing.assert_array_equal(record.loss_mask, sample.loss_mask)
        assert record.source_digest == sample.source_digest
        assert record.provenance == sample.provenance
        assert record.position_ids is None
        assert error(record.hidden["d2"], own_states(llama, sample.input_ids)["d2"]) < TOLERANCE["float32"]


def test_only_what_is_asked_for_is_returned_and_owned_by_the_record(llama):  # pytorch#33101
    records = extract(llama, make_samples(4, 6), "d1", "d4n")
    for record in records.values():
        assert list(record.hidden) == ["d1", "d4n"]
        assert all(h.flags.owndata and h.base is None for h in record.hidden.values())


def test_the_states_pass_never_runs_the_head(llama):
    extractor = TransformersExtractor()
    extractor.load(request_for(llama, "d2"))
    head = extractor._loaded.capturer.anatomy.head
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    assert len(list(extractor.extract(make_samples(4, 6)))) == 2
    assert calls == []


def test_memory_is_bounded_by_batch_tokens(llama):
    seen = []
    extractor = TransformersExtractor()
    extractor.load(request_for(llama, "d2", batch_tokens=32))
    extractor._loaded.capturer.anatomy.body.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    list(extractor.extract(make_samples(*[8] * 20, 50)))
    assert seen == [50, *[32] * 5]  # the one sample that is longer runs alone


def test_a_bad_sample_is_rejected_and_the_others_are_not(llama):
    bad = make_samples(8)[0]
    long, *good = make_samples(129, 5, 6)
    empty = TokenSample(id="empty", input_ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, np.uint8))
    outside = TokenSample(id="outside", input_ids=np.array([1, VOCAB, -100], np.int32), loss_mask=bad.loss_mask[:3])
    out = extract(llama, [long, empty, *good, outside], "d2")
    codes = {k: [p.code for p in r.problems] for k, r in out.items() if isinstance(r, Rejected)}
    assert codes == {"s0": ["HS106"], "empty": ["HS102"], "outside": ["HS105"]}
    assert out["s0"].problems[0].got == "129 tokens"
    assert all(isinstance(out[s.id], Record) for s in good)


def test_a_batch_that_does_not_fit_is_halved_and_a_sample_alone_is_rejected(llama, monkeypatch):
    from hsformat_extractors._capture import Capturer

    run = Capturer.run

    def small(self, batch):
        if batch.ids_BT.numel() > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, batch)

    extractor = TransformersExtractor()
    extractor.load(request_for(llama, "d2", batch_tokens=100))
    monkeypatch.setattr(Capturer, "run", small)
    out = {
        (r.sample.id if isinstance(r, Rejected) else r.id): r for r in extractor.extract(make_samples(6, 6, 5, 4, 13))
    }
    assert [k for k, r in out.items() if isinstance(r, Rejected)] == ["s4"]
    assert out["s4"].problems[0].code == "HS102"
    assert len(out) == 5


def test_it_is_an_extractor_that_can_be_listed_without_torch():
    assert isinstance(TransformersExtractor(), Extractor)
    code = "import sys, hsformat_extractors.transformers; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_producer_names_versions_device_and_convention(llama):
    extractor = TransformersExtractor()
    with pytest.raises(RuntimeError):
        extractor.producer()
    extractor.load(request_for(llama, "d2", attention="eager"))
    told = extractor.producer()
    assert told["versions"] == {
        "transformers": transformers.__version__, "torch": torch.__version__, "hsformat": told["versions"]["hsformat"]
    }  # fmt: skip
    assert (told["name"], told["device"], told["dtype"], told["attention"]) == (
        "transformers",
        "cpu",
        "float32",
        "eager",
    )
    assert told["hidden_states_last"] == "post"


def test_windows_and_batches_keep_every_sample_once():
    samples = make_samples(*np.random.default_rng(0).integers(1, 40, 200).tolist())
    cut = list(windows(iter(samples), tokens=500))
    assert [s.id for w in cut for s in w] == [s.id for s in samples]
    for window in cut:
        parts = list(batches(map(Forward.given, window), limit=64))
        assert sorted(f.sample.id for b in parts for f in b) == sorted(s.id for s in window)
        assert all(len(b) * max(map(len, b)) <= 64 for b in parts)


def test_a_weight_that_is_missing_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny = save_tiny("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HsError) as e:
        TransformersExtractor().load(request_for(tiny))
    assert [p.code for p in e.value.problems] == ["HS411"]
    assert "model.layers.1.mlp.up_proj.weight" in e.value.problems[0].got


@pytest.mark.parametrize(("left", "code"), [(None, "HS411"), (0, "HS602"), (100, "HS602"), (5000, "HS602")])
def test_weights_that_are_cut_or_absent_are_refused(tmp_path, left, code):
    tiny = save_tiny("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    if left is None:
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(HsError) as e:
        TransformersExtractor().load(request_for(tiny))
    assert [p.code for p in e.value.problems] == [code]
    assert e.value.__cause__ is not None


def test_stopping_finishes_the_batch_in_hand(llama):
    extractor = TransformersExtractor()
    extractor.load(request_for(llama, "d2", batch_tokens=16))
    done: list[str] = []
    for record in extractor.extract(make_samples(*[8] * 10), stopping=lambda: bool(done)):
        done.append(record.id)
    assert len(done) == 2  # two of 8 tokens fit a batch
