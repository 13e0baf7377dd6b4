"""Random numbers: one seed for all, and their states as a checkpoint holds them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["load_random_states", "random_states", "seed_all"]


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


def load_random_states(numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Go on from states of :func:`random_states`; of a device that is not there they are left out."""
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
