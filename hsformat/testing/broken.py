"""Records that break one rule each, with the code that a writer must refuse them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hsformat.contract import Contract
from hsformat.record import Record
from hsformat.testing.strategies import records

__all__ = ["BREAKS", "Break", "broken_records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One way to break a record.

    Attributes
    ----------
    name
        What is wrong, in words.
    code
        The problem that it is.
    changes
        From a valid record to the arguments of :class:`Record` that it replaces; None: not possible with this
        contract or record.
    """

    name: str
    code: str
    changes: Callable[[Contract, Record], dict[str, Any] | None]

    def apply(self, contract: Contract, record: Record) -> Record | None:
        """Return the record broken, or None where that is not possible."""
        changes = self.changes(contract, record)
        return None if changes is None else Record(**{**_arguments(record), **changes})


def _arguments(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__slots__}


def _capture(record: Record, edit: Callable[[Any], Any], at: int = 0) -> dict[str, Any]:
    key = list(record.hidden)[at]
    return {"hidden": {**record.hidden, key: edit(record.hidden[key])}}


def _at(array: Any, index: Any, value: Any) -> Any:
    out = array.copy()
    out[index] = value
    return out


def _another_length(contract: Contract, record: Record) -> dict[str, Any] | None:
    return None if len(record.hidden) < 2 else _capture(record, lambda h: np.concatenate([h, h[:1]]), at=-1)


def _not_generated(_: Contract, record: Record) -> dict[str, Any] | None:
    if record.num_tokens < 2:
        return None
    hidden = {k: h[: record.num_tokens - 1] for k, h in record.hidden.items()}
    return {"hidden": hidden, "provenance": None}


def _of_field(edit: Callable[[Any], Any]) -> Callable[[Contract, Record], dict[str, Any] | None]:
    def changes(contract: Contract, record: Record) -> dict[str, Any] | None:
        if not contract.fields:
            return None
        name = contract.fields[0].name
        return {"fields": {**record.fields, name: edit(record.fields[name])}}

    return changes


def _without_fields(contract: Contract, _: Record) -> dict[str, Any] | None:
    return {"fields": {}} if contract.fields else None


def _beyond_dtype(contract: Contract, record: Record) -> dict[str, Any]:
    """Finite as float64, infinite in any capture's dtype."""
    return _capture(record, lambda h: _at(np.ones(h.shape), (0, 0), 1e300))


BREAKS: tuple[Break, ...] = tuple(
    Break(name=name, code=code, changes=changes)
    for name, code, changes in (
        ("mask longer than ids", "HS101", lambda c, r: {"loss_mask": np.append(r.loss_mask, 1)}),
        ("batch axis", "HS101", lambda c, r: {"input_ids": r.input_ids[None]}),
        ("one capture longer", "HS101", _another_length),
        ("T - 1 states of given tokens", "HS101", _not_generated),
        ("states of three dimensions", "HS101", lambda c, r: _capture(r, lambda h: h[None])),
        ("field of another shape", "HS101", _of_field(lambda f: f[None])),
        ("no state", "HS102", lambda c, r: {"hidden": {k: h[:0] for k, h in r.hidden.items()}}),
        ("nothing supervised", "HS103", lambda c, r: {"loss_mask": np.zeros_like(r.loss_mask)}),
        ("mask of 2", "HS104", lambda c, r: {"loss_mask": _at(r.loss_mask, 0, 2)}),
        ("mask of floats", "HS104", lambda c, r: {"loss_mask": r.loss_mask.astype(np.float32)}),
        ("token beyond the vocabulary", "HS105", lambda c, r: {"input_ids": _at(r.input_ids, -1, c.target.vocab_size)}),
        ("ignored index", "HS105", lambda c, r: {"input_ids": _at(r.input_ids, 0, -100)}),
        ("tokens as floats", "HS105", lambda c, r: {"input_ids": r.input_ids.astype(np.float32)}),
        ("position too many", "HS106", lambda c, r: {"position_ids": np.arange(r.num_tokens + 1)}),
        ("negative position", "HS106", lambda c, r: {"position_ids": np.arange(r.num_tokens) - 1}),
        (
            "positions that fall",
            "HS106",
            lambda c, r: {"position_ids": np.arange(r.num_tokens)[::-1]} if r.num_tokens > 1 else None,
        ),
        ("empty id", "HS107", lambda c, r: {"id": ""}),
        ("id of 1,025 bytes", "HS107", lambda c, r: {"id": "é" * 512 + "x"}),
        ("lone surrogate in the id", "HS107", lambda c, r: {"id": "\ud800"}),
        ("capture left out", "HS109", lambda c, r: {"hidden": dict(list(r.hidden.items())[1:])}),
        ("capture too many", "HS109", lambda c, r: {"hidden": {**r.hidden, "d99": next(iter(r.hidden.values()))}}),
        ("field left out", "HS109", _without_fields),
        ("field too many", "HS109", lambda c, r: {"fields": {**r.fields, "undeclared_field": np.ones(1)}}),
        ("NaN", "HS201", lambda c, r: _capture(r, lambda h: _at(h, (0, -1), np.nan))),
        ("infinity", "HS201", lambda c, r: _capture(r, lambda h: _at(h, (-1, 0), np.inf))),
        ("zeros", "HS202", lambda c, r: _capture(r, np.zeros_like)),
        ("beyond the dtype", "HS207", _beyond_dtype),
        ("states as integers", "HS207", lambda c, r: _capture(r, lambda h: np.ones(h.shape, np.int8))),
        ("another width", "HS409", lambda c, r: _capture(r, lambda h: np.ones((len(h), h.shape[1] + 1), h.dtype))),
    )
)
"""Every rule of a record that can be broken in memory, once or more; a wrong code of one is a defect of hsformat."""


@st.composite
def broken_records(draw: st.DrawFn, contract: Contract) -> tuple[Record, str]:
    """Draw ``(record, code)``: a record that is valid but for one thing, and the code of that."""
    record = draw(records(contract))
    possible = [(broken, b.code) for b in BREAKS if (broken := b.apply(contract, record)) is not None]
    return draw(st.sampled_from(possible))
