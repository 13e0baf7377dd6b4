"""A target by Transformers in float32: what every slot is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsformat.contract import Capture
from hsformat_extractors._capture import Capturer, find_anatomy, pad
from hsformat_extractors._load import load_model
from hsformat_extractors.probes.draft_math import Target

__all__ = ["reference"]


def reference(folder: Path, prompt: tuple[int, ...], num_layers: int) -> Target:
    """Return every capture of a target by key, [T, H] in float32 (``d0`` to ``dN``, and ``dNn``), embedding and head.

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
        states = {key: x_SH.numpy().astype(np.float32) for key, x_SH in capturer.run(batch).items()}
    finally:
        capturer.close()
    embedding, head = (module.weight.detach().numpy().astype(np.float32) for module in _ends(anatomy))
    return Target(states=states, embedding=embedding, head=head)


def _ends(anatomy: Any) -> tuple[Any, Any]:
    return anatomy.embedding, anatomy.head
