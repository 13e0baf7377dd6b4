"""The base of all data models: frozen, keyword-only, unknown fields refused, types not coerced.

Imports nothing of hsformat.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = ["FromList", "Frozen"]


class Frozen(BaseModel):
    """Immutable; ``extra="forbid"``; strict: ``"2"`` is no integer and ``True`` is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FromList = BeforeValidator(_list_to_tuple)
"""Annotation of a tuple field that a list may be given for: ``Annotated[tuple[int, ...], FromList]``."""
