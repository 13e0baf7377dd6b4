"""What makes a record right: the 1xx rules, and its origin (HS604); the numbers of its states are scanned by ``scan``.

One implementation for the writer, which refuses, and for validation, which reports. Everything is returned, not the
first finding. This module may import ``problems``, ``digests``, ``dtypes``, ``contract``, ``record`` and ``scan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture, Contract, FieldSpec
from hsformat.digests import canonical_json, is_digest
from hsformat.dtypes import FLOAT_DTYPES, dtype_name
from hsformat.problems import Problem, problem
from hsformat.record import Provenance, Record
from hsformat.scan import CaptureStats, StateScan

__all__ = [
    "MAX_ID_BYTES",
    "check_loaded",
    "check_record",
    "check_tokens",
    "token_range_problem",
]

MAX_ID_BYTES = 1024
"""Of an id as UTF-8 (rule R-8)."""
_MAX_POSITION = 2**63 - 1


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


def check_loaded(contract: Contract, record: Record, captures: Sequence[str]) -> list[Problem]:
    """Check everything of a record of any source but the numbers of its states, which are only looked at.

    Parameters
    ----------
    captures
        Keys of the captures that it must have, each as the contract says: shape and dtype.
    """
    out = check_tokens(contract, record)
    where = f"record {record.id!r}"
    for capture in (c for c in contract.captures if c.key in captures):
        array = record.hidden.get(capture.key)
        if array is None:
            got, expected = f"captures {sorted(record.hidden)}", f"{capture.key} among them"
            out.append(problem("HS109", where=f"{where}: hidden", got=got, expected=expected, record=record.id))
            continue
        found = _check_shape(contract, record, capture, array)
        if not found and dtype_name(array.dtype) != capture.dtype:
            place, got = f"{where}: hidden[{capture.key!r}]", f"dtype {dtype_name(array.dtype)}"
            fix = "give states as they would be stored: hsformat.scan.to_stored"
            found = [problem("HS207", where=place, got=got, expected=capture.dtype, fix=fix, record=record.id)]
        out.extend(found)
    return out


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
