"""Rows of a large matrix of a checkpoint, read by their offset: an embedding or a head of gigabytes stays on the disk.

May import ``target.checkpoint``. Shapes: V rows (the vocabulary), H hidden, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.dtypes import to_float32
from hsformat.problems import ForeignFileError
from hsformat.target.checkpoint import TensorInfo, not_float, opened
from hsformat.target.jsonfiles import corrupt

__all__ = ["read_rows", "row_blocks"]

BLOCK_BYTES = 32 * 1024 * 1024
"""Of a block of rows as float32."""


def read_rows(info: TensorInfo, rows: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return single rows of a matrix as float32, [R, H], reading their bytes alone; a row asked for twice is read once.

    Raises
    ------
    IndexError
        A row is not in 0..V-1.
    ForeignFileError
        HS411: the dtype is not a float of 16 bits or more. HS602: the file cannot be read or has become shorter.
    """
    wanted, back = np.unique(np.asarray(rows, np.int64), return_inverse=True)
    if wanted.size and not (wanted[0] >= 0 and wanted[-1] < info.shape[0]):
        raise IndexError(f"rows {wanted[0]} to {wanted[-1]} of {info.shape[0]}")
    dtype, width = _row(info)
    out = np.empty((len(wanted), width), dtype)
    with opened(info.file) as file:
        for i, row in enumerate(wanted):
            file.seek(info.start + int(row) * out[:1].nbytes)
            out[i] = np.frombuffer(_exactly(info, file.read(out[:1].nbytes), out[:1].nbytes), dtype)
    return to_float32(out)[back]


def row_blocks(
    info: TensorInfo, *, stop: int | None = None, columns: int = 0
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield ``(first row, rows as float32)`` of a matrix, in blocks of at most :data:`BLOCK_BYTES`.

    Parameters
    ----------
    stop
        The row before which to end; None: V.
    columns
        Numbers that the caller makes of each row (a product with R rows makes R): they stay within the bound, too.

    Raises
    ------
    ForeignFileError
        As :func:`read_rows`.
    """
    dtype, width = _row(info)
    end = info.shape[0] if stop is None else min(stop, info.shape[0])
    step = max(1, BLOCK_BYTES // (4 * max(1, width, columns)))
    with opened(info.file) as file:
        for first in range(0, end, step):
            count = min(step, end - first)
            nbytes = count * width * dtype.itemsize
            file.seek(info.start + first * width * dtype.itemsize)
            raw = _exactly(info, file.read(nbytes), nbytes)
            yield first, to_float32(np.frombuffer(raw, dtype).reshape(count, width))


def _row(info: TensorInfo) -> tuple[np.dtype[Any], int]:
    """Return the element type of a matrix and the number of its columns."""
    if info.numpy_dtype is None:
        raise ForeignFileError(not_float(info))
    return info.numpy_dtype, info.shape[1]


def _exactly(info: TensorInfo, raw: bytes, nbytes: int) -> bytes:
    if len(raw) != nbytes:
        raise corrupt(f"{info.file}: {info.name}", f"{nbytes - len(raw)} bytes are missing", f"{info.nbytes} bytes")
    return raw
