"""The Transformers extractor: any causal LM of one residual stream, on a CPU or one CUDA device.

States are read by hooks on the modules between which the residual stream flows; which modules these are is found and
proved from numbers when the model is loaded (``_capture``, ``_probe``). The head is never run in the states pass, and
nothing but the requested captures is kept. torch and Transformers are imported when a model is loaded, not before.

With generation, the target first writes the answers (``_generate``), then all T tokens of prompt and answer are run
again for their states, so that a record has T rows and its states do not depend on how its tokens came about.

Options: ``device`` (``auto``, ``cpu``, ``cuda``, ``cuda:N``), ``attention`` (the name of an implementation, which is
passed on: ``eager``, ``sdpa``, ``flash_attention_2``).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hsformat.dtypes import as_array
from hsformat.extraction.protocol import ExtractionRequest, Rejected
from hsformat.problems import HsError, Problem
from hsformat.record import Record, TokenSample
from hsformat_extractors import _batching, _preflight
from hsformat_extractors._batching import Forward
from hsformat_extractors._fitting import no_answer, no_states, unfit

if TYPE_CHECKING:
    import torch

    from hsformat_extractors._capture import Capturer
    from hsformat_extractors._generate import Generator

__all__ = ["TransformersExtractor"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(kw_only=True)
class _Loaded:
    """A model that passed the probe, and what was found out about it."""

    request: ExtractionRequest
    model: Any
    device: torch.device
    capturer: Capturer
    generator: Generator | None
    max_positions: int | None
    hidden_states_last: str


class TransformersExtractor:
    """Extracts with Transformers. See :class:`hsformat.extraction.protocol.Extractor` and ``Measures``."""

    name = "transformers"

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        """Return all reasons why this request cannot be done, before any weight is loaded."""
        return _preflight.preflight(request)

    def measure(self, model: Path, *, options: Mapping[str, str]) -> dict[str, Any]:
        """Return what :func:`hsformat.target.describe` takes as ``measured``, found by running the target in float32.

        The weights are loaded for it in float32 and freed again.

        Raises
        ------
        ForeignFileError
            HS411, HS602: weights are missing or cannot be read.
        HsError
            HS410: an option, or a target that cannot be described; HS205: its final norm. See ``_measure``.
        """
        if problems := _preflight.preflight_model(model, options):
            raise HsError(problems)
        from hsformat_extractors._load import find_device, free, load_model
        from hsformat_extractors._measure import measure

        device = find_device(options.get("device", "auto"))
        try:
            return measure(load_model(model, dtype="float32", device=device, attention=options.get("attention")))
        finally:
            free(device)

    def load(self, request: ExtractionRequest) -> None:
        """Load the target and prove on a short input that captures are what the request says.

        Raises
        ------
        ForeignFileError
            HS411, HS602: weights are missing or cannot be read.
        HsError
            HS204, HS205, HS206, HS301, HS410: see ``_probe`` and ``_capture.find_anatomy``.
        """
        from hsformat_extractors._capture import Capturer, find_anatomy
        from hsformat_extractors._generate import Generator, end_of_turn_ids
        from hsformat_extractors._load import find_device, load_model
        from hsformat_extractors._probe import check_sizes, probe_batch, prove

        self.close()
        target, generation, options = request.target, request.generation, request.options
        device = find_device(options.get("device", "auto"))
        model = load_model(request.model, dtype=target.dtype, device=device, attention=options.get("attention"))
        if problems := check_sizes(model, target):
            raise HsError(problems)
        batch = probe_batch(target.vocab_size, device=device)
        anatomy = find_anatomy(model, batch, target.num_layers)
        capturer = Capturer(anatomy, request.captures)
        last = prove(model, anatomy, capturer, target, batch)
        generator = None
        if generation.mode != "none":
            generator = Generator(model, generation, end_of_turn_ids(model, request.model), device)
        self._loaded = _Loaded(
            request=request,
            model=model,
            device=device,
            capturer=capturer,
            generator=generator,
            max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
            hidden_states_last=last,
        )

    def extract(
        self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool] = lambda: False
    ) -> Iterator[Record | Rejected]:
        """Yield one record or rejection for each sample; samples are taken a window at a time.

        Once ``stopping()`` is true the batch in hand is finished, and no other begun.

        Raises
        ------
        RuntimeError
            Nothing is loaded.
        """
        loaded = self._require()
        for window in _batching.windows(samples, tokens=_batching.WINDOW_BATCHES * loaded.request.batch_tokens):
            good: list[TokenSample] = []
            for sample in window:
                if problems := unfit(
                    sample,
                    vocab_size=loaded.request.target.vocab_size,
                    max_tokens=loaded.max_positions,
                    max_new_tokens=loaded.request.generation.max_new_tokens or 0,
                    limit="the target's max_position_embeddings",
                ):
                    yield Rejected(sample=sample, problems=problems)
                else:
                    good.append(sample)
            if loaded.generator is None:
                yield from _states(loaded, [Forward.given(s) for s in good], stopping)
            else:
                yield from _answers_and_states(loaded, loaded.generator, good, stopping)
            if stopping():
                return

    def producer(self) -> dict[str, Any]:
        """Return provenance: packages and versions, device, dtype, attention implementation."""
        from hsformat_extractors._load import device_name

        loaded = self._require()
        return {
            "name": self.name,
            "versions": {p: importlib.metadata.version(p) for p in ("transformers", "torch", "hsformat")},
            "device": device_name(loaded.device),
            "dtype": loaded.request.target.dtype,
            "attention": getattr(loaded.model.config, "_attn_implementation", None),
            "batch_tokens": loaded.request.batch_tokens,
            "hidden_states_last": loaded.hidden_states_last,
        }

    def close(self) -> None:
        """Free the target. May be called twice."""
        if self._loaded is None:
            return
        from hsformat_extractors._load import free

        device = self._loaded.device
        self._loaded.capturer.close()
        self._loaded = None
        free(device)

    def _require(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("load() comes first")
        return self._loaded


def _states(loaded: _Loaded, forwards: Iterable[Forward], stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
    for batch in _batching.batches(forwards, limit=loaded.request.batch_tokens):
        if stopping():
            return
        for item, record in _as_memory_allows(lambda part, _: _run(loaded, part), batch, rows=len(batch)):
            yield record if record is not None else _too_large(item.sample, len(item))


def _answers_and_states(
    loaded: _Loaded, generate: Generator, samples: Iterable[TokenSample], stopping: Callable[[], bool]
) -> Iterator[Record | Rejected]:
    """Generate and run each batch before the next is begun, so that little is lost when the process is killed."""
    from hsformat_extractors._generate import generation_batches

    request, new = loaded.request, loaded.request.generation.max_new_tokens or 0
    for batch, rows in generation_batches(samples, limit=request.batch_tokens, max_new_tokens=new):
        if stopping():
            return
        forwards: list[Forward] = []
        for sample, answer in _as_memory_allows(generate, batch, rows=rows):
            if answer is None:
                yield _too_large(sample, len(sample) + new)
            elif generate.is_empty(answer):
                yield no_answer(sample)
            else:
                forwards.append(Forward.answered(sample, answer, request.generation))
        yield from _states(loaded, forwards, lambda: False)  # what is answered is finished


def _run(loaded: _Loaded, batch: Sequence[Forward]) -> list[Record]:
    """Run one batch; each record owns its rows, so that none of them holds the whole batch in memory."""
    from hsformat_extractors._capture import pad

    kept = loaded.capturer.run(pad([f.input_ids for f in batch], device=loaded.device))
    ends = np.cumsum([len(f) for f in batch])
    host = {key: np.split(as_array(rows_SH), ends[:-1]) for key, rows_SH in kept.items()}
    return [
        Record(
            id=f.sample.id,
            input_ids=f.input_ids,
            loss_mask=f.loss_mask,
            hidden={key: parts[i].copy() for key, parts in host.items()},
            provenance=f.provenance,
            source_digest=f.sample.source_digest,
        )
        for i, f in enumerate(batch)
    ]


def _as_memory_allows(
    run: Callable[[Sequence[T], int], Sequence[R]], items: Sequence[T], *, rows: int
) -> Iterator[tuple[T, R | None]]:
    """Run items, ``rows`` at a time; where the device lacks memory in halves, and None for one that does not fit."""
    import torch

    results: Sequence[R] | None = None
    try:
        results = run(items, rows)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    if results is not None:
        yield from zip(items, results, strict=True)
    elif rows == 1:
        yield items[0], None
    else:
        for start in range(0, len(items), half := (rows + 1) // 2):
            yield from _as_memory_allows(run, items[start : start + half], rows=half)


def _too_large(sample: TokenSample, tokens: int) -> Rejected:
    """Reject a sample that does not fit the device by itself."""
    fix = "shorten the sample, or use a device with more memory"
    return no_states(sample, f"out of memory with {tokens} tokens alone", fix)
