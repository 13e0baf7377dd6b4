"""What is said where a device has no memory left. May import torch and ``config``."""

from __future__ import annotations

import torch

from hsformat.problems import Problem, problem
from hsformat_trainer.config import TrainConfig

__all__ = ["memory_problem"]

_SIGNS = ("DefaultCPUAllocator", "out of memory", "Storage size calculation overflowed")
"""What torch says in a plain RuntimeError, which has no class of its own for the memory of the CPU."""


def memory_problem(error: Exception, config: TrainConfig) -> Problem | None:
    """Return HS410 for an error that says that memory is used up; None for any other."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not known and not (isinstance(error, RuntimeError) and any(s in str(error) for s in _SIGNS)):
        return None
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return problem(
        "HS410",
        where=f"--device {config.device}",
        got=said[:300],
        expected="memory for the draft, its optimizer and a batch",
        fix=f"lower --batch-tokens ({config.batch_tokens}) and raise --accumulation, lower --draft-vocab-size or the "
        "sizes of the draft, or use more devices; the last checkpoint stays, and --resume goes on with it",
    )
