"""Transformers: the entries of ``hidden_states`` when a model is called with ``output_hidden_states=True``."""

from __future__ import annotations

from hsformat.engines.rules import LLAMA_RULE, NumberingRule

__all__ = ["RULES"]

RULES = (
    NumberingRule(
        engine="transformers",
        title="Transformers",
        architectures=LLAMA_RULE,
        shift=0,
        first_depth=0,
        at_last="final",
        text="hidden_states[{}]",
        reasons={"last": "it is the input of the final norm module; the last hidden_states entry is after that norm"},
        source="hidden_states compared entry by entry with inputs and outputs of layers and final norm, float32, CPU "
        "(tests/unit/test_engines.py does it again with the version installed)",
        versions=("5.19.0", "5.24.0"),
        evidence="ran",
    ),
)
