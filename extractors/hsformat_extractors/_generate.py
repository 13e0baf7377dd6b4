"""The target writes the assistant's turn itself.

Nothing of the model folder's generation config is used but its end-of-turn ids: with a repetition penalty from it the
answers would be those of another distribution than the one that the states give.

An answer depends on its own prompt and, in mode ``sampled``, on the seed and the sample's id, not on what happens to
be generated beside it, so that a resumed run has the answers that an uninterrupted one would have had. (States are
those of another forward pass, whose batches nothing fills up: their last bits may differ.) Rounding depends on the
shapes of a batch: in bfloat16 only 27 of 40 greedy answers of a 135M model were the same in batches of 8 and of 40.
Therefore a prompt is padded to a width that follows from its own length, and a batch is filled up to a number of rows
that follows from that width; and on a CPU, attention is computed by PyTorch's plain kernel, since the fast one
divides a row's keys among threads by the row's place in the batch. Then logits were equal bit for bit whatever ran
beside them (40 steps, 32 rows, bfloat16 and float32, two threads). Limits: a mixture of experts, whose inner shapes
depend on all rows; a batch that was halved for lack of memory; CUDA, where this was not measured; another machine or
version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hsformat.problems import HsError
from hsformat.record import Generation, TokenSample
from hsformat_extractors._batching import sample_seed
from hsformat_extractors._capture import pad
from hsformat_extractors._stops import no_end_of_turn

__all__ = ["Generator", "end_of_turn_ids", "generation_batches", "prompt_width"]

WIDTH_STEP = 64
MAX_ROWS = 64
PLAIN_WIDTH = 2048
"""Longest prompt for the plain kernel, whose memory grows with the square of it."""


def prompt_width(tokens: int) -> int:
    """Return the padded width of a prompt: a multiple of 64 with at least one place of padding.

    A batch without any padding would take another attention kernel.
    """
    return WIDTH_STEP * (tokens // WIDTH_STEP + 1)


def generation_batches(
    window: Iterable[TokenSample], *, limit: int, max_new_tokens: int
) -> Iterator[tuple[list[TokenSample], int]]:
    """Yield samples of one width, and the number of rows that their batch is filled up to."""
    ordered = sorted(window, key=lambda s: (prompt_width(len(s)), s.id))
    for width, group in groupby(ordered, key=lambda s: prompt_width(len(s))):
        rows = min(MAX_ROWS, max(1, limit // (width + max_new_tokens)))
        members = list(group)
        for start in range(0, len(members), rows):
            yield members[start : start + rows], rows


def end_of_turn_ids(model: Any, folder: Path) -> list[int]:
    """Return all ids that end a turn: of the generation config, the config and the tokenizer.

    Raises
    ------
    HsError
        HS410: there are none, so that an answer would never end.
    """
    from transformers import AutoTokenizer

    named = [model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id]
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        named.append(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eos_token_id)
    ids = {i for value in named if value is not None for i in (value if isinstance(value, list) else [value])}
    if not ids:
        raise HsError(no_end_of_turn(folder))
    return sorted(ids)


class Generator:
    """Writes answers with a loaded model, whose own generation config it replaces."""

    def __init__(self, model: Any, generation: Generation, eos_ids: Sequence[int], device: torch.device) -> None:
        import transformers

        config: Any = transformers.GenerationConfig
        self._model, self._generation, self._eos, self._device = model, generation, eos_ids, device
        model.generation_config = config(
            do_sample=False,  # mode sampled draws by Gumbel noise, see _SampleNoise
            max_new_tokens=generation.max_new_tokens,
            eos_token_id=list(eos_ids),
            pad_token_id=eos_ids[0],
        )

    @torch.inference_mode()
    def __call__(self, samples: Sequence[TokenSample], rows: int) -> list[npt.NDArray[np.int32]]:
        """Return the answers to samples of one width: at least one id, up to the first that ends the turn."""
        filled = [*samples, *(samples[0] for _ in range(rows - len(samples)))]
        width = prompt_width(len(samples[0]))
        batch = pad([s.input_ids for s in filled], left=True, width=width, device=self._device)
        with self._attention(width):
            out_BT = self._model.generate(
                batch.ids_BT, attention_mask=batch.mask_BT, logits_processor=self._processors(samples)
            )
        answers = out_BT[: len(samples), width:].cpu().numpy().astype(np.int32)
        return [self._cut(a) for a in answers]

    def _attention(self, width: int) -> AbstractContextManager[None]:
        """Choose the kernel by device and width alone. An implementation other than ``sdpa`` takes no notice."""
        if self._device.type == "cpu" and width <= PLAIN_WIDTH:
            return sdpa_kernel(SDPBackend.MATH)
        return nullcontext()

    def is_empty(self, answer: npt.NDArray[np.int32]) -> bool:
        """Return whether an answer is nothing but the end of the turn."""
        return len(answer) == 1 and int(answer[0]) in self._eos

    def _cut(self, answer: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        ends = np.flatnonzero(np.isin(answer, self._eos))
        return answer[: ends[0] + 1].copy() if ends.size else answer.copy()

    def _processors(self, samples: Sequence[TokenSample]) -> Any:
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        g = self._generation
        if g.mode != "sampled":
            return LogitsProcessorList()
        out: list[Any] = []
        if g.temperature is not None:
            out.append(TemperatureLogitsWarper(g.temperature))
        if g.top_k is not None:
            out.append(TopKLogitsWarper(g.top_k))
        if g.top_p is not None:
            out.append(TopPLogitsWarper(g.top_p))
        return LogitsProcessorList([*out, _SampleNoise([sample_seed(g.seed or 0, s.id) for s in samples])])


class _SampleNoise:
    """Adds Gumbel noise of each sample's own generator: the largest score is then a draw from the softmax.

    Drawn on the CPU, so that a seed means the same on every device. Rows after the samples fill the batch up: copies
    of the first one, which take its noise.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(s) for s in seeds]

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        rows, width = scores_BV.shape
        noise = [torch.empty(width).exponential_(generator=g).log_() for g in self._generators]
        noise += [noise[0]] * (rows - len(noise))
        return scores_BV - torch.stack(noise).to(scores_BV.device)
