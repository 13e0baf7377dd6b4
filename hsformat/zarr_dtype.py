"""The Zarr v3 data type ``bfloat16``, which zarr-python does not have (seen in 3.1.6 and 3.4.2).

Importing this module registers it. zarr 3.4.1 and later find it by themselves, through the entry point
``bfloat16`` of group ``zarr.data_type``; zarr 3.1.6 to 3.4.0 collect that group and never load it, so there a
program that opens a store with plain zarr imports this module first.

The element is two bytes, in the order that the ``bytes`` codec names: the type that TensorStore writes and reads
under the same name. Imports nothing of hsformat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, overload

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.core.dtype.npy.common import endianness_to_numpy_str, get_endianness_from_numpy_dtype
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined, unused-ignore]  # by version
except ImportError:  # where zarr 3.1.6 has it; a later one warns there
    from zarr.dtype import DataTypeValidationError

__all__ = ["BFloat16"]

_NATIVE = np.dtype(ml_dtypes.bfloat16)
_NAN_BITS = 0x7FC0
_NAMED = {"NaN": _NAN_BITS, "Infinity": 0x7F80, "-Infinity": 0xFF80}
_NAME_OF = {bits: name for name, bits in _NAMED.items()}


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """bfloat16 over ``ml_dtypes.bfloat16``; Zarr format 3 alone."""

    dtype_cls = type(_NATIVE)
    _zarr_v3_name = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes of an element: 2."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Wrap the NumPy type; refuse any other."""
        if cls._check_native_dtype(dtype):
            return cls(endianness=get_endianness_from_numpy_dtype(dtype))
        raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected an instance of {cls.dtype_cls}")

    def to_native_dtype(self) -> Any:
        """Return the NumPy type."""
        return _NATIVE.newbyteorder(endianness_to_numpy_str(self.endianness))

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("bfloat16 exists in Zarr format 3 alone")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"Invalid JSON representation of {cls.__name__}. Got {data!r}")

    @overload
    def to_json(self, zarr_format: Literal[2]) -> Any: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        """Return the name.

        Raises
        ------
        ValueError
            Zarr format 2 has no bfloat16.
        """
        if zarr_format != 3:
            raise ValueError("bfloat16 exists in Zarr format 3 alone")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        try:
            float(data)  # type: ignore[arg-type]  # never bfloat16("x"): ml_dtypes 0.6.0 crashes on it
        except (TypeError, ValueError, OverflowError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        """Return a number as a bfloat16 scalar; one that is a bfloat16 keeps its bits.

        Raises
        ------
        TypeError
            It is no number.
        """
        if isinstance(data, _NATIVE.type):
            return data
        if self._check_scalar(data):
            return _NATIVE.type(float(data))  # type: ignore[arg-type]  # checked in the line above
        raise TypeError(f"Cannot convert {data!r} of type {type(data)} to a scalar of bfloat16")

    def default_scalar(self) -> Any:
        """Return 0."""
        return _NATIVE.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Literal[2, 3]) -> Any:
        """Read a fill value: a number, ``NaN``, ``Infinity``, ``-Infinity``, or the bits as ``0x7fc0``.

        Raises
        ------
        TypeError
            It is none of these.
        """
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return _NATIVE.type(data)
        if isinstance(data, str):
            if data in _NAMED:
                return _scalar(_NAMED[data])
            digits = data.removeprefix("0x")
            if len(digits) == 4 and len(data) == 6 and all(c in "0123456789abcdefABCDEF" for c in digits):
                return _scalar(int(digits, 16))
        raise TypeError(f"Invalid fill value of bfloat16: {data!r}. Expected a number, NaN, Infinity or 0x7fc0")

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> float | str:
        """Return a fill value as :meth:`from_json_scalar` reads it, bit by bit."""
        scalar = self.cast_scalar(data)
        if np.isfinite(scalar):
            return float(scalar)
        bits = int(np.array(scalar, _NATIVE).view(np.uint16))
        return _NAME_OF.get(bits, f"0x{bits:04x}")


def _scalar(bits: int) -> Any:
    return np.array(bits, np.uint16).view(_NATIVE)[()]


data_type_registry.register("bfloat16", BFloat16)
