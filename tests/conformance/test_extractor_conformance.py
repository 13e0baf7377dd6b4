"""The conformance suite passes for the Transformers extractor, and fails for every misbehaviour that was ever seen."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny_models import VOCAB, save_tiny

from hsformat.contract import Capture
from hsformat.extraction.protocol import Rejected
from hsformat.layout import parse_capture_key
from hsformat.record import Generation, Record, TokenSample
from hsformat.testing import ExtractorConformance
from hsformat.testing._harness import GIVEN
from hsformat_extractors.transformers import TransformersExtractor

pytestmark = pytest.mark.needs("torch")

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny-llama"
SAMPLED = Generation(mode="sampled", max_new_tokens=6, temperature=1.0, seed=7)


class TestTransformers(ExtractorConformance):
    extractor = TransformersExtractor
    model = TINY_LLAMA
    options: ClassVar = {"device": "cpu"}
    dtypes = ("float32", "bfloat16", "float16")


class TestTransformersSampled(ExtractorConformance):
    extractor = TransformersExtractor
    model = TINY_LLAMA
    generation = SAMPLED


class RandomModel(ExtractorConformance):
    """On a random model of another family, whose norm weights are not 1."""

    extractor = TransformersExtractor
    family: ClassVar[str]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _saved(cls, tmp_path_factory):
        sizes = {"n_positions": 160} if cls.family == "gpt2" else {"max_position_embeddings": 160}
        tiny = save_tiny(cls.family, tmp_path_factory.mktemp(cls.family), **sizes)
        cls.model, cls.saved = tiny.folder, tiny.target

    def target(self, dtype):
        return self.saved.model_copy(update={"dtype": dtype})

    def max_positions(self):
        return 160


class TestGemma(RandomModel):
    family = "gemma2"


class TestGpt2(RandomModel):
    family = "gpt2"


class TestGranite(RandomModel):
    family = "granite"


class Misbehaving(TransformersExtractor):
    """Changes the records of a good extractor by ``spoil``; everything else is as it should be."""

    def extract(self, samples, *, stopping=lambda: False):
        yield from map(self.spoil, super().extract(samples, stopping=stopping))

    def spoil(self, found: Any) -> Any:
        return self.spoil_record(found) if isinstance(found, Record) else found

    def spoil_record(self, record: Record) -> Record:
        return record


def changed(record: Record, **changes: Any) -> Record:
    return Record(**{**{name: getattr(record, name) for name in Record.__slots__}, **changes})


def each_capture(edit):
    return lambda _self, record: changed(record, hidden={k: edit(h) for k, h in record.hidden.items()})


class OtherCaptures(Misbehaving):
    """Loads all captures, and gives something else made of them under the keys that were asked for."""

    def load(self, request):
        n = request.target.num_layers
        every = [(d, "none") for d in range(n + 1)] + [(n, "final")]
        captures = tuple(Capture(depth=d, norm=norm, dtype=request.target.dtype) for d, norm in every)
        self.asked, self.n = [c.key for c in request.captures], n
        super().load(dataclasses.replace(request, captures=captures))

    def spoil_record(self, record):
        return changed(record, hidden={k: self.other(record.hidden, k) for k in self.asked})


class OffByOne(OtherCaptures):  # vllm PR#43671
    def other(self, hidden, key):
        depth, normed = parse_capture_key(key)
        return hidden[key if normed else f"d{min(depth + 1, self.n)}"]


class OffByOneDown(OtherCaptures):
    def other(self, hidden, key):
        depth, normed = parse_capture_key(key)
        return hidden[key if normed else f"d{max(depth - 1, 0)}"]


class MissingResidual(OtherCaptures):  # nnsight#337
    def other(self, hidden, key):
        depth, normed = parse_capture_key(key)
        return hidden[key] if normed or not depth else hidden[key] - hidden[f"d{depth - 1}"]


class NormedLast(OtherCaptures):  # transformers#13461
    def other(self, hidden, key):
        return hidden[f"{key}n"] if key == f"d{self.n}" else hidden[key]


class UnnormedLast(OtherCaptures):  # Model-Optimizer PR#1846
    def other(self, hidden, key):
        return hidden[key.removesuffix("n")]


class CaptureTooMany(OtherCaptures):
    spoil_record = Misbehaving.spoil_record


class NeighboursRows(Misbehaving):
    """Rows are those of the record before, as far as that goes."""

    before: Record | None = None

    def spoil_record(self, record):
        other, self.before = self.before, record
        if other is None:
            return record
        n = min(len(other.input_ids), len(record.input_ids))
        return changed(
            record, hidden={k: np.concatenate([other.hidden[k][:n], h[n:]]) for k, h in record.hidden.items()}
        )


class OneNeighboursRow(Misbehaving):
    """Only the last row is another record's."""

    before: Record | None = None

    def spoil_record(self, record):
        other, self.before = self.before, record
        if other is None:
            return record
        return changed(
            record, hidden={k: np.concatenate([h[:-1], other.hidden[k][-1:]]) for k, h in record.hidden.items()}
        )


