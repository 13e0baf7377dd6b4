"""What the conformance suite of extractors works with: requests, samples, the loaded extractor, the comparison.

Apart from the tests (``extractor``), which use nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture, TargetModel
from hsformat.dtypes import to_float32
from hsformat.extraction.protocol import ExtractionRequest, Extractor, Rejected
from hsformat.layout import capture_key, parse_capture_key
from hsformat.problems import Problem, Severity
from hsformat.record import Generation, Record, TokenSample
from hsformat.testing._reference import Reference

__all__ = ["GIVEN", "Harness", "errors", "row_errors"]

GIVEN = Generation(mode="none")


class Harness:
    """What is tested, and how it is run.

    Attributes
    ----------
    extractor
        The class, or any function without arguments that returns an extractor.
    model
        Folder of a small target; random weights will do, if the norms' weights are not all 1.
    options
        Of the engine, as in ``ExtractionRequest.options``.
    dtypes
        In which the target is run; the first is used where one is enough.
    depths
        That the engine can give; None: 0..N. ``N`` counts before the final norm.
    normed
        Whether the engine can give depth N after the final norm.
    generation
        What to generate; None: the engine cannot, and the tests of it assert that ``preflight`` says so.
    max_positions
        The longest sample, prompt and answer together, that the target takes; one that is longer must be rejected.
    vocab_size
        Ids of samples are drawn below it.
    batch_tokens
        Of the requests.
    """

    extractor: ClassVar[Callable[[], Extractor]]
    model: ClassVar[Path]
    options: ClassVar[Mapping[str, str]] = {}
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    depths: ClassVar[tuple[int, ...] | None] = None
    normed: ClassVar[bool] = True
    generation: ClassVar[Generation | None] = Generation(mode="greedy", max_new_tokens=8)
    batch_tokens: ClassVar[int] = 512

    _loaded: ClassVar[tuple[ExtractionRequest, Extractor] | None] = None
    _reference: ClassVar[Reference | None] = None

    # What a subclass may override besides.

    def target(self, dtype: str) -> TargetModel:
        """Return what the contract says of the target; by default what its folder says."""
        from hsformat.target import describe

        return describe(self.model, dtype=dtype).model

    def max_positions(self) -> int:
        """Return the longest sample that the target takes; by default what its config says."""
        from hsformat.target import describe

        found = describe(self.model).max_positions
        assert found is not None, "the model's config states no max_position_embeddings: override max_positions()"
        return found

    def tolerance(self, dtype: str, depth: int, num_layers: int) -> float:
        """Return the allowed relative L2 error of a row, against float32.

        The defaults leave room above what Transformers itself shows, and grow with the square root of the depth. Seen
        on SmolLM2-135M, 30 layers, CPU, random ids: float32 1.5e-6, float16 8.1e-3, bfloat16 0.085; and in single rows
        where a massive activation arises 2.6e-5 in float32 (depth 12) and 0.19 in bfloat16 (depth 10).
        """
        del num_layers
        return {"float32": 3e-5, "float16": 8e-3, "bfloat16": 6e-2}[dtype] * float(np.sqrt(1 + depth))

    # Machinery.

    @classmethod
    def teardown_class(cls) -> None:
        """Close what is still loaded."""
        loaded, cls._loaded, cls._reference = cls._loaded, None, None
        if loaded is not None:
            loaded[1].close()

    def keys(self, target: TargetModel) -> list[str]:
        """Return the keys of all captures that the engine can give."""
        n = target.num_layers
        keys = [capture_key(d) for d in (range(n + 1) if self.depths is None else self.depths)]
        return [*keys, capture_key(n, normed=True)] if self.normed else keys

    def request(
        self, *keys: str, dtype: str | None = None, generation: Generation = GIVEN, batch_tokens: int | None = None
    ) -> ExtractionRequest:
        """Return a request for these captures; none named: all that the engine can give."""
        target = self.target(dtype or self.dtypes[0])
        parsed = [parse_capture_key(k) for k in keys or self.keys(target)]
        return ExtractionRequest(
            model=self.model,
            target=target,
            captures=tuple(
                Capture(depth=d, norm="final" if normed else "none", dtype=target.dtype) for d, normed in parsed
            ),
            generation=generation,
            batch_tokens=batch_tokens or self.batch_tokens,
            options=self.options,
        )

    def load(self, request: ExtractionRequest) -> Extractor:
        """Return the extractor loaded for a request, after ``preflight``; that of the test before if it can be kept."""
        cls = type(self)
        if cls._loaded is not None and cls._loaded[0] == request:
            return cls._loaded[1]
        if cls._loaded is not None:
            cls._loaded[1].close()
            cls._loaded = None
        extractor = cls.extractor()
        problems = errors(extractor.preflight(request))
        assert not problems, "preflight refuses a request that can be done:\n" + "\n".join(map(str, problems))
        extractor.load(request)
        cls._loaded = (request, extractor)
        return extractor

    def extract(self, request: ExtractionRequest, samples: Iterable[TokenSample]) -> dict[str, Record | Rejected]:
        """Load and run; return what came back by id, after checking that each sample gave exactly one thing."""
        asked = list(samples)
        out: dict[str, Record | Rejected] = {}
        for found in self.load(request).extract(iter(asked), stopping=lambda: False):
            record_id = found.sample.id if isinstance(found, Rejected) else found.id
            assert record_id not in out, f"{record_id!r} came back twice"
            out[record_id] = found
        assert sorted(out) == sorted(s.id for s in asked), "not one record or rejection for each sample"
        return out

    def records(self, request: ExtractionRequest, samples: Iterable[TokenSample]) -> dict[str, Record]:
        """As :meth:`extract`; no sample may be rejected."""
        out = self.extract(request, samples)
        rejected = {k: [str(p) for p in r.problems] for k, r in out.items() if isinstance(r, Rejected)}
        assert not rejected, f"rejected samples that can be run: {rejected}"
        return {k: r for k, r in out.items() if isinstance(r, Record)}

    def samples(self, *lengths: int, seed: int = 0, prompt: bool = False) -> list[TokenSample]:
        """Return samples of these lengths: random ids, the second half supervised (nothing in a prompt)."""
        rng = np.random.default_rng(seed)
        vocab = self.target(self.dtypes[0]).vocab_size
        out = []
        for i, n in enumerate(lengths):
            mask = np.zeros(n, np.uint8)
            mask[n if prompt else n // 2 :] = 1
            ids = rng.integers(min(3, vocab - 1), vocab, n).astype(np.int32)
            out.append(TokenSample(id=f"s{i}-é", input_ids=ids, loss_mask=mask))
        return out

    def reference(self) -> Reference:
        """Return Transformers' own states of the model, in float32; loaded once."""
        cls = type(self)
        if cls._reference is None:
            cls._reference = Reference(self.model)
        return cls._reference

    def assert_states(self, record: Record, dtype: str, num_layers: int) -> None:
        """Compare every row of every capture with Transformers' own state of the same token and depth."""
        own = self.reference().states(record.input_ids)
        for key, h in record.hidden.items():
            want = own[key][: len(h)]
            assert h.shape == want.shape, f"{record.id}: {key} is {list(h.shape)}, not {list(want.shape)}"
            error = row_errors(h, want)
            worst, limit = int(error.argmax()), self.tolerance(dtype, parse_capture_key(key)[0], num_layers)
            assert error[worst] <= limit, (
                f"{record.id}: {key} row {worst}: relative error {error[worst]:.2g} > {limit:.2g}"
            )


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that refuse."""
    return [p for p in problems if p.severity is Severity.ERROR]


def row_errors(got: npt.NDArray[Any], want: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the relative L2 error of each row."""
    a, b = to_float32(got).astype(np.float64), want.astype(np.float64)
    error: npt.NDArray[np.float64] = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)
    return error
