"""The target's states by Transformers in float32: what every slot is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hsformat.contract import Capture
from hsformat_extractors._capture import Capturer, find_anatomy, pad
from hsformat_extractors._load import load_model

__all__ = ["reference_states"]


def reference_states(folder: Path, prompt: tuple[int, ...], num_layers: int) -> dict[str, npt.NDArray[Any]]:
    """Return every capture of a target by key, [T, H] in float32: ``d0`` to ``dN``, and ``dNn``.

    Raises
    ------
    HsError
        HS410, HS411, HS602: Transformers cannot run the target, or it has no single residual stream.
    """
    device = torch.device("cpu")
    model = load_model(folder, dtype="float32", device=device, attention="eager")
    batch = pad([np.array(prompt, np.int64)], device=device)
    anatomy = find_anatomy(model, batch, num_layers)
    wanted = [Capture(depth=d, norm="none", dtype="float32") for d in range(num_layers + 1)]
    wanted.append(Capture(depth=num_layers, norm="final", dtype="float32"))
    capturer = Capturer(anatomy, wanted)
    try:
        return {key: x_SH.numpy().astype(np.float32) for key, x_SH in capturer.run(batch).items()}
    finally:
        capturer.close()
