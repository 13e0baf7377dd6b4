"""Which sequences run together: bounded windows, sorted by length, cut into batches.

A batch is formed from lengths and ids alone, so that the same window always gives the same batches. Memory is bounded
by one window of token ids and one batch of states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from hsformat.record import Generation, Provenance, TokenSample

__all__ = ["WINDOW_BATCHES", "WINDOW_SAMPLES", "Forward", "batches", "sample_seed", "windows"]

WINDOW_BATCHES = 16
"""A window holds about so many batches: enough to sort by length, few enough to start early."""
WINDOW_SAMPLES = 1024


def windows(samples: Iterable[TokenSample], *, tokens: int) -> Iterator[list[TokenSample]]:
    """Cut a stream of samples into lists of at least ``tokens`` tokens or ``WINDOW_SAMPLES`` samples each."""
    window: list[TokenSample] = []
    held = 0
    for sample in samples:
        window.append(sample)
        held += len(sample)
        if held >= tokens or len(window) == WINDOW_SAMPLES:
            yield window
            window, held = [], 0
    if window:
        yield window


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What is run forward for one sample: its own tokens, or a prompt and the answer to it.

    Attributes
    ----------
    sample
        As it was given: records and rejections refer to it.
    input_ids, loss_mask
        [T] of the record to be.
    provenance
        Of the record to be.
    """

    sample: TokenSample
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    provenance: Provenance

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def given(cls, sample: TokenSample) -> Forward:
        """Run a sample as it is."""
        return cls(
            sample=sample,
            input_ids=sample.input_ids,
            loss_mask=sample.loss_mask,
            provenance=sample.provenance,
        )

    @classmethod
    def answered(cls, sample: TokenSample, answer: npt.NDArray[np.int32], generation: Generation) -> Forward:
        """Run a prompt and what the target wrote after it, which alone is supervised."""
        mask = np.zeros(len(sample) + len(answer), np.uint8)
        mask[len(sample) :] = 1
        return cls(
            sample=sample,
            input_ids=np.concatenate([sample.input_ids.astype(np.int32, copy=False), answer]),
            loss_mask=mask,
            provenance=sample.provenance.model_copy(update={"generation": generation}),
        )


def batches(window: Iterable[Forward], *, limit: int) -> Iterator[list[Forward]]:
    """Yield batches of similar length, the longest first, so that a lack of memory shows at once.

    Parameters
    ----------
    window
        In any order; ties of length are broken by id.
    limit
        Upper bound of tokens in a batch, padding included. A sequence that exceeds it runs alone.

    Examples
    --------
    >>> def run(n):
    ...     ids = np.zeros(n, np.int32)
    ...     return Forward.given(TokenSample(id=f"s{n}", input_ids=ids, loss_mask=ids.astype(np.uint8)))
    >>> [[len(f) for f in b] for b in batches(map(run, (3, 9, 4, 5)), limit=10)]
    [[9], [5, 4], [3]]
    """
    batch: list[Forward] = []
    ordered = sorted(window, key=lambda f: (-len(f), f.sample.id))
    for item in chain(ordered, (None,)):
        if batch and (item is None or len(batch[0]) * (len(batch) + 1) > limit):
            yield batch
            batch = []
        if item is not None:
            batch.append(item)


def sample_seed(seed: int, sample_id: str) -> int:
    """Return a seed of 63 bits for one sample."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()[:8], "big") >> 1
