"""Rotary position embedding as a fact, of a target's layers or of a draft's.

What reads it from a config is ``target/rope``. This module imports ``models`` alone of hsformat.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hsformat.models import Frozen

__all__ = ["Rope"]

JsonScalar = str | bool | int | float | None


class Rope(Frozen):
    """Rotary position embedding of a set of layers.

    Attributes
    ----------
    applies_to
        ``all``, or the layer type of the target's config (``sliding_attention``; ``no_rope_layers`` of a config that
        lists layers without RoPE) where types differ.
    kind
        ``default``, ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3``, ``proportional`` as Transformers
        names them.
    theta
        Base of the frequencies.
    rotary_dim
        How many of a head's dimensions are rotated.
    parameters
        The other parameters of the kind, by the names that Transformers uses. Of ``proportional``, ``head_dim`` D is
        one: with R = ``rotary_dim``, dimension i of a head is rotated with dimension i + D/2, by ``theta ** (-2i / D)``
        a position for i below R/2 (divided by ``factor`` where there is one), and not at all for the others.
    """

    applies_to: str
    kind: str
    theta: Annotated[float, Field(gt=0)]
    rotary_dim: Annotated[int, Field(gt=0)]
    parameters: dict[str, JsonScalar | list[float]]
