"""What makes a record right: the 1xx rules, the numeric rules HS201, HS202 and HS207, and its origin, HS604.

One implementation for the writer, which refuses, and for validation, which reports. Everything is returned, not the
first finding. States are scanned in blocks of rows, so that memory does not grow with the record. Suffixes of array
names are their axes: S states, H hidden. This module may import ``problems``, ``digests``, ``dtypes``, ``contract`` and
``record``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture, Contract, FieldSpec
from hsformat.digests import canonical_json, is_digest
from hsformat.dtypes import BFLOAT16, FLOAT_DTYPES, dtype_name, numpy_dtype, to_float32
from hsformat.problems import Problem, Severity, problem
from hsformat.record import Provenance, Record

__all__ = [
    "MAX_ID_BYTES",
    "CaptureStats",
    "StateScan",
    "check_record",
    "check_tokens",
    "store_states",
    "to_stored",
    "token_range_problem",
]

BLOCK_BYTES = 4 * 1024 * 1024
MAX_ID_BYTES = 1024
"""Of an id as UTF-8 (rule R-8)."""
_MAX_POSITION = 2**63 - 1
ZERO_ROW_SHARE = 0.01
"""More all-zero rows than this share of a record is an error; fewer are a note (speculators#613).

At depth 0 any number of rows but all of them is a note: a row of the embedding is all zero where a model pads with it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """Statistics of one capture of one record: mean L2 norm of its rows, largest absolute value."""

    mean_l2: float
    max_abs: float


def check_record(contract: Contract, record: Record) -> tuple[list[Problem], dict[str, CaptureStats]]:
    """Check one record against a contract.

    Returns
    -------
    problems
        All of them. The record may be stored if none is of severity error.
    stats
        By capture key, for the captures whose shape is right.
    """
    problems = check_tokens(contract, record) + _check_origin(record)
    stats: dict[str, CaptureStats] = {}
    where = f"record {record.id!r}"
    for key in record.hidden:
        if key not in contract.keys:
            problems.append(
                problem(
                    "HS109",
                    where=f"{where}: hidden[{key!r}]",
                    got=f"a capture {key!r}",
                    expected=f"the captures of the contract: {list(contract.keys)}",
                    fix="leave it out, or declare it in the contract",
                    record=record.id,
                )
            )
    for capture in contract.captures:
        array = record.hidden.get(capture.key)
        if array is None:
            problems.append(
                problem(
                    "HS109",
                    where=f"{where}: hidden",
                    got=f"captures {sorted(record.hidden)}",
                    expected=f"{capture.key} among them; the contract has {list(contract.keys)}",
                    fix=f"give hidden[{capture.key!r}]; a capture is found by its key, never by position",
                    record=record.id,
                )
            )
            continue
        found = _check_shape(contract, record, capture, array)
        if found:
            problems.extend(found)
            continue
        scan = StateScan(capture, record.id)
        scan.add(array)
        stats[capture.key] = scan.stats
        problems.extend(scan.problems())
    return problems, stats


def check_tokens(contract: Contract, record: Record) -> list[Problem]:
    """Check everything of a record but its states: id, ids, mask, positions, declared fields."""
    out: list[Problem] = []
    where = f"record {record.id!r}"
    rid = record.id

    def add(code: str, name: str, got: object, expected: object, fix: str | None = None) -> None:
        out.append(problem(code, where=f"{where}: {name}", got=got, expected=expected, fix=fix, record=rid))

    if not isinstance(rid, str) or not rid or len(rid.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        add("HS107", "id", repr(rid)[:80], f"text of 1 to {MAX_ID_BYTES} bytes", "give each record a short text id")
    elif any(0xD800 <= ord(c) <= 0xDFFF for c in rid):
        add("HS107", "id", repr(rid), "text that UTF-8 can hold", "remove lone surrogates from the id")
    ids, mask = record.input_ids, record.loss_mask
    if ids.ndim != 1:
        add("HS101", "input_ids", f"shape {ids.shape}", "[T]", "give one sequence a record, without a batch axis")
        return out
    t = len(ids)
    if t == 0:
        add("HS102", "input_ids", "0 tokens", "at least 1")
    if ids.dtype.kind not in "iu":
        add("HS105", "input_ids", f"dtype {ids.dtype}", "integers", "give token ids as integers")
    elif p := token_range_problem(ids, contract.target.vocab_size, where=f"{where}: input_ids", record=rid):
        out.append(p)
    out.extend(_check_mask(record, mask, t))
    out.extend(_check_positions(record, t))
    out.extend(_check_fields(contract, record, t))
    return out


def token_range_problem(
    input_ids: npt.NDArray[Any] | Sequence[int], vocab_size: int, *, where: str, record: str | None = None
) -> Problem | None:
    """Return HS105 with the place of the first token id that is not in 0..vocab_size - 1; None: all are.

    Parameters
    ----------
    input_ids
        [T] integers.
    where
        The place of the ids as a whole; the index is added to it.
    """
    ids = np.asarray(input_ids)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if not bad.size:
        return None
    i = int(bad[0])
    got, expected = f"{int(ids[i])} ({bad.size} such token(s))", f"0 <= id < {vocab_size}"
    return problem("HS105", where=f"{where}[{i}]", got=got, expected=expected, record=record)


def _check_origin(record: Record) -> list[Problem]:
    """HS604 where provenance or digest is of no known form, or holds what JSON cannot say exactly (2**53 + 1)."""

    def wrong(name: str, got: str, expected: str, fix: str) -> list[Problem]:
        place = f"record {record.id!r}: {name}"
        return [problem("HS604", where=place, got=got, expected=expected, fix=fix, record=record.id)]

    provenance: Any = record.provenance
    out: list[Problem] = []
    if not isinstance(provenance, Provenance):
        expected, fix = "an hsformat.Provenance", "give Provenance(...), or leave it out: given, no template"
        out += wrong("provenance", f"{type(provenance).__name__} {provenance!r}"[:80], expected, fix)
    else:
        try:
            canonical_json(provenance.model_dump(mode="json"))
        except ValueError as e:
            out += wrong("provenance", str(e), "values that JSON keeps", "give the value as text")
    digest: Any = record.source_digest
    if digest is not None and not is_digest(digest):
        expected, fix = "sha256: and 64 hex digits, or None", "give TokenSample.source_digest, or None"
        out += wrong("source_digest", repr(digest)[:80], expected, fix)
    return out


def _check_mask(record: Record, mask: npt.NDArray[Any], t: int) -> Iterator[Problem]:
    where, rid = f"record {record.id!r}: loss_mask", record.id
    if mask.ndim != 1 or len(mask) != t:
        got = len(mask) if mask.ndim == 1 else f"shape {mask.shape}"
        yield problem(
            "HS101",
            where=where,
            got=got,
            expected=f"{t}, the number of input_ids",
            fix="truncate ids, mask and states together; hsformat never cuts a mask to fit",
            record=rid,
        )
        return
    if mask.dtype.kind not in "biu":
        yield problem(
            "HS104",
            where=where,
            got=f"dtype {mask.dtype}",
            expected="bool or integers, 0 or 1",
            fix="give the mask as 0 and 1; weights belong into a declared field",
            record=rid,
        )
        return
    bad = np.flatnonzero((mask != 0) & (mask != 1))
    if bad.size:
        i = int(bad[0])
        yield problem(
            "HS104",
            where=f"{where}[{i}]",
            got=f"{int(mask[i])} ({bad.size} such value(s))",
            expected="0 or 1",
            record=rid,
        )
    elif t and not mask.any():
        yield problem("HS103", where=where, got=f"0 of {t} tokens supervised", expected="at least 1", record=rid)


def _check_positions(record: Record, t: int) -> Iterator[Problem]:
    pos = record.position_ids
    if pos is None:
        return
    where, rid = f"record {record.id!r}: position_ids", record.id
    if pos.shape != (t,):
        yield problem("HS106", where=where, got=f"shape {list(pos.shape)}", expected=f"[{t}]", record=rid)
    elif pos.dtype.kind not in "iu":
        yield problem("HS106", where=where, got=f"dtype {pos.dtype}", expected="integers", record=rid)
    elif t:
        # Compared as they are: as int64, an unsigned 2**63 would be negative.
        bad = np.concatenate([[pos[0] < 0 or pos[0] > _MAX_POSITION], (pos[1:] < pos[:-1]) | (pos[1:] > _MAX_POSITION)])
        if bad.any():
            i = int(bad.argmax())
            expected = f"positions that start at 0 or above, never fall and stay below {_MAX_POSITION + 1}"
            yield problem("HS106", where=f"{where}[{i}]", got=int(pos[i]), expected=expected, record=rid)


def _check_fields(contract: Contract, record: Record, t: int) -> Iterator[Problem]:
    where, rid = f"record {record.id!r}", record.id
    declared = {f.name: f for f in contract.fields}
    for name in record.fields:
        if name not in declared:
            yield problem(
                "HS109",
                where=f"{where}: fields[{name!r}]",
                got=f"a field {name!r}",
                expected=f"the fields of the contract: {sorted(declared)}",
                fix="leave it out, or declare it in the contract",
                record=rid,
            )
    for name, spec in declared.items():
        array = record.fields.get(name)
        if array is None:
            yield problem(
                "HS109",
                where=f"{where}: fields",
                got=f"fields {sorted(record.fields)}",
                expected=f"{name} among them",
                fix=f"give fields[{name!r}]",
                record=rid,
            )
            continue
        yield from _check_field(spec, array, t, f"{where}: fields[{name!r}]", rid)


def _check_field(spec: FieldSpec, array: npt.NDArray[Any], t: int, where: str, rid: str) -> Iterator[Problem]:
    shape = (t, *spec.shape) if spec.axis == "token" else spec.shape
    if array.shape != shape:
        yield problem(
            "HS101",
            where=where,
            got=f"shape {list(array.shape)}",
            expected=f"{list(shape)} (axis {spec.axis})",
            fix="give the field as the contract declares it",
            record=rid,
        )
    elif dtype_name(array.dtype) != spec.dtype:
        yield problem(
            "HS207",
            where=where,
            got=f"dtype {dtype_name(array.dtype)}",
            expected=spec.dtype,
            fix=f"convert the field to {spec.dtype}; fields are never cast",
            record=rid,
        )


def _check_shape(contract: Contract, record: Record, capture: Capture, array: npt.NDArray[Any]) -> list[Problem]:
    out: list[Problem] = []
    where, rid, t = f"record {record.id!r}: hidden[{capture.key!r}]", record.id, record.num_tokens
    h = contract.target.hidden_size
    provenance: Any = record.provenance
    generated = isinstance(provenance, Provenance) and provenance.generation.mode != "none"
    if array.ndim != 2:
        out.append(
            problem(
                "HS101",
                where=where,
                got=f"shape {list(array.shape)}",
                expected=f"[{t}, {h}]",
                fix="give [T, H], without a batch axis",
                record=rid,
            )
        )
        return out
    s, width = array.shape
    if width != h:
        out.append(
            problem(
                "HS409",
                where=where,
                got=f"width {width}",
                expected=f"{h}, the target's hidden size",
                fix="use states of this target, one capture an array",
                record=rid,
            )
        )
    if s == 0:
        out.append(problem("HS102", where=where, got="0 states", expected="at least 1", record=rid))
    elif s != t and not (generated and s == t - 1):
        allowed = f"{t} or {t - 1}, as a generated record has" if generated else f"{t}, the number of input_ids"
        out.append(
            problem(
                "HS101",
                where=where,
                got=f"{s} states",
                expected=allowed,
                fix="truncate ids, mask and states together; check for a prefix cache or for chunks that "
                "were not joined",
                record=rid,
            )
        )
    first = next(iter(record.hidden.values()))
    if first.ndim == 2 and s != first.shape[0]:
        out.append(
            problem(
                "HS101",
                where=where,
                got=f"{s} states",
                expected=f"{first.shape[0]}, as the other captures",
                fix="all captures of a record have the same rows",
                record=rid,
            )
        )
    if dtype_name(array.dtype) not in FLOAT_DTYPES:
        out.append(
            problem(
                "HS207",
                where=where,
                got=f"dtype {dtype_name(array.dtype)}",
                expected=f"floating-point states that convert to {capture.dtype}",
                fix="dequantise the states, with their scales, before they are stored",
                record=rid,
            )
        )
    return out


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
        if self._norms or narrows or not finite_S.all():
            self._add_values(block_SH, narrows=narrows)
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
            if self._norms:
                self._sum_l2 += float(np.sqrt(np.einsum("ij,ij->i", x_SH, x_SH)).sum(dtype=np.float64))

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
