"""From an engine's answer to a record: its tokens, rows, widths and dtypes are compared with what was asked.

What is read is the staged file, which is deleted; records own what was read. Shapes: T tokens, S states, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.dtypes import dtype_name
from hsformat.extraction.protocol import ExtractionRequest
from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.record import Record, TokenSample
from hsformat.target.checkpoint import read_header, read_integers, read_tensor
from hsformat_extractors.hosted.wire import TOKENS, Answer

__all__ = ["Unusable", "check", "read", "record_of"]

_ROWS_FIX = (
    "switch off the engine's prefix cache and speculative decoding; if it returns with this record alone, report it to "
    "the engine"
)


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """An answer that gives no record; ``again``: another try may."""

    problems: list[Problem]
    again: bool


def read(answer: Answer, staging: Path, where: str) -> dict[str, npt.NDArray[Any]] | Unusable:
    """Read the file of an answer, and delete it.

    Parameters
    ----------
    where
        The record's place.

    Returns
    -------
    Arrays by key, or HS602: the file is not there, broken, or not in the staging folder.
    """
    path = staging / answer.file
    if Path(answer.file).name != answer.file or answer.file in ("", ".", ".."):
        wrong = problem("HS602", where=where, got=f"a file {answer.file!r}", expected="a file of the staging folder")
        return Unusable(problems=[wrong], again=False)
    out: dict[str, npt.NDArray[Any]] = {}
    try:
        for info in read_header(path):
            integers = read_integers(info)
            out[info.name] = read_tensor(info) if integers is None else integers
    except ForeignFileError as e:
        return Unusable(problems=[p.at(where) for p in e.problems], again=True)
    finally:
        path.unlink(missing_ok=True)
    return out


def check(
    answer: Answer,
    arrays: Mapping[str, npt.NDArray[Any]],
    sample: TokenSample,
    request: ExtractionRequest,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> Unusable | None:
    """Compare tokens and states with what was asked; None: they are that.

    HS206: other tokens, or an answer that goes on behind the end of its turn or stops before it. HS101, HS102: fewer or
    more rows than tokens (vllm#44485, sglang#26163), which another try may mend. HS109: not the captures that were
    asked for. HS207, HS409: another dtype or width.
    """
    problems = [*_tokens(answer, arrays, sample, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)]
    if problems:
        return Unusable(problems=problems, again=False)
    problems = [*_captures(arrays, sample, request)]
    if problems:
        return Unusable(problems=problems, again=False)
    problems = [*_rows(arrays, sample, tokens=len(answer.tokens), generated=max_new_tokens > 0, request=request)]
    return Unusable(problems=problems, again=True) if problems else None


def record_of(
    answer: Answer, arrays: Mapping[str, npt.NDArray[Any]], sample: TokenSample, request: ExtractionRequest
) -> Record:
    """Return the record of an answer that was checked."""
    ids, mask, provenance = sample.input_ids, sample.loss_mask, sample.provenance
    if request.generation.mode != "none":
        ids = np.array(answer.tokens, np.int32)
        mask = np.zeros(len(ids), np.uint8)
        mask[len(sample) :] = 1
        provenance = provenance.model_copy(update={"generation": request.generation})
    return Record(
        id=sample.id,
        input_ids=ids,
        loss_mask=mask,
        hidden={c.key: arrays[c.key] for c in request.captures},
        provenance=provenance,
        source_digest=sample.source_digest,
    )


def _tokens(
    answer: Answer,
    arrays: Mapping[str, npt.NDArray[Any]],
    sample: TokenSample,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> list[Problem]:
    ran, sent = np.array(answer.tokens, np.int64), sample.input_ids.astype(np.int64)
    n = len(sent)
    if not np.array_equal(ran[:n] if max_new_tokens else ran, sent):
        at = _first_difference(ran, sent)
        return [
            _wrong(sample, f"input_ids[{at}]", f"{_item(ran, at)} ({len(ran)} tokens ran)",
                   f"{_item(sent, at)} ({n} tokens were sent)")
        ]  # fmt: skip
    staged = arrays.get(TOKENS)
    if staged is None:
        return [_wrong(sample, TOKENS, "no ids beside the states", "the ids that the engine ran")]
    if (
        staged.ndim != 1
        or not len(ran) - (max_new_tokens > 0) <= len(staged) <= len(ran)
        or not np.array_equal(staged, ran[: len(staged)])
    ):  # vllm#56417: what is stored are the ids that ran
        at = _first_difference(staged.reshape(-1), ran)
        return [
            _wrong(sample, f"{TOKENS}[{at}]", f"{_item(staged.reshape(-1), at)} beside the states ({staged.size} ids)",
                   f"{_item(ran, at)}, as the engine answered ({len(ran)} ids)")
        ]  # fmt: skip
    if not max_new_tokens:
        return []
    new = ran[n:]
    ends = np.flatnonzero(np.isin(new, stop_token_ids))
    ended = bool(ends.size) and int(ends[0]) == len(new) - 1
    if not 0 < len(new) <= max_new_tokens:
        return [_wrong(sample, "input_ids", f"{len(new)} new tokens", f"1 to {max_new_tokens}")]
    if ends.size and not ended:
        return [_wrong(sample, f"input_ids[{n + int(ends[0])}]", f"the end of the turn, and {len(new)} new tokens",
                       "nothing behind it")]  # fmt: skip
    if not ended and len(new) < max_new_tokens:
        return [_wrong(sample, "input_ids", f"{len(new)} new tokens without the end of a turn",
                       f"{max_new_tokens}, or one of {list(stop_token_ids)} at the end")]  # fmt: skip
    return []


def _captures(arrays: Mapping[str, npt.NDArray[Any]], sample: TokenSample, request: ExtractionRequest) -> list[Problem]:
    wanted = {c.key for c in request.captures}
    found = set(arrays) - {TOKENS}
    if found != wanted:
        return [
            problem("HS109", where=f"record {sample.id!r}", got=f"captures {_keys(found)}", expected=_keys(wanted),
                    fix="a defect of the extractor: it returns other captures than it was asked for", record=sample.id)
        ]  # fmt: skip
    out = []
    width, dtype = request.target.hidden_size, request.target.dtype
    for key in sorted(wanted):
        where, h = f"record {sample.id!r}: hidden[{key!r}]", arrays[key]
        if h.ndim != 2 or h.shape[1] != width:
            out.append(problem("HS409", where=where, got=f"shape {list(h.shape)}", expected=f"[S, {width}]",
                               record=sample.id))  # fmt: skip
        if dtype_name(h.dtype) != dtype:
            out.append(problem("HS207", where=where, got=f"dtype {dtype_name(h.dtype)}",
                               expected=f"{dtype}, in which the target runs",
                               fix="start the engine in this dtype, or say --dtype", record=sample.id))  # fmt: skip
    return out


def _rows(
    arrays: Mapping[str, npt.NDArray[Any]],
    sample: TokenSample,
    *,
    tokens: int,
    generated: bool,
    request: ExtractionRequest,
) -> list[Problem]:
    rows = {c.key: len(arrays[c.key]) for c in request.captures}
    counts = set(rows.values())
    if len(counts) == 1 and counts <= ({tokens - 1, tokens} if generated else {tokens}):
        return []
    shown = ", ".join(f"{n} of {k}" for k, n in rows.items()) if len(counts) > 1 else f"{min(counts)} of each capture"
    wanted = f"{tokens - 1} or {tokens}" if generated else str(tokens)
    code = "HS101" if min(counts) else "HS102"
    return [
        problem(code, where=f"record {sample.id!r}", got=f"rows: {shown}", expected=f"{wanted}, for {tokens} tokens",
                fix=_ROWS_FIX, record=sample.id)
    ]  # fmt: skip


def _wrong(sample: TokenSample, what: str, got: str, expected: str) -> Problem:
    return problem("HS206", where=f"record {sample.id!r}: {what}", got=got, expected=expected, record=sample.id)


def _first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def _item(array: npt.NDArray[Any], at: int) -> object:
    return int(array[at]) if at < len(array) else "nothing"


def _keys(keys: set[str]) -> str:
    return ", ".join(sorted(keys, key=lambda k: (len(k), k))) or "none"
