"""Layouts: how a draft consumes captures when it is trained, how an engine feeds it, and the EAGLE-3 shift.

A layout names captures by key, in the order in which the draft's ``fc`` concatenates them. This module may import
``models``, ``digests`` and ``rotary``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hsformat.digests import Digest
from hsformat.models import FromList, Frozen
from hsformat.rotary import Rope

__all__ = [
    "EAGLE3_SHIFT",
    "AuxInput",
    "CaptureKey",
    "Layout",
    "ServingLayout",
    "Shift",
    "capture_key",
    "parse_capture_key",
]

_KEY = re.compile(r"d(0|[1-9][0-9]{0,8})(n?)\Z")
"""Nine digits: beyond every model, and a number of thousands of digits is an error of Python's own."""

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
        shown = key if len(key) <= 40 else f"{key[:40]}..."
        raise ValueError(f"not a capture key: {shown!r}; expected d<depth> or d<depth>n, for example d15 or d30n")
    return int(m[1]), bool(m[2])


class AuxInput(Frozen):
    """A hidden state by its meaning, wherever it is: stored, or fed to a draft.

    Attributes
    ----------
    depth
        The residual stream after this many decoder layers; 0 is the embedding output, N is after the last layer.
    norm
        ``none``: as it is in the residual stream. ``final``: after the target's final norm (depth N alone).
    """

    depth: Annotated[int, Field(ge=0)]
    norm: Literal["none", "final"]

    @property
    def key(self) -> str:
        """The name by which a tensor is found: ``d15``, ``d30``, ``d30n``."""
        return capture_key(self.depth, normed=self.norm == "final")


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


class ServingLayout(Frozen):
    """What an engine of a given version really does with a draft folder and a target. It has no ``last``.

    Attributes
    ----------
    engine, version
        As ``--engine`` and ``--engine-version`` name them.
    evidence
        How it is known: ``ran``, ``read``, ``proved`` (``engines.rows``), or ``stated`` by a custom layout.
    architecture, num_layers, target_hidden_size, vocab_size
        Of the target.
    aux
        What ``fc`` concatenates, in that order.
    hidden_size, num_draft_layers
        Of the draft.
    norm_before_residual, norm_before_fc, fc_norm, norm_output
        The norms on the draft's side that are applied: the residual of the first layer is the normed ``fc`` output; one
        RMSNorm over the concatenated captures; one RMSNorm a capture; the draft's output is passed on after its norm.
    later_layers_norm
        Which norm stands before the attention of the draft's layers after the first; null: it has one layer.
    rope, max_positions
        Rotary embedding of the draft's attention and the ``max_position_embeddings`` that bounds its positions; null:
        the config states none.
    rms_norm_eps
        Of all norms of the draft; null: the config states none, and no class fills it in.
    embedding, head
        Whose are used: the draft's or the target's; ``unknown``: the draft's weights cannot be read.
    draft_vocab_size, vocab_map
        Rows of the head, and the digest of the target ids that they stand for (int64, little-endian); null: the head
        has the target's vocabulary; ``unknown``: the map cannot be read.
    shift
        Token, position and target of a training index.
    """

    engine: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1)]
    evidence: Literal["ran", "read", "proved", "stated"]
    architecture: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(gt=0)]
    target_hidden_size: Annotated[int, Field(gt=0)]
    vocab_size: Annotated[int, Field(gt=0)]
    aux: Annotated[tuple[AuxInput, ...], Field(min_length=1), FromList]
    hidden_size: Annotated[int, Field(gt=0)]
    num_draft_layers: Annotated[int, Field(gt=0)]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    later_layers_norm: Literal["input_layernorm", "hidden_norm"] | None
    rope: Annotated[tuple[Rope, ...], FromList]
    max_positions: Annotated[int, Field(gt=0)] | None
    rms_norm_eps: Annotated[float, Field(gt=0)] | None
    embedding: Literal["draft", "target", "unknown"]
    head: Literal["draft", "target", "unknown"]
    draft_vocab_size: Annotated[int, Field(gt=0)]
    vocab_map: Digest | Literal["unknown"] | None
    shift: Shift

    @model_validator(mode="after")
    def _depths(self) -> Self:
        for a in self.aux:
            if a.depth > self.num_layers or (a.norm == "final" and a.depth != self.num_layers):
                raise ValueError(f"the target of {self.num_layers} layers has no state {a.key}")
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the aux inputs, in the order in which the draft is fed them."""
        return tuple(a.key for a in self.aux)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON-able data."""
        data: dict[str, Any] = self.model_dump(mode="json")
        return data
