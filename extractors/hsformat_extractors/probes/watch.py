"""What a process notes of the modules that run in it: the inputs of a draft's ``fc``.

Hooks on all modules, since an engine's names are its own and change. ``fc`` is the one module that maps ``K * H`` to
``H`` (``tiny``). Used inside an engine's process: imports torch and nothing of an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules import module as global_hooks

__all__ = ["watching"]

Keep = Callable[[npt.NDArray[Any]], None]


def watching(*, width: int, hidden: int, rows: int, keep: Keep) -> AbstractContextManager[Any]:
    """Call ``keep`` with each input [rows, width] of a module that makes [rows, hidden] of it, in float32.

    Only the rows of the prompt are looked at: an engine may pad them, and runs fewer in later steps. The hooks stay
    until the returned context is left.
    """

    def note(_module: Any, args: Any, output: Any) -> None:
        x = next((a for a in args if isinstance(a, torch.Tensor)), None)
        y = output[0] if isinstance(output, tuple) and output else output
        if x is None or not isinstance(y, torch.Tensor) or x.ndim != 2 or len(x) < rows:
            return
        if x.shape[-1] == width and y.shape[-1] == hidden:
            keep(x[:rows].detach().to("cpu", torch.float32).numpy().astype(np.float32))

    stack = ExitStack()
    stack.callback(global_hooks.register_module_forward_hook(note).remove)
    return stack
