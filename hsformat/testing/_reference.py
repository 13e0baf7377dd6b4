"""What a target's states are, by Transformers in float32: the reference that extractors are compared with.

Depth 0..N-1 are Transformers' own ``hidden_states``. Its last entry is after the final norm; the state before that norm
is what the module whose output is that entry was given. torch and Transformers are imported when it is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsformat.layout import capture_key

if TYPE_CHECKING:
    import torch

__all__ = ["Reference"]


class Reference:
    """A causal LM on the CPU, one sequence at a time; in float32, or in another dtype to see what rounding does.

    Raises
    ------
    ModuleNotFoundError
        Transformers is not installed; the message names the pip command.
    """

    def __init__(self, folder: Path, *, dtype: str = "float32") -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ModuleNotFoundError as e:
            message = f"reference states need {e.name}: pip install 'hsformat[transformers]'"
            raise ModuleNotFoundError(message, name=e.name) from e
        self._torch = torch
        load: Any = AutoModelForCausalLM.from_pretrained  # without types of its own
        self._model = load(folder, dtype=getattr(torch, dtype)).eval()
        self._known: dict[bytes, tuple[dict[str, npt.NDArray[np.float32]], npt.NDArray[np.float32]]] = {}

    def states(self, input_ids: npt.NDArray[Any]) -> dict[str, npt.NDArray[np.float32]]:
        """Return [T, H] of every depth by capture key, ``d<N>n`` (after the final norm) among them."""
        return self._run(input_ids)[0]

    def logits(self, input_ids: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return [T, V]."""
        return self._run(input_ids)[1]

    def _run(self, input_ids: npt.NDArray[Any]) -> tuple[dict[str, npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
        ids = np.ascontiguousarray(input_ids, np.int64)
        if ids.tobytes() not in self._known:
            self._known[ids.tobytes()] = self._forward(ids)
        return self._known[ids.tobytes()]

    def _forward(self, ids: npt.NDArray[np.int64]) -> tuple[dict[str, Any], Any]:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def watch(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(output, self._torch.Tensor) and isinstance(inputs[0], self._torch.Tensor):
                seen.append((inputs[0], output))

        leaves = [m for m in self._model.modules() if not any(m.children())]
        hooks = [m.register_forward_hook(watch) for m in leaves]
        try:
            with self._torch.inference_mode():
                out = self._model(self._torch.from_numpy(ids[None]), output_hidden_states=True, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        *inner, last = out.hidden_states
        before = [x for x, y in seen if y.shape == last.shape and x.shape == y.shape and self._torch.equal(y, last)]
        if not before:
            raise RuntimeError("Transformers' last hidden state is not the output of a norm: no reference for depth N")
        n = len(inner)
        states = {capture_key(d): h[0].float().numpy() for d, h in enumerate(inner)}
        states |= {capture_key(n): before[-1][0].float().numpy(), capture_key(n, normed=True): last[0].float().numpy()}
        return states, out.logits[0].float().numpy()
