"""Whether what an engine returned is what it was asked for: HS106, HS110, HS206, HS207, HS604.

An extractor is a plugin: its ids, mask, positions, provenance and dtype are compared with the sample and the request;
only the states are taken on its word. May import ``record``, ``problems`` and ``extraction.protocol``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.dtypes import dtype_name
from hsformat.extraction.protocol import ExtractionRequest
from hsformat.problems import Problem, problem
from hsformat.record import Record, TokenSample

__all__ = ["check_answer"]


def check_answer(request: ExtractionRequest, sample: TokenSample, record: Record) -> list[Problem]:
    """Return everything in which a record differs from what was asked; its states' numbers are not looked at.

    With generation the ids begin with the sample's and go on for at most ``max_new_tokens``; the mask is 1 on what was
    written and 0 before. Without, ids and mask are the sample's.
    """
    out = list(_tokens(request, sample, record))
    if not out:  # a mask is compared with tokens that are right
        out += _mask(request, sample, record)
    out += _positions(record)
    out += _provenance(request, sample, record)
    for key, states in record.hidden.items():
        if (got := dtype_name(states.dtype)) != request.target.dtype:
            where, expected = (
                f"record {record.id!r}: hidden[{key!r}]",
                f"{request.target.dtype}, in which the target runs",
            )
            out.append(problem("HS207", where=where, got=f"dtype {got}", expected=expected, record=record.id))
    return out


def _tokens(request: ExtractionRequest, sample: TokenSample, record: Record) -> Iterator[Problem]:
    sent, ran = np.asarray(sample.input_ids), np.asarray(record.input_ids)
    new = request.generation.max_new_tokens or 0
    head = ran[: len(sent)] if new else ran
    if not np.array_equal(sent, head):
        at = _first_difference(sent, head)
        yield _problem("HS206", record, f"input_ids[{at}]", f"{_item(ran, at)} ({len(ran)} tokens ran)",
                       f"{_item(sent, at)} ({len(sent)} tokens were sent)")  # fmt: skip
    elif new and not len(sent) < len(ran) <= len(sent) + new:
        yield _problem("HS206", record, "input_ids", f"{len(ran) - len(sent)} new tokens", f"1 to {new}")


def _mask(request: ExtractionRequest, sample: TokenSample, record: Record) -> Iterator[Problem]:
    wanted = np.asarray(sample.loss_mask)
    if request.generation.mode != "none":
        wanted = np.zeros(record.num_tokens, np.uint8)
        wanted[len(sample) :] = 1
    if record.loss_mask.shape != wanted.shape:
        return  # HS101, which every writer checks
    if not np.array_equal(record.loss_mask, wanted):
        at = _first_difference(wanted, record.loss_mask)
        yield _problem("HS110", record, f"loss_mask[{at}]", record.loss_mask[at], f"{wanted[at]}, as the sample says")


def _positions(record: Record) -> Iterator[Problem]:
    positions = record.position_ids
    if positions is not None and not np.array_equal(positions, np.arange(record.num_tokens)):
        yield _problem("HS106", record, "position_ids", "other positions", "0..T-1: no others were asked for")


def _provenance(request: ExtractionRequest, sample: TokenSample, record: Record) -> Iterator[Problem]:
    wanted = sample.provenance.model_copy(update={"generation": request.generation})
    if record.provenance != wanted:
        yield _problem("HS604", record, "provenance", record.provenance, f"{wanted}, as was asked")


def _first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def _item(array: npt.NDArray[Any], at: int) -> object:
    return array[at] if at < len(array) else "nothing"


def _problem(code: str, record: Record, what: str, got: object, expected: object) -> Problem:
    return problem(code, where=f"record {record.id!r}: {what}", got=got, expected=expected, record=record.id)
