"""The numbers of states: the rules HS201, HS202 and HS207, statistics, and the one conversion to what is stored.

States are scanned in blocks of rows, so that memory does not grow with the record. Suffixes of array names are their
axes: S states, H hidden. This module may import ``problems``, ``dtypes`` and ``contract``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture
from hsformat.dtypes import BFLOAT16, numpy_dtype, to_float32
from hsformat.problems import Problem, Severity, problem

__all__ = ["CaptureStats", "StateScan", "store_states", "to_stored"]

BLOCK_BYTES = 2 * 1024 * 1024
"""Of a block as float32: half of it, in bfloat16, fits a core's cache."""
ZERO_ROW_SHARE = 0.01
"""More all-zero rows than this share of a record is an error; fewer are a note (speculators#613).

At depth 0 any number of rows but all of them is a note: a row of the embedding is all zero where a model pads with it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """Statistics of one capture of one record: mean L2 norm of its rows, largest absolute value."""

    mean_l2: float
    max_abs: float


class StateScan:
    """Scans the rows of one capture of one record, block by block: HS201, HS202, HS207.

    Parameters
    ----------
    capture
        Says the dtype on disk; values that are finite and do not fit it are HS207.
    record_id
        For the place of a problem.
    norms
        Whether to compute L2 norms, which take most of the time.
    """

    def __init__(self, capture: Capture, record_id: str, *, norms: bool = True) -> None:
        self._capture, self._record_id, self._norms = capture, record_id, norms
        self._stored = numpy_dtype(capture.dtype)
        self._bad, self._over = _Found(), _Found()
        self._rows = self._zero_rows = 0
        self._max_abs = self._sum_l2 = 0.0

    def add(self, rows_SH: npt.NDArray[Any]) -> None:
        """Scan the next rows, in blocks of at most :data:`BLOCK_BYTES` as float32."""
        step = max(1, BLOCK_BYTES // (4 * max(1, rows_SH.shape[1])))
        for start in range(0, len(rows_SH), step):
            block_SH = rows_SH[start : start + step]
            native = block_SH if block_SH.dtype.isnative else block_SH.astype(block_SH.dtype.newbyteorder("="))
            self._add_block(np.ascontiguousarray(native))

    def _add_block(self, block_SH: npt.NDArray[Any]) -> None:
        top_S, infinity = _row_magnitudes(block_SH)
        finite_S = top_S < infinity
        self._zero_rows += int((top_S == 0).sum())
        narrows = not np.can_cast(block_SH.dtype, self._stored, "safe")
        if narrows or not finite_S.all():
            self._add_values(block_SH, narrows=narrows)
        if self._norms:
            x_SH = block_SH if block_SH.dtype == np.float64 else to_float32(block_SH)
            with np.errstate(over="ignore", invalid="ignore"):
                squares_S = np.matmul(x_SH[:, None, :], x_SH[:, :, None])[:, 0, 0]  # twice as fast as einsum
                self._sum_l2 += float(np.sqrt(squares_S).sum(dtype=np.float64))
        if finite_S.any():
            self._max_abs = max(self._max_abs, float(top_S[finite_S].max(keepdims=True).view(block_SH.dtype)[0]))
        self._rows += len(block_SH)

    def _add_values(self, block_SH: npt.NDArray[Any], *, narrows: bool) -> None:
        x_SH = block_SH if block_SH.dtype == np.float64 else to_float32(block_SH)
        finite_SH = np.isfinite(x_SH)
        self._bad.add(~finite_SH, x_SH, self._rows)
        with np.errstate(over="ignore", invalid="ignore"):
            if narrows:
                fits_SH = np.isfinite(to_float32(to_stored(self._capture, block_SH)))
                self._over.add(~fits_SH & finite_SH, x_SH, self._rows)

    @property
    def stats(self) -> CaptureStats:
        """Statistics of all rows seen, at least one; ``mean_l2`` is 0 without ``norms``."""
        return CaptureStats(mean_l2=self._sum_l2 / self._rows, max_abs=self._max_abs)

    def problems(self) -> list[Problem]:
        """Return the problems of all rows seen."""
        out: list[Problem] = []
        rid = self._record_id
        where = f"record {rid!r}: hidden[{self._capture.key!r}]"
        if self._bad.count:
            place, expected = f"{where} {self._bad.place}", "finite values"
            out.append(problem("HS201", where=place, got=self._bad.got, expected=expected, record=rid))
        if self._over.count:
            place, expected = f"{where} {self._over.place}", f"values that {self._capture.dtype} can hold"
            out.append(problem("HS207", where=place, got=self._over.got, expected=expected, record=rid))
        if self._zero_rows:
            share = 1.0 if self._capture.depth == 0 else ZERO_ROW_SHARE
            error = self._zero_rows == self._rows or self._zero_rows > share * self._rows
            out.append(
                problem(
                    "HS202",
                    where=where,
                    got=f"{self._zero_rows} of {self._rows} rows are all zero",
                    expected=f"none; {'fewer than all' if share == 1 else f'up to {share:.0%}'} are a note",
                    record=rid,
                    severity=Severity.ERROR if error else Severity.NOTE,
                )
            )
        return out


def _row_magnitudes(block_SH: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """Return the largest magnitude of each row as its bits, and the bits of infinity.

    The bits of IEEE numbers without their sign are ordered as the numbers are, with infinity and NaN above the rest: no
    conversion is needed to find zeros, the largest value and what is not finite.
    """
    unsigned = np.dtype(f"u{block_SH.dtype.itemsize}")
    magnitudes_SH = block_SH.view(unsigned) & np.iinfo(unsigned).max // 2
    infinity = np.array([np.inf]).astype(block_SH.dtype).view(unsigned)
    return magnitudes_SH.max(axis=1), int(infinity[0])


@dataclass(slots=True)
class _Found:
    """The first place, and the number, of values that fail a rule."""

    count: int = 0
    place: str = ""
    value: float = 0.0

    @property
    def got(self) -> str:
        return f"{self.value:g} ({self.count} such value(s))"

    def add(self, wrong_SH: npt.NDArray[np.bool_], x_SH: npt.NDArray[Any], start: int) -> None:
        n = int(wrong_SH.sum())
        if n and not self.count:
            row, channel = np.unravel_index(int(wrong_SH.argmax()), wrong_SH.shape)
            self.place = f"token {start + int(row)} channel {int(channel)}"
            self.value = float(x_SH[row, channel])
        self.count += n


def to_stored(capture: Capture, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return states in the capture's dtype, C-contiguous, as :func:`store_states` makes them."""
    dtype = numpy_dtype(capture.dtype)
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    out = np.empty(array.shape, dtype)
    store_states(out, array)
    return out


def store_states(out_SH: npt.NDArray[Any], states_SH: npt.NDArray[Any]) -> None:
    """Write states into an array of the capture's dtype: rounded once, to nearest, ties to even (rule R-12).

    ml_dtypes takes float64 to bfloat16 by way of float32, which rounds twice: 1 + 2**-8 + 2**-40 would become 1. There
    the way leads over a float32 that is rounded to odd, which keeps in its last bit that something was cut off
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if out_SH.dtype != BFLOAT16 or states_SH.dtype.newbyteorder("=") != np.float64:
            out_SH[...] = states_SH
            return
        step = max(1, BLOCK_BYTES // (8 * max(1, states_SH[:1].size)))
        for start in range(0, len(states_SH), step):
            rows = slice(start, start + step)
            out_SH[rows] = _round_to_odd(states_SH[rows])


def _round_to_odd(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return the float32 numbers next to zero from the exact ones, with the last bit set if they are not exact."""
    near = wide.astype(np.float32)
    bits = near.view(np.uint32)
    bits -= np.abs(near) > np.abs(wide)  # of a magnitude, whatever its sign: one step towards zero
    bits |= near != wide
    return near
