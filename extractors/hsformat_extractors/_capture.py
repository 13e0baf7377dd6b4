"""Reading the residual stream of a Transformers model: where it flows, and hooks that keep what is asked for.

The parts are found by watching one forward pass, not by names: the decoder layers are the one list of N modules that
run in order, each on the output of the one before; the final norm is the module that then changes the last output into
another tensor of the same shape. ``_probe`` proves the finding from numbers.

Shapes: B sequences, T tokens padded, S tokens of all sequences without padding, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hsformat.contract import Capture
from hsformat.problems import HsError, problem

__all__ = ["Anatomy", "Capturer", "PaddedBatch", "call", "find_anatomy", "hooked", "pad", "stream_argument"]

Hook = Any  # a torch.utils.hooks.RemovableHandle


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """Token ids of B sequences.

    Attributes
    ----------
    ids_BT, mask_BT
        int64; the mask is 1 where there is a token.
    lengths
        Tokens of each sequence.
    """

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def positions_BT(self) -> torch.Tensor:
        """Positions 0..T-1 of each sequence, padded on the right."""
        return torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device).expand_as(self.ids_BT)

    @property
    def rows_S(self) -> torch.Tensor:
        """Indexes of the tokens into the flattened [B * T]."""
        return self.mask_BT.flatten().nonzero().flatten()


def pad(sequences: Sequence[Any], *, left: bool = False, width: int | None = None, device: Any = "cpu") -> PaddedBatch:
    """Pad sequences of ids to ``width`` (None: the longest one) with id 0, which the mask hides."""
    width = max(len(s) for s in sequences) if width is None else width
    ids, mask = np.zeros((len(sequences), width), np.int64), np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        where = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, where], mask[row, where] = sequence, 1
    return PaddedBatch(
        ids_BT=torch.from_numpy(ids).to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        lengths=tuple(len(s) for s in sequences),
    )


def call(module: nn.Module, batch: PaddedBatch, **extra: Any) -> Any:
    """Run a model on a right-padded batch without a cache, giving positions where its forward takes them."""
    known = inspect.signature(module.forward).parameters
    optional = {"position_ids": batch.positions_BT, "use_cache": False}
    given = {k: v for k, v in optional.items() if k in known}
    return module(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, **given, **extra)


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a causal LM.

    Attributes
    ----------
    body
        The part without the head: what runs when states alone are wanted.
    layers
        The N decoder layers.
    final_norm
        The norm between depth N and the head.
    embedding, head
        Input embedding and lm_head.
    """

    body: nn.Module
    layers: tuple[nn.Module, ...]
    final_norm: nn.Module
    embedding: nn.Module
    head: nn.Module


@dataclass(eq=False)
class _Seen:
    """What one module was given and gave, in the order of calls."""

    name: str
    module: nn.Module
    calls: int = 0
    x: Any = None
    y: Any = None


@contextmanager
def hooked(handles: Sequence[Hook]) -> Iterator[None]:
    """Remove hooks at the end of the block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def find_anatomy(model: Any, batch: PaddedBatch, num_layers: int) -> Anatomy:
    """Find the parts of a causal LM by watching one forward pass on ``batch``.

    Raises
    ------
    HsError
        HS410: no list of N layers passes one residual stream on, or no norm follows it, or there is no head.
    """
    seen = _watch(model, batch, num_layers)
    lists = [name for name, module in _layer_lists(model, num_layers)]
    layers: list[_Seen] = []
    for name in lists:
        members = [s for s in seen if s.name.rpartition(".")[0] == name]
        if len(members) == num_layers and all(s.calls == 1 for s in members):
            layers = members
            break
    if not layers:
        raise _unsupported(f"no module list of {num_layers} layers that run once each; lists of that length: {lists}")
    for s in layers:
        if not (_is_stream(s.x) and _is_stream(s.y)):
            raise _unsupported(f"{s.name} passes on {_shape(s.x)} -> {_shape(s.y)}, not one residual stream [B, T, H]")
    if lame := next((s for s in layers if not (torch.isfinite(s.x).all() and torch.isfinite(s.y).all())), None):
        raise HsError(
            problem(
                "HS201",
                where=f"target: {lame.name}",
                got="a state that is NaN or infinite, on a short input",
                expected="finite states",
                fix="check the weights, or run the target in another dtype",
            )
        )
    for a, b in itertools.pairwise(layers):
        if not torch.equal(a.y, b.x):
            raise _unsupported(f"the output of {a.name} is not the input of {b.name}: something runs between them")
    last = layers[-1].y
    after = seen[seen.index(layers[-1]) + 1 :]
    norms = [
        s for s in after
        if _is_stream(s.x) and _is_stream(s.y) and torch.equal(s.x, last)
        and s.y.shape == last.shape and not torch.equal(s.y, last)
    ]  # fmt: skip
    if not norms or norms[0].calls != 1:
        raise _unsupported(f"no norm follows {layers[-1].name}; after it run {[s.name for s in after][:5]}")
    body, embedding, head = model.base_model, model.get_input_embeddings(), model.get_output_embeddings()
    if body is model or embedding is None or head is None:
        raise _unsupported(f"{type(model).__name__} does not name its base model, input embedding and head")
    return Anatomy(
        body=body,
        layers=tuple(s.module for s in layers),
        final_norm=norms[0].module,
        embedding=embedding,
        head=head,
    )


def _layer_lists(model: nn.Module, num_layers: int) -> list[tuple[str, nn.Module]]:
    """Return the outermost module lists of N members; those inside a layer are its experts."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not inside:
            found.append((name, module))
    return found


