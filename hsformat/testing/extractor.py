"""The conformance suite of extractors: subclass it, say what to test, and pytest does the rest.

::

    class TestMyExtractor(ExtractorConformance):
        extractor = MyExtractor
        model = Path("tests/data/tiny-llama")

Nothing is assumed of the engine but :class:`hsformat.extraction.protocol.Extractor`: it may live in another process and
need not be built on torch. States are compared with those of Transformers in float32 on the CPU, so the model has to be
one that it can run. One extractor is loaded at a time, and kept from test to test while the request is the same; tests
of one request stand together, since an engine may take a minute to load.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from hsformat.dtypes import to_float32
from hsformat.extraction.protocol import ExtractionRequest, Extractor, Rejected
from hsformat.layout import parse_capture_key
from hsformat.problems import CODES, HsError
from hsformat.record import Generation, Record, TokenSample
from hsformat.testing._harness import Harness, errors, row_errors

__all__ = ["ExtractorConformance"]

ENDLESS = 20_000
"""An extractor that takes so many samples after it was asked to stop does not stop."""


class ExtractorConformance(Harness):
    """What every extractor must do, as tests. Subclasses name ``extractor`` and ``model``, and may narrow the rest.

    The attributes and methods that they may set are those of :class:`hsformat.testing._harness.Harness`.
    """

    def test_it_is_an_extractor(self) -> None:
        """It has the members of the protocol; construction takes no argument and loads nothing."""
        extractor = type(self).extractor()
        assert isinstance(extractor, Extractor)
        assert extractor.name
        assert extractor.name == extractor.name.lower()
        extractor.close()
        extractor.close()

    def test_an_unknown_option_is_refused_before_loading(self) -> None:
        """``preflight`` returns problems of known codes; it does not raise and does not ignore."""
        request = self.request()
        wrong = ExtractionRequest(**{**vars(request), "options": {**self.options, "no_such_option": "1"}})
        problems = errors(type(self).extractor().preflight(wrong))
        assert problems, "an option that no engine has was accepted"
        assert {p.code for p in problems} <= set(CODES)

    def test_another_target_than_described_is_refused(self) -> None:
        """``preflight`` or ``load`` refuse a contract of another width: states are proved, not trusted."""
        request = self.request()
        target = request.target.model_copy(update={"hidden_size": request.target.hidden_size * 2})
        wrong = ExtractionRequest(**{**vars(request), "target": target})
        extractor = type(self).extractor()
        if not errors(extractor.preflight(wrong)):
            with pytest.raises(HsError):
                extractor.load(wrong)
        extractor.close()

    def test_states_equal_those_of_transformers(self) -> None:
        """Depth by depth, row by row, before and after the final norm, in every dtype."""
        for dtype in self.dtypes:
            request = self.request(dtype=dtype)
            for record in self.records(request, self.samples(5, 17, 9)).values():
                self.assert_states(record, dtype, request.target.num_layers)

    def test_every_capture_is_nearest_to_its_own_depth(self) -> None:
        """A depth off by one, a missing residual or a norm too many shows whatever the tolerance is."""
        for dtype in self.dtypes:
            for record in self.records(self.request(dtype=dtype), self.samples(5, 17, 9)).values():
                own = self.reference().states(record.input_ids)
                for key, h in record.hidden.items():
                    assert len(h) == record.num_tokens, f"{record.id}: {key} has {len(h)} rows"
                    distance = {k: float(np.median(row_errors(h, want))) for k, want in own.items()}
                    assert min(distance, key=distance.__getitem__) == key, f"{key} is nearest to another: {distance}"

    def test_ids_mask_and_provenance_are_the_samples(self) -> None:
        """Nothing is shifted, cut or added, and the caller's arrays are left alone."""
        samples = self.samples(5, 17, 9)
        before = [(s.input_ids.copy(), s.loss_mask.copy()) for s in samples]
        records = self.records(self.request(), samples)
        for sample, (ids, mask) in zip(samples, before, strict=True):
            record = records[sample.id]
            np.testing.assert_array_equal(sample.input_ids, ids)
            np.testing.assert_array_equal(record.input_ids, ids)
            np.testing.assert_array_equal(record.loss_mask, mask)
            assert record.position_ids is None or record.position_ids.tolist() == list(range(len(ids)))
            assert record.provenance == sample.provenance
            assert record.source_digest == sample.source_digest

    def test_a_record_in_a_batch_is_the_record_alone(self) -> None:
        """Padding and neighbours do not reach a record (speculators#279)."""
        request, n = self.request(), self.target(self.dtypes[0]).num_layers
        samples = self.samples(3, 20, 11, 7)
        together = self.records(request, samples)
        for sample in samples:
            alone = self.records(request, [sample])[sample.id]
            for key, h in together[sample.id].hidden.items():
                limit = self.tolerance(self.dtypes[0], parse_capture_key(key)[0], n)
                assert h.shape == alone.hidden[key].shape
                assert row_errors(h, to_float32(alone.hidden[key])).max() <= 2 * limit, f"{sample.id}: {key}"

    def test_twelve_samples_of_any_order_are_matched_by_id(self) -> None:
        """Ids whose order as text is not that of their numbers (speculators PR#365)."""
        request, n = self.request(), self.target(self.dtypes[0]).num_layers
        samples = self.samples(*range(2, 14), seed=1)
        shuffled = [samples[i] for i in np.random.default_rng(1).permutation(12)]
        records = self.records(request, shuffled)
        for sample in samples:
            np.testing.assert_array_equal(records[sample.id].input_ids, sample.input_ids)
            self.assert_states(records[sample.id], self.dtypes[0], n)

    def test_edges_of_chunks_and_pages(self) -> None:
        """1 token, and one below, at and above a multiple of 128: no row is lost or doubled."""
        request, n = self.request(), self.target(self.dtypes[0]).num_layers
        for record in self.records(request, self.samples(1, 127, 128, 129, seed=2)).values():
            assert record.num_states == record.num_tokens
            self.assert_states(record, self.dtypes[0], n)

    def test_a_sample_that_cannot_be_run_is_rejected_and_the_others_are_not(self) -> None:
        """No token, ids outside the vocabulary, too long: a rejection with problems, never a cut or a crash."""
        vocab = self.target(self.dtypes[0]).vocab_size
        (long,) = self.samples(self.max_positions() + 1, seed=3)
        bad = {
            "empty": (np.zeros(0, np.int32), "HS102"),
            "outside": (np.array([1, vocab], np.int32), "HS105"),
            "negative": (np.array([1, -100], np.int32), "HS105"),
            "long": (long.input_ids, "HS106"),
        }
        wrong = [
            TokenSample(id=name, input_ids=ids, loss_mask=np.ones(len(ids), np.uint8)) for name, (ids, _) in bad.items()
        ]
        good = self.samples(5, 6)
        out = self.extract(self.request(), [wrong[0], good[0], *wrong[1:], good[1]])
        for name, (_, code) in bad.items():
            found = out[name]
            assert isinstance(found, Rejected), f"{name!r} was not rejected"
            assert code in {p.code for p in errors(found.problems)}, f"{name!r}: {found.problems}"
        for sample in good:
            record = out[sample.id]
            assert isinstance(record, Record), f"{sample.id!r} was rejected"
            np.testing.assert_array_equal(record.input_ids, sample.input_ids)

    def test_producer_is_json_and_names_the_engine(self) -> None:
        """Provenance that a store can hold."""
        extractor = self.load(self.request())
        told = extractor.producer()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert told["name"] == extractor.name

    def test_closing_twice_and_loading_again(self) -> None:
        """``close`` frees the target and may be called twice; the same object can be loaded again."""
        request = self.request()
        extractor = self.load(request)
        extractor.close()
        extractor.close()
        type(self)._loaded = None
        extractor.load(request)
        assert len(list(extractor.extract(iter(self.samples(4)), stopping=lambda: False))) == 1
        extractor.close()

    def test_only_requested_captures_come_back(self) -> None:
        """By key, ascending, NumPy, in the dtype that the target ran in."""
        for dtype in self.dtypes:
            target = self.target(dtype)
            keys = self.keys(target)[1::2]
            request = self.request(*keys, dtype=dtype)
            for record in self.records(request, self.samples(4, 6)).values():
                assert list(record.hidden) == keys
                for key, h in record.hidden.items():
                    assert (h.dtype.name, h.shape) == (dtype, (record.num_tokens, target.hidden_size)), key
                self.assert_states(record, dtype, target.num_layers)

    def test_records_own_their_arrays(self) -> None:
        """What comes later does not change what came before: no buffer is used twice."""
        request = self.request(batch_tokens=16)
        kept = []
        for found in self.load(request).extract(iter(self.samples(*[8] * 6)), stopping=lambda: False):
            assert isinstance(found, Record)
            kept.append((found, {k: h.tobytes() for k, h in found.hidden.items()}))
        assert all(h.tobytes() == was[k] for record, was in kept for k, h in record.hidden.items())

    def test_it_stops_when_asked(self) -> None:
        """What is in hand is finished and yielded; nothing new is begun, though more samples are there."""
        taken: list[str] = []
        done: list[Record | Rejected] = []

        def endless() -> Iterator[TokenSample]:
            (template,) = self.samples(8)
            for i in itertools.count():
                assert i < ENDLESS, "samples are taken without end after stopping() was true"
                taken.append(f"e{i}")
                yield TokenSample(id=f"e{i}", input_ids=template.input_ids, loss_mask=template.loss_mask)

        extractor = self.load(self.request(batch_tokens=64))
        for found in extractor.extract(endless(), stopping=lambda: bool(done)):
            assert isinstance(found, Record)
            assert found.num_states == found.num_tokens == 8
            done.append(found)
        assert 0 < len(done) <= len(taken)
        assert list(extractor.extract(endless(), stopping=lambda: True)) == [], "a run that was stopped before it began"

    def test_exactly_the_generated_tokens_are_supervised(self) -> None:
        """The record begins with the prompt; all after it, and nothing else, is supervised and has the right states."""
        if self.generation is None:
            greedy = Generation(mode="greedy", max_new_tokens=4)
            assert errors(type(self).extractor().preflight(self.request(generation=greedy)))
            return
        request, n = self.request(generation=self.generation), self.target(self.dtypes[0]).num_layers
        prompts = self.samples(4, 9, 6, seed=4, prompt=True)
        records = self.records(request, prompts)
        for prompt in prompts:
            record, start = records[prompt.id], len(prompt)
            assert record.input_ids[:start].tolist() == prompt.input_ids.tolist()
            new = record.num_tokens - start
            assert 0 < new <= (self.generation.max_new_tokens or 0)
            assert record.loss_mask.tolist() == [0] * start + [1] * new
            assert record.num_states in (record.num_tokens, record.num_tokens - 1)
            assert record.provenance.generation == self.generation
            assert record.source_digest == prompt.source_digest
            self.assert_states(record, self.dtypes[0], n)
            if self.generation.mode == "greedy":
                self._assert_greedy(record, start)

    def _assert_greedy(self, record: Record, start: int) -> None:
        """Each answered token has the highest logit, up to what the dtype rounds away."""
        logits = self.reference().logits(record.input_ids)[start - 1 : -1]
        chosen = np.take_along_axis(logits, record.input_ids[start:, None].astype(np.int64), axis=1)[:, 0]
        spread = logits.max(axis=1) - logits.mean(axis=1)
        short = (logits.max(axis=1) - chosen) / spread
        limit = 2 * self.tolerance(self.dtypes[0], 1, 1)
        assert (short <= limit).all(), f"{record.id}: token {start + int(short.argmax())} is not the target's own"
