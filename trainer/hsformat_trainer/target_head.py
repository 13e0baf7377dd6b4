"""The frozen ends of the target: embedding, final norm and head, read by name from its folder.

Shapes: V vocabulary, Vd rows of the draft's vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hsformat.contract import TargetModel
from hsformat.dtypes import BFLOAT16
from hsformat.problems import ForeignFileError, problem
from hsformat.target import load_key_tensor
from hsformat.target.keytensors import Role
from hsformat_trainer.finite import weights_not_finite
from hsformat_trainer.norms import layer_norm, rms_norm
from hsformat_trainer.precision import product_dtype

__all__ = ["SplitHead", "TargetHead"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitHead:
    """The head's rows in two parts, so that what the draft can propose is one contiguous product.

    Attributes
    ----------
    inside, inside_bias
        [Vd, H] and [Vd]: the rows of the draft's vocabulary, in its order.
    outside, outside_bias
        [V - Vd, H] and [V - Vd]: the others, ascending.
    inside_ids, outside_ids
        Their target ids.
    """

    inside: torch.Tensor
    inside_bias: torch.Tensor | None
    outside: torch.Tensor
    outside_bias: torch.Tensor | None
    inside_ids: torch.Tensor
    outside_ids: torch.Tensor


_OWN = "give the folder of the model that the contract is about, whole"


class TargetHead(nn.Module):
    """Embedding, final norm and head of a target.

    No part is trained, and none is in a ``state_dict``: a checkpoint of a draft holds the draft alone.

    Attributes
    ----------
    embed_weight, head_weight, head_bias
        [V, H], [V, H] and [V] or None; of a tied target the first two are one tensor. Rows that only pad the vocabulary
        are left out, so that none of them can win.
    norm_weight, norm_bias
        [H], as stored: a unit offset is added when the norm is applied.
    """

    def __init__(
        self,
        target: TargetModel,
        *,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None = None,
        head_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        tied = head_weight is embed_weight
        self.embed_weight: torch.Tensor
        self.norm_weight: torch.Tensor
        self.norm_bias: torch.Tensor | None
        self.head_bias: torch.Tensor | None
        self._own_head: torch.Tensor | None
        self.register_buffer("embed_weight", embed_weight, persistent=False)
        self.register_buffer("_own_head", None if tied else head_weight, persistent=False)
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.register_buffer("norm_bias", norm_bias, persistent=False)
        self.register_buffer("head_bias", head_bias, persistent=False)
        self._split: tuple[Any, SplitHead] | None = None

    @classmethod
    def load(
        cls, folder: str | Path, target: TargetModel, *, dtype: torch.dtype | None, device: torch.device | str
    ) -> TargetHead:
        """Read the tensors of a model folder.

        Parameters
        ----------
        folder
            The target's, as Transformers saves it.
        target
            What the contract says of it.
        dtype
            Of embedding and head as they are kept (products have their own); None: as stored. Norms and biases are
            float32.

        Raises
        ------
        ForeignFileError
            HS411, HS601, HS602, HS603: a tensor is not there or cannot be read; the contract says that the head has a
            bias and there is none, or the reverse. HS409: another width or fewer rows than the contract says. HS201:
            one holds NaN or infinity.
        """
        vocab, hidden = target.vocab_size, target.hidden_size

        def read(role: Role, *shape: int) -> torch.Tensor | None:
            array = load_key_tensor(folder, role)
            if array is None:
                return None
            if array.ndim != len(shape) or array.shape[1:] != shape[1:] or array.shape[0] < shape[0]:
                where, expected = f"{folder}: {role}", f"{list(shape)} or more rows"
                raise ForeignFileError(
                    problem("HS409", where=where, got=list(array.shape), expected=expected,
                            fix=_OWN)
                )  # fmt: skip
            return _tensor(array[: shape[0]])

        def needed(role: Role, *shape: int) -> torch.Tensor:
            tensor = read(role, *shape)
            if tensor is None:
                where, expected = f"{folder}: {role}", list(shape)
                raise ForeignFileError(problem("HS411", where=where, got="none", expected=expected, fix=_OWN))
            return tensor

        embed = needed("embedding", vocab, hidden).to(device, dtype)
        head = embed if target.embedding.tied else needed("lm_head", vocab, hidden).to(device, dtype)
        head_bias, norm_bias = read("lm_head_bias", vocab), read("final_norm_bias", hidden)
        if (head_bias is not None) != target.head.bias:
            got = "no bias" if head_bias is None else "a bias"
            raise ForeignFileError(
                problem(
                    "HS411", where=f"{folder}: lm_head_bias", got=got, expected=f"head.bias {target.head.bias}",
                    fix=_OWN,
                )
            )  # fmt: skip
        own = cls(
            target,
            embed_weight=embed,
            head_weight=head,
            norm_weight=needed("final_norm", hidden).to(device, torch.float32),
            norm_bias=None if norm_bias is None else norm_bias.to(device, torch.float32),
            head_bias=None if head_bias is None else head_bias.to(device, torch.float32),
        )
        roles = {"embed_weight": "embedding", "_own_head": "lm_head", "norm_weight": "final_norm"}
        roles |= {"norm_bias": "final_norm_bias", "head_bias": "lm_head_bias"}
        held = [(roles[name], tensor) for name, tensor in own.named_buffers()]
        if problems := weights_not_finite(held, where=str(folder), fix=_OWN):
            raise ForeignFileError(problems)
        return own

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H]; the embedding's tensor of a tied target."""
        return self.embed_weight if self._own_head is None else self._own_head

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return depth 0 of ids, [..., H]: the scale of the contract times the row."""
        rows = nn.functional.embedding(ids, self.embed_weight)
        scale = self.target.embedding.scale
        return rows if scale == 1.0 else rows * scale

    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Return [..., H] at depth N after the final norm, in at least float32."""
        norm = self.target.final_norm
        if norm.kind == "rmsnorm":
            return rms_norm(states, self.norm_weight, norm.eps, offset=1.0 if norm.unit_offset else 0.0)
        weight = self.norm_weight + 1.0 if norm.unit_offset else self.norm_weight
        return layer_norm(states, weight, self.norm_bias, norm.eps)

    def logits(self, last: torch.Tensor, *, normed: bool, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the target's logits, with bias, scale and cap, in at least float32.

        Parameters
        ----------
        last
            [..., H] at depth N.
        normed
            Whether the final norm is already in it.
        rows
            Target ids whose logits are wanted; None: all, [..., V].
        """
        hidden = last if normed else self.final_norm(last)
        weight = self.head_weight if rows is None else self.head_weight[rows]
        bias = self.head_bias if rows is None or self.head_bias is None else self.head_bias[rows]
        return self.shaped(self.product(hidden, weight), bias)

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``hidden @ weight.T`` in the dtype of products that is in force."""
        dtype = product_dtype(hidden.device, hidden.dtype)
        return nn.functional.linear(hidden.to(dtype), weight.to(dtype))

    def shaped(self, raw: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return logits of products, ``cap(scale * (raw + bias))``, in at least float32; ``raw`` may be overwritten."""
        head = self.target.head
        out = raw if raw.dtype == torch.float64 else raw.float()
        if bias is not None:
            out = out.add_(bias)
        if head.scale != 1.0:
            out = out.mul_(head.scale)
        return out if head.softcap is None else out.div_(head.softcap).tanh_().mul_(head.softcap)

    def split(self, target_ids: torch.Tensor | None, dtype: torch.dtype) -> SplitHead:
        """Return the head in two parts for a draft's vocabulary, in a dtype; made once and kept.

        Parameters
        ----------
        target_ids
            [Vd] the target ids of the draft's vocabulary, strictly rising; None: it is the target's.
        """
        key = (None if target_ids is None else (target_ids.data_ptr(), len(target_ids)), dtype, self.head_weight.device)
        if self._split is None or self._split[0] != key:
            self._split = key, self._make_split(target_ids, dtype)
        return self._split[1]

    def _make_split(self, target_ids: torch.Tensor | None, dtype: torch.dtype) -> SplitHead:
        weight, bias = self.head_weight, self.head_bias
        ids = torch.arange(len(weight), device=weight.device)
        if target_ids is None:
            inside = ids
            none = ids[:0]
            return SplitHead(
                inside=weight.to(dtype),
                inside_bias=bias,
                outside=weight[none].to(dtype),
                outside_bias=None if bias is None else bias[none],
                inside_ids=inside,
                outside_ids=none,
            )
        is_inside = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        is_inside[target_ids] = True
        outside = ids[~is_inside]
        return SplitHead(
            inside=weight[target_ids].to(dtype),
            inside_bias=None if bias is None else bias[target_ids],
            outside=weight[outside].to(dtype),
            outside_bias=None if bias is None else bias[outside],
            inside_ids=target_ids,
            outside_ids=outside,
        )


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    whole = np.ascontiguousarray(array)
    if whole.dtype == BFLOAT16:
        return torch.from_numpy(whole.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(whole.copy())
