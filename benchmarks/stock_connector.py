"""vLLM's own format of states, on a CPU: for ``extraction_peer.py``, whose server takes its connector from here.

The ``ExampleHiddenStatesConnector`` of vLLM 0.32.0 copies by CUDA events, which a CPU has not. Ours, which runs there,
writes one tensor a capture; this one writes the one tensor ``hidden_states`` [T, slots, H] that speculators reads.
"""

from __future__ import annotations

import torch

from hsformat_extractors.hosted.vllm_connector import HiddenStatesConnector

__all__ = ["StockFormat"]


class StockFormat(HiddenStatesConnector):
    """Writes ``hidden_states`` and ``token_ids``."""

    def _captures(self, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"hidden_states": torch.stack(rows, dim=1)}