def _watch(model: nn.Module, batch: PaddedBatch, num_layers: int) -> list[_Seen]:
    """Run the model; return the modules that ran, in order, without those inside the layers of a list."""
    lists = [name for name, _ in _layer_lists(model, num_layers)]
    order: list[_Seen] = []
    handles: list[Hook] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") and name.rpartition(".")[0] != outer for outer in lists):
            continue
        seen = _Seen(name, module)

        def before(_: nn.Module, args: Any, kwargs: Any, seen: _Seen = seen) -> None:
            if not seen.calls:
                order.append(seen)
            seen.calls += 1
            x = stream_argument(args, kwargs)
            seen.x = x.clone() if isinstance(x, torch.Tensor) else x

        def after(_: nn.Module, args: Any, y: Any, seen: _Seen = seen) -> None:
            y = y[0] if isinstance(y, tuple) and y else y
            seen.y = y.clone() if isinstance(y, torch.Tensor) else y

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    with hooked(handles):
        call(model, batch)
    return order


def stream_argument(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden states that a layer is called with."""
    return args[0] if args else kwargs.get("hidden_states")


def _is_stream(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 3 and x.is_floating_point()


def _shape(x: Any) -> str:
    return str(list(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__


def _unsupported(got: str) -> HsError:
    return HsError(
        problem(
            "HS410",
            where="target: the model's modules",
            got=got,
            expected="a causal LM: N decoder layers on one residual stream, a final norm, a head",
            fix="use an engine that serves this architecture and names its captures",
        )
    )


@dataclass(eq=False)
class Capturer:
    """Hooks that keep the requested captures of one forward pass, without padding.

    A captured tensor is copied at once: layers may write into their input in place.
    """

    anatomy: Anatomy
    captures: Sequence[Capture]
    _rows_S: torch.Tensor | None = None
    _kept: dict[str, torch.Tensor] = field(default_factory=dict)
    _handles: list[Hook] = field(default_factory=list)

    def __post_init__(self) -> None:
        for capture in self.captures:
            self._install(capture)

    def _install(self, capture: Capture) -> None:
        key, depth = capture.key, capture.depth
        if capture.norm == "final":
            after = self.anatomy.final_norm
            self._handles.append(after.register_forward_hook(lambda _m, _args, y: self._keep(key, y)))
            return
        inside = depth < len(self.anatomy.layers)
        site = self.anatomy.layers[depth] if inside else self.anatomy.final_norm
        self._handles.append(
            site.register_forward_pre_hook(
                lambda _m, args, kwargs: self._keep(key, stream_argument(args, kwargs)), with_kwargs=True
            )
        )

    def _keep(self, key: str, x_BTH: torch.Tensor) -> None:
        if self._rows_S is not None:  # None while the target generates
            self._kept[key] = x_BTH.flatten(0, 1).index_select(0, self._rows_S)

    @torch.inference_mode()
    def run(self, batch: PaddedBatch) -> dict[str, torch.Tensor]:
        """Run the model's body, never the head, and return [S, H] a capture."""
        self._rows_S, self._kept = batch.rows_S, {}
        try:
            call(self.anatomy.body, batch)
            return self._kept
        finally:
            self._rows_S, self._kept = None, {}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