class ShiftedRows(Misbehaving):
    spoil_record = each_capture(lambda h: np.roll(h, 1, axis=0))


class DroppedLastRow(Misbehaving):
    spoil_record = each_capture(lambda h: h[:-1])


class DoubledRow(Misbehaving):
    spoil_record = each_capture(lambda h: np.concatenate([h, h[-1:]]))


class OtherDtype(Misbehaving):
    spoil_record = each_capture(lambda h: h.astype(np.float64))


class OtherIds(Misbehaving):  # vllm#56417
    def spoil_record(self, record):
        ids = record.input_ids.copy()
        ids[-1] = (ids[-1] + 1) % VOCAB
        return changed(record, input_ids=ids)


class ShiftedMask(Misbehaving):
    def spoil_record(self, record):
        return changed(record, loss_mask=np.append(record.loss_mask[1:], np.uint8(0)))


class MaskOfPrompt(Misbehaving):
    def spoil_record(self, record):
        if record.provenance.generation == GIVEN:
            return record
        return changed(record, loss_mask=np.ones_like(record.loss_mask))


class NotTheTargetsAnswer(Misbehaving):
    """The answer and its states belong together, but another model wrote it."""

    def extract(self, samples, *, stopping=lambda: False):
        generation = self._loaded.request.generation
        if generation == GIVEN:
            yield from super().extract(samples, stopping=stopping)
            return
        prompts = {s.id: s for s in samples}
        other = TransformersExtractor()
        other.load(dataclasses.replace(self._loaded.request, generation=GIVEN))
        for p in prompts.values():
            ids = np.append(p.input_ids, np.full(3, 7, np.int32))
            (r,) = other.extract([TokenSample(id=p.id, input_ids=ids, loss_mask=np.ones(len(ids), np.uint8))])
            mask = np.r_[np.zeros(len(p), np.uint8), np.ones(3, np.uint8)]
            how = p.provenance.model_copy(update={"generation": generation})
            yield changed(r, loss_mask=mask, provenance=how, source_digest=p.source_digest)


class NoSourceDigest(Misbehaving):
    def spoil_record(self, record):
        return changed(record, source_digest=None)


class ClaimsToHaveGenerated(Misbehaving):
    def spoil_record(self, record):
        how = record.provenance.model_copy(update={"generation": SAMPLED})
        return changed(record, provenance=how)


class OneBuffer(Misbehaving):
    """States of every record of a length are written to one buffer (pytorch#33101)."""

    def spoil_record(self, record):
        self.buffers = getattr(self, "buffers", {})
        out = {}
        for key, h in record.hidden.items():
            out[key] = self.buffers.setdefault((key, h.shape), np.empty_like(h))
            out[key][...] = h
        return changed(record, hidden=out)


class DropsOne(Misbehaving):  # speculators PR#365
    def extract(self, samples, *, stopping=lambda: False):
        found = super().extract(samples, stopping=stopping)
        next(found, None)
        yield from found


class TwiceOne(Misbehaving):
    def extract(self, samples, *, stopping=lambda: False):
        for found in super().extract(samples, stopping=stopping):
            yield found
            yield found


class ByOrderOfIds(Misbehaving):  # speculators PR#365: req_10 before req_2
    def extract(self, samples, *, stopping=lambda: False):
        found = list(super().extract(samples, stopping=stopping))
        records = sorted((r for r in found if isinstance(r, Record)), key=lambda r: (len(r.id), r.id))
        names = iter(sorted(r.id for r in records))
        yield from (r for r in found if isinstance(r, Rejected))
        yield from (changed(r, id=next(names)) for r in records)


class NeverStops(Misbehaving):
    def extract(self, samples, *, stopping=lambda: False):
        yield from super().extract(samples, stopping=lambda: False)


class DiesOfABadSample(Misbehaving):
    def spoil(self, found):
        if isinstance(found, Rejected):
            raise IndexError("index out of range in self")
        return found


class CutsLongSamples(Misbehaving):
    def spoil(self, found):
        if isinstance(found, Rejected) and found.problems[0].code == "HS106":
            cut = found.sample.input_ids[:100]
            (record,) = super().extract([dataclasses.replace(found.sample, input_ids=cut, loss_mask=np.ones(100))])
            return record
        return found


