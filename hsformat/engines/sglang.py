"""SGLang: the ids of ``eagle_config.eagle_aux_hidden_state_layer_ids`` and ``return_aux_hidden_state_layer_ids``."""

from __future__ import annotations

from dataclasses import replace

from hsformat.engines.rules import LLAMA_RULE, NumberingRule

__all__ = ["RULES"]

_LLAMA = NumberingRule(
    engine="sglang",
    title="SGLang",
    architectures=LLAMA_RULE[:1],
    shift=1,
    first_depth=1,
    at_last="absent",
    text="id {}",
    reasons={
        "first": "ids start at 0, which is the depth after the first layer",
        "last": "the id that it would have kills the engine at the first forward pass; it is output [1] of the "
        "final norm module",
        "last_normed": "no aux id; it is the hidden argument of the logits processor",
    },
    source="ids 0, 1, 5, 14, 28 and 29 of SmolLM2-135M (30 layers), compared with Transformers in float32 on a CPU",
    versions=("0.5.23",),
    evidence="ran",
)

RULES = (
    _LLAMA,
    replace(
        _LLAMA,
        architectures=LLAMA_RULE[1:],
        source="the model files of Qwen2 and Qwen3 capture as Llama's does",
        evidence="read",
    ),
)
