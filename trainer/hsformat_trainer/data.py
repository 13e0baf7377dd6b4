"""The loaders of a run: packed batches of the records that are trained on, and of those that are held out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hsformat.problems import HsError, problem
from hsformat.torch import RecordDataset, RecordLoader
from hsformat_trainer.admitted import Admitted, Source
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.mixture import MixedLoader, MixedSource, Part

__all__ = ["eval_loader", "train_loader"]

OPEN_SEGMENTS = 16
"""Segments whose records are mixed at a time; a store of no more has its records in random order."""


def train_loader(config: TrainConfig, admitted: Admitted, *, rank: int = 0, world_size: int = 1) -> MixedLoader:
    """Return the loader of the training records: packed, at most ``config.batch_tokens`` tokens a batch.

    The order follows from the seed and the epoch; the state may be loaded by a loader with other workers.

    Raises
    ------
    HsError
        HS102: an epoch has fewer records than there are processes.
    """
    sources = [s for s in admitted.sources if len(s.train)]
    if (count := sum(s.per_epoch for s in sources)) < world_size:
        expected, fix = f"a record for each of {world_size} processes", "give more records, or start fewer processes"
        raise HsError(problem("HS102", where="stores", got=f"{count} an epoch", expected=expected, fix=fix))
    return MixedLoader(
        admitted.contract,
        sources,
        captures=admitted.layout.keys,
        seed=config.seed,
        max_tokens=config.batch_tokens,
        shuffle="segment",
        buffer=OPEN_SEGMENTS,
        rank=rank,
        world_size=world_size,
        workers=config.workers,
    )


def eval_loader(
    config: TrainConfig, admitted: Admitted, *, rank: int = 0, world_size: int = 1, most: int | None = None
) -> RecordLoader | None:
    """Return a loader of the held-out records, in the order of the sources; None: there are none.

    Parameters
    ----------
    most
        Of so many of them, evenly spaced over all; None: of all.
    """
    held = _at_most(admitted.sources, most)
    count = sum(len(rows) for _, rows, _ in held)
    if not count:
        return None
    # A rank without a record would wait for ever: with fewer records than ranks each reads all of them.
    rank, world_size = (rank, world_size) if count >= world_size else (0, 1)
    dataset = RecordDataset(MixedSource(admitted.contract, held), captures=admitted.layout.keys)
    return RecordLoader(
        dataset, max_tokens=config.batch_tokens, workers=config.workers, rank=rank, world_size=world_size
    )


def _at_most(sources: Iterable[Source], most: int | None) -> list[Part]:
    parts = [s for s in sources if len(s.held_out)]
    total = sum(len(s.held_out) for s in parts)
    kept = np.arange(total) if most is None or total <= most else np.arange(most) * total // most
    out, first = [], 0
    for s in parts:
        n = len(s.held_out)
        rows = kept[(kept >= first) & (kept < first + n)] - first
        out.append((s.source, s.held_out[rows], s.held_out_tokens[rows]))
        first += n
    return out
