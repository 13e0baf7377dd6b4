"""The state after the final norm, where an engine gives the one before it: the norm is applied here.

In float32, with the target's own weights, from the state as the engine gave it, rounded once to its dtype. That is
what a target in float32 computes; in 16 bits an engine rounds once more, before it multiplies by the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import FinalNorm
from hsformat.dtypes import to_float32
from hsformat.maintain.finalnorm import FinalNormWeights
from hsformat.target import describe
from hsformat.target.keytensors import load_key_tensor

__all__ = ["after", "final_norm_facts", "load_weights"]


def final_norm_facts(model: str) -> dict[str, Any]:
    """Return ``kind``, ``eps`` and ``unit_offset`` of the final norm of the target in a folder.

    Raises
    ------
    ForeignFileError
        The folder is no target that can be described.
    """
    facts: dict[str, Any] = describe(model).model.final_norm.model_dump()
    return facts


def load_weights(model: str, facts: Mapping[str, Any]) -> FinalNormWeights:
    """Read the weights of the final norm in a target's folder.

    Raises
    ------
    FileNotFoundError
        ``model`` is no folder of this machine, but a name.
    ForeignFileError
        HS411, HS602: the weights are missing or cannot be read.
    """
    if not Path(model).is_dir():
        raise FileNotFoundError(f"no folder {model}: the final norm is applied with the weights in the target's folder")
    norm = FinalNorm.model_validate(dict(facts))
    weight, bias = load_key_tensor(model, "final_norm"), load_key_tensor(model, "final_norm_bias")
    if weight is None:
        raise ValueError(f"{model}: the final norm has no weight")
    offset = np.float32(1 if norm.unit_offset else 0)
    return FinalNormWeights(
        norm=norm, weight_H=to_float32(weight) + offset, bias_H=None if bias is None else to_float32(bias)
    )


def after(norm: FinalNormWeights, states_SH: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [S, H] after the norm, in the dtype of ``states_SH``."""
    return norm.apply(to_float32(states_SH)).astype(states_SH.dtype)