class IgnoresOptions(Misbehaving):
    def preflight(self, request):
        return super().preflight(dataclasses.replace(request, options={}))


class RefusesAll(Misbehaving):
    def preflight(self, request):
        return super().preflight(dataclasses.replace(request, options={"x": "y"}))


class TrustsTheContract(Misbehaving):
    def load(self, request):
        size = self.true = getattr(self, "true", 64)
        super().load(dataclasses.replace(request, target=request.target.model_copy(update={"hidden_size": size})))


class ProducerOfObjects(Misbehaving):
    def producer(self):
        return {**super().producer(), "path": Path()}


class ClosesOnce(Misbehaving):
    def close(self):
        if getattr(self, "closed", False):
            raise RuntimeError("closed")
        self.closed = True
        super().close()


STATES = {"test_states_equal_those_of_transformers"}
IDS = {"test_ids_mask_and_provenance_are_the_samples"}
CAUGHT_BY: dict[type[Misbehaving], set[str]] = {
    OffByOne: STATES | {"test_every_capture_is_nearest_to_its_own_depth"},
    OffByOneDown: STATES | {"test_every_capture_is_nearest_to_its_own_depth"},
    MissingResidual: STATES | {"test_every_capture_is_nearest_to_its_own_depth"},
    NormedLast: STATES | {"test_every_capture_is_nearest_to_its_own_depth"},
    UnnormedLast: STATES | {"test_every_capture_is_nearest_to_its_own_depth"},
    CaptureTooMany: {"test_only_requested_captures_come_back"},
    NeighboursRows: STATES | {"test_a_record_in_a_batch_is_the_record_alone"},
    OneNeighboursRow: STATES | {"test_a_record_in_a_batch_is_the_record_alone"},
    ShiftedRows: STATES,
    DroppedLastRow: {"test_edges_of_chunks_and_pages", "test_every_capture_is_nearest_to_its_own_depth"},
    DoubledRow: STATES | {"test_edges_of_chunks_and_pages"},
    OtherDtype: {"test_only_requested_captures_come_back"},
    OtherIds: IDS,
    ShiftedMask: IDS,
    MaskOfPrompt: {"test_exactly_the_generated_tokens_are_supervised"},
    NotTheTargetsAnswer: {"test_exactly_the_generated_tokens_are_supervised"},
    NoSourceDigest: IDS | {"test_exactly_the_generated_tokens_are_supervised"},
    ClaimsToHaveGenerated: IDS,
    OneBuffer: {"test_records_own_their_arrays"},
    DropsOne: STATES | IDS,
    TwiceOne: STATES | IDS,
    ByOrderOfIds: {"test_twelve_samples_of_any_order_are_matched_by_id"},
    NeverStops: {"test_it_stops_when_asked"},
    DiesOfABadSample: {"test_a_sample_that_cannot_be_run_is_rejected_and_the_others_are_not"},
    CutsLongSamples: {"test_a_sample_that_cannot_be_run_is_rejected_and_the_others_are_not"},
    IgnoresOptions: {"test_an_unknown_option_is_refused_before_loading"},
    RefusesAll: STATES,
    TrustsTheContract: {"test_another_target_than_described_is_refused"},
    ProducerOfObjects: {"test_producer_is_json_and_names_the_engine"},
    ClosesOnce: {"test_it_is_an_extractor", "test_closing_twice_and_loading_again"},
}


CRASHES = {DiesOfABadSample: IndexError, ClosesOnce: RuntimeError, ProducerOfObjects: TypeError}
"""What some of them die of; every other one has to be caught by an assertion."""


@pytest.mark.parametrize(
    ("wrong", "test"),
    [(wrong, test) for wrong, tests in CAUGHT_BY.items() for test in sorted(tests)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_misbehaving_extractor_fails(wrong, test):
    suite = type("Suite", (ExtractorConformance,), {"extractor": wrong, "model": TINY_LLAMA})
    with pytest.raises((CRASHES.get(wrong, AssertionError), pytest.fail.Exception)):
        getattr(suite(), test)()
    with contextlib.suppress(RuntimeError):
        suite.teardown_class()


def test_every_test_of_the_suite_has_failed_for_some_extractor():
    tests = {n for n in dir(ExtractorConformance) if n.startswith("test_")}
    assert set().union(*CAUGHT_BY.values()) == tests


def test_an_engine_that_cannot_generate_must_say_so():
    suite = type("Suite", (ExtractorConformance,), {"extractor": TransformersExtractor, "model": TINY_LLAMA})
    suite.generation = None
    with pytest.raises(AssertionError):
        suite().test_exactly_the_generated_tokens_are_supervised()
