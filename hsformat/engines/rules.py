"""The form of a numbering rule: how one engine numbers the depths of some architectures.

Rules are data, one module an engine; ``numbering`` reads them. A row says where it is known from, in which versions it
was seen, and whether it was run or only read there, so that nobody has to trust a bare number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["LLAMA_RULE", "NumberingRule"]

LLAMA_RULE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose decoder is Llama's: one residual stream and a final RMSNorm after the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberingRule:
    """How an engine numbers the captures of some architectures, with N the number of layers.

    Attributes
    ----------
    engine, title
        Lower case, as in ``--engine``; as its people write it.
    architectures
        As the first entry of ``architectures`` in the target's config.
    shift
        ``depth = number + shift``, for every number that exists.
    first_depth
        The lowest depth that has a number.
    at_last
        What the number of depth N stands for: the state before the final norm (``none``), after it (``final``), or
        that number must not be used (``absent``).
    text
        Format of a number for people, with ``{}`` in it.
    reasons
        Why there is no number, by ``first`` (depths below ``first_depth``), ``last`` (depth N before the final norm)
        and ``last_normed``.
    source, versions, evidence
        Where the rule is from, the versions it was seen in, and whether it was run or read there.
    """

    engine: str
    title: str
    architectures: tuple[str, ...]
    shift: int
    first_depth: int
    at_last: Literal["none", "final", "absent"]
    text: str
    reasons: Mapping[Literal["first", "last", "last_normed"], str]
    source: str
    versions: tuple[str, ...]
    evidence: Literal["ran", "read"]
