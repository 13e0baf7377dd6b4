"""Element types: names on disk to NumPy types, and arrays of others (torch, lists) to NumPy without a copy.

torch is never imported here: a tensor is recognised by the module of its class, and it brings its own torch.
Imports nothing of hsformat.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["FLOAT_DTYPES", "as_array", "dtype_name", "numpy_dtype", "to_float32"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian NumPy type of a name used in a contract.

    Raises
    ------
    TypeError
        NumPy and ml_dtypes know no such type.
    """
    return BFLOAT16 if name == "bfloat16" else np.dtype(name).newbyteorder("<")


def dtype_name(dtype: npt.DTypeLike) -> str:
    """Return the name by which a contract calls a NumPy type."""
    return np.dtype(dtype).name


def as_array(value: Any) -> npt.NDArray[Any]:
    """Return ``value`` as a NumPy array: NumPy as it is, torch on any device, lists of numbers.

    bfloat16 tensors are reinterpreted bit by bit, since ``Tensor.numpy`` refuses them (pytorch#110285).

    Raises
    ------
    TypeError
        The value is no array of numbers.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array: what is masked has no value to store")
    if isinstance(value, np.ndarray):
        array: npt.NDArray[Any] = value
    elif type(value).__module__.split(".")[0] == "torch" and "torch" in sys.modules:
        torch = sys.modules["torch"]
        try:
            tensor = value.detach().cpu().contiguous()
            half = tensor.dtype == torch.bfloat16
            array = tensor.view(torch.uint16).numpy().view(BFLOAT16) if half else tensor.numpy()
        except (RuntimeError, NotImplementedError) as e:  # sparse, meta, quantised
            raise TypeError(f"a tensor that NumPy cannot hold: {e}") from e
    else:
        try:
            array = np.asarray(value)
        except ValueError as e:
            raise TypeError(f"not an array of numbers: {e}") from e
    if array.dtype.kind not in "biufV" or (array.dtype.kind == "V" and not hasattr(ml_dtypes, array.dtype.name)):
        raise TypeError(f"not an array of numbers: dtype {array.dtype}")
    return array


def to_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return a float array as float32, which is exact for bfloat16."""
    return array.astype(np.float32, copy=False)
