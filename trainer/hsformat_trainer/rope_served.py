"""Rotary embeddings that an engine computes otherwise than Transformers, whatever the config says. Brings no torch."""

from __future__ import annotations

from collections.abc import Sequence

from hsformat.problems import Problem, problem
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.engines_named import NamedEngine

__all__ = ["rope_problems"]


def rope_problems(spec: DraftSpec, engines: Sequence[NamedEngine]) -> list[Problem]:
    """Return HS407 for a ``dynamic`` rotary embedding that SGLang will serve.

    SGLang 0.5.23 scales the table of ``dynamic`` by the factor at every position; vLLM 0.32.0 and training do not scale
    positions up to ``max_position_embeddings`` (both read in their source, not run). Configs agree, so that only this
    tells it.
    """
    if spec.rope["rope_type"] != "dynamic":
        return []
    fix = "give --draft-rope of another type, or serve with vLLM alone"
    got = "dynamic, whose table it scales by the factor at every position"
    expected = "dynamic as it was trained: not scaled up to max_position_embeddings"
    return [
        problem("HS407", where=f"training and {e}: rope.rope_type", got=got, expected=expected, fix=fix)
        for e in engines
        if e.engine == "sglang"
    ]
