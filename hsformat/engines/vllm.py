"""vLLM: the ids of ``eagle_aux_hidden_state_layer_ids``."""

from __future__ import annotations

from hsformat.engines.rules import LLAMA_RULE, NumberingRule

__all__ = ["RULES"]

RULES = (
    NumberingRule(
        engine="vllm",
        title="vLLM",
        architectures=LLAMA_RULE,
        shift=0,
        first_depth=0,
        at_last="none",
        text="id {}",
        reasons={"last_normed": "the states that it captures are before the final norm"},
        source="ids 0, 1, 2, 15, 27, 29 and 30 of SmolLM2-135M (30 layers) and tiny Qwen2 and Qwen3, compared with "
        "Transformers in float32 on a CPU: relative error 0 to 2e-6",
        versions=("0.32.0",),
        evidence="ran",
    ),
)
