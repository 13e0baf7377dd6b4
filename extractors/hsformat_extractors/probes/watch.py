"""What a process notes of the modules that run in it: the inputs of a draft's ``fc``, and logits.

Hooks on all modules, since an engine's names are its own and change. ``fc`` is the one module that maps ``K * H`` to
``H`` (``tiny``); logits are what is as wide as a vocabulary. All goes to files, since an engine's modules may run in
another process. Used inside an engine's process: imports torch and nothing of an engine.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as global_hooks

from hsformat_extractors.probes.serve import FEATURES, LOGITS, Job, write_array

__all__ = ["watching"]

_MAX_LOGITS = 64
"""Files of logits that are kept: those of a few steps."""


def watching(job: Job) -> AbstractContextManager[Any]:
    """Write down what a job's modules do, until the returned context is left.

    The first input [T, K * H] of ``fc`` with the rows of the prompt: an engine may pad them, and runs fewer in later
    steps. All logits, [n, V].
    """
    out, width, rows = Path(job.out), job.slots * job.hidden, len(job.prompt)
    state = {"features": 0, "logits": 0}

    def note(_module: Any, args: Any, output: Any) -> None:
        x = next((a for a in args if isinstance(a, torch.Tensor)), None)
        y = getattr(output, "next_token_logits", output[0] if isinstance(output, tuple) and output else output)
        if not isinstance(y, torch.Tensor) or y.ndim != 2:
            return
        if x is not None and x.ndim == 2 and x.shape[-1] == width and len(x) >= rows and y.shape[-1] == job.hidden:
            _keep(state, "features", 1, out / FEATURES, x[:rows])
        elif y.shape[-1] in job.vocabularies:
            _keep(state, "logits", _MAX_LOGITS, out / LOGITS.format(state["logits"]), y)

    stack = ExitStack()
    stack.callback(global_hooks.register_module_forward_hook(note).remove)
    return stack


def _keep(state: dict[str, int], kind: str, most: int, path: Path, x: torch.Tensor) -> None:
    if state[kind] < most:
        write_array(path, x.detach().to("cpu", torch.float32).numpy())
        state[kind] += 1
