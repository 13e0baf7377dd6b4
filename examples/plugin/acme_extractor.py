"""An extractor of one's own, whole: pip install ./examples/plugin, then hsformat extract --engine acme ...

Transformers stands for the engine. What is yours is marked; the rest is what every extractor has to do.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hsformat.dtypes import as_array
from hsformat.extraction import ExtractionRequest, Rejected
from hsformat.problems import HsError, Problem, problem
from hsformat.record import Record, TokenSample
from hsformat.target.ends import open_ends
from hsformat.target.rows import read_rows


class AcmeExtractor:
    """Gives states of given tokens, one sample at a time. See hsformat.extraction.Extractor for the protocol."""

    name = "acme"

    def __init__(self) -> None:
        self._model: Any = None
        self._request: ExtractionRequest | None = None

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        """Return everything that cannot be done, before a weight is loaded: nothing is ignored, nothing is guessed."""
        n = request.target.num_layers
        out = [
            problem("HS410", where=f"option {name}", got=name, expected="no options", fix="remove it")
            for name in request.options
        ]
        if request.generation.mode != "none":
            out.append(problem("HS410", where="generation", got=request.generation.mode, expected="none",
                               fix="leave --generate out"))  # fmt: skip
        out += [
            problem("HS410", where=f"capture {c.key}", got="before the final norm", expected=f"d{n}n",
                    fix="say --last post")
            for c in request.captures
            if c.depth == n and c.norm == "none"  # yours: what the engine cannot give
        ]  # fmt: skip
        return out

    def load(self, request: ExtractionRequest) -> None:
        """Load the target, and prove on a few tokens that the numbers are what they are called."""
        self.close()
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(request.model, dtype=request.target.dtype, local_files_only=True)  # yours
        self._request = request
        ids = np.array([1, 2, 3], np.int32)
        shape, depths = [len(ids), request.target.hidden_size], self._depths(ids)
        if wrong := [list(h.shape) for h in depths if list(h.shape) != shape]:
            raise HsError(problem("HS409", where="target", got=wrong[0], expected=shape))
        ends = open_ends(request.model, request.target)  # embedding, final norm and head, read from the folder
        wanted = request.target.embedding.scale * read_rows(ends.embedding, ids)
        if not np.allclose(depths[0].astype(np.float32), wanted, rtol=2e-2, atol=1e-6):
            raise HsError(problem("HS206", where="capture d0", got="other numbers", expected="the embedding's rows"))

    def extract(self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
        """Yield one record or rejection for each sample, in any order."""
        if self._request is None:
            raise RuntimeError("load() comes first")
        for sample in samples if not stopping() else ():
            if problems := self._unfit(sample, self._request):
                yield Rejected(sample=sample, problems=problems)
            else:
                depths = self._depths(sample.input_ids)
                yield Record(
                    id=sample.id,
                    input_ids=sample.input_ids,
                    loss_mask=sample.loss_mask,
                    hidden={c.key: depths[c.depth] for c in self._request.captures},
                    provenance=sample.provenance,
                    source_digest=sample.source_digest,
                )
            if stopping():
                return

    def producer(self) -> dict[str, Any]:
        """Return who made the states, as JSON data: it is stored with them."""
        return {"name": self.name, "versions": {p: importlib.metadata.version(p) for p in ("transformers", "hsformat")}}

    def close(self) -> None:
        """Free the target."""
        self._model = self._request = None

    def _depths(self, ids: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return [T, H] a depth: yours. Here entry d is depth d, and the last is after the final norm."""
        import torch

        with torch.inference_mode():
            out = self._model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False)
        return [as_array(h[0]).copy() for h in out.hidden_states]  # a record owns its arrays

    def _unfit(self, sample: TokenSample, request: ExtractionRequest) -> list[Problem]:
        where, ids = f"record {sample.id!r}: input_ids", sample.input_ids
        longest = self._model.config.max_position_embeddings
        if not len(ids):
            return [problem("HS102", where=where, got="0 tokens", expected="at least 1", record=sample.id)]
        if ids.min() < 0 or ids.max() >= request.target.vocab_size:
            return [problem("HS105", where=where, got=f"{ids.min()} to {ids.max()}",
                            expected=f"0 to {request.target.vocab_size - 1}", record=sample.id)]  # fmt: skip
        if len(ids) > longest:
            return [problem("HS106", where=where, got=f"{len(ids)} tokens", expected=f"at most {longest}",
                            record=sample.id)]  # fmt: skip
        return []
