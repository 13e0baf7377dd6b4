"""Transformers: the entries of ``hidden_states`` when a model is called with ``output_hidden_states=True``.

It serves no EAGLE-3 drafts: there are no rows about drafts.
"""

from __future__ import annotations

from hsformat.engines.rows import CaptureRow, DraftRow, NotRun, Unsupported

__all__ = ["CAPTURES", "DRAFTS", "NOT_RUN", "TITLE", "UNSUPPORTED"]

TITLE = "Transformers"

CAPTURES = (
    CaptureRow(
        architectures=("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        rule="shift",
        shift=0,
        lowest=0,
        deepest="N",
        default=(),
        order="as_given",
        duplicates="repeated",
        norm="final",
        source="hidden_states compared entry by entry with inputs and outputs of layers and final norm, float32, CPU "
        "(tests/unit/test_engines.py does it again with the version installed)",
        versions=("5.19.0", "5.24.0"),
        evidence="ran",
    ),
)

DRAFTS: tuple[DraftRow, ...] = ()

UNSUPPORTED: tuple[Unsupported, ...] = ()

NOT_RUN: tuple[NotRun, ...] = ()
