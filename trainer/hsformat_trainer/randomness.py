"""Random numbers: one seed for all, and their states as a checkpoint holds them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["load_random_numbers", "load_random_tensors", "random_states", "seed_all"]


def seed_all(seed: int) -> None:
    """Seed Python, NumPy's global generator and torch, the same in every process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the states of this process: JSON-able ones of Python and NumPy, and torch's, by device."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return numbers, tensors


def load_random_numbers(numbers: Mapping[str, Any]) -> None:
    """Go on from the JSON-able states of :func:`random_states`.

    Raises
    ------
    ValueError
        One is no state of its generator, which is named.
    """
    version, internal, gauss = numbers["python"]
    kind, keys, *rest = numbers["numpy"]
    with _named("python"):
        random.setstate((version, tuple(internal), gauss))
    with _named("numpy"):
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def load_random_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Go on from torch's states of :func:`random_states`; of a device that is not there they are left out.

    Raises
    ------
    ValueError
        That of the CPU is missing, or one is no state of its generator, which is named.
    """
    if "cpu" not in tensors:
        raise ValueError("cpu: nothing")
    with _named("cpu"):
        torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        with _named("cuda"):
            torch.cuda.set_rng_state(tensors["cuda"])


@contextmanager
def _named(generator: str) -> Iterator[None]:
    """Say of which generator a state is not: each of them has errors of its own for it."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, LookupError, RuntimeError) as e:
        raise ValueError(f"{generator}: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from e
