"""vLLM's driver with one defect of vLLM 0.32.0 mended that only a CPU has, so that drawn answers can be tried there.

The stand-in for a Triton kernel loses what it computes (``utils/cpu_triton_utils.py``, ``_expand_kernel_impl``), so
that the driver refuses to draw. Runs in the child process of the extractor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsformat_extractors.hosted.vllm_driver import VllmDriver
from hsformat_extractors.hosted.wire import Launch

__all__ = ["DrawingDriver"]


class DrawingDriver(VllmDriver):
    """Replaces that function before vLLM's worker takes it."""

    def start(self, launch: Launch) -> Mapping[str, Any]:
        import torch
        from vllm.utils import cpu_triton_utils

        def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
            ends = cu_num_tokens.to(torch.int64)
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            filled = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
            output.copy_(torch.repeat_interleave(filled, counts))

        cpu_triton_utils._expand_kernel_impl = expand
        return super().start(launch)
