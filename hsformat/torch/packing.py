"""Records one after another, for attention that takes sequences of different lengths: nothing is padded or shifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hsformat.record import Generation
from hsformat.torch.tensors import TensorRecord

__all__ = ["Packed", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """R records, the rows of each after those of the one before it.

    Tokens and states have offsets of their own, since a generated record has one state less than tokens: row t of a
    record's states is ``cu_states[r] + t`` and not ``cu_seqlens[r] + t``.

    Attributes
    ----------
    ids
        Of the records.
    input_ids, position_ids
        [sum T] int64.
    loss_mask
        [sum T] bool.
    hidden
        Capture key to [sum S, H].
    token_fields, record_fields
        [sum T, *shape], [R, *shape].
    cu_seqlens, cu_states
        [R + 1] int32: where the tokens and the states of each record begin, and where the last ends.
    record_index
        [sum T] int64: the record of each token, 0..R-1.
    generations
        R: who wrote the supervised tokens of each record, and how.
    """

    ids: tuple[str, ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    hidden: Mapping[str, torch.Tensor]
    token_fields: Mapping[str, torch.Tensor]
    record_fields: Mapping[str, torch.Tensor]
    cu_seqlens: torch.Tensor
    cu_states: torch.Tensor
    record_index: torch.Tensor
    generations: tuple[Generation, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Sum of T."""
        return len(self.input_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0

        def add(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        self._map(add)
        return total

    def unpack(self) -> list[TensorRecord]:
        """Return the records again, as views: for what works record by record, as :mod:`hsformat.align` does."""
        tokens, states = self.cu_seqlens.tolist(), self.cu_states.tolist()
        out = []
        for r, record_id in enumerate(self.ids):
            t, s = slice(tokens[r], tokens[r + 1]), slice(states[r], states[r + 1])
            out.append(
                TensorRecord(
                    id=record_id,
                    input_ids=self.input_ids[t],
                    loss_mask=self.loss_mask[t],
                    position_ids=self.position_ids[t],
                    hidden={k: h[s] for k, h in self.hidden.items()},
                    token_fields={k: v[t] for k, v in self.token_fields.items()},
                    record_fields={k: v[r] for k, v in self.record_fields.items()},
                    generation=self.generations[r],
                )
            )
        return out

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Packed:
        """Return the same on a device."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Packed:
        """Return the same in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                value = f(value)
            elif isinstance(value, Mapping):
                value = {k: f(v) for k, v in value.items()}
            values[field.name] = value
        return Packed(**values)


def pack(records: Sequence[TensorRecord]) -> Packed:
    """Join records, as the ``collate`` of a loader.

    Parameters
    ----------
    records
        At least one; all with the same captures and fields.

    Raises
    ------
    ValueError
        There is none, or one has other captures or fields than the first.
    """
    if not records:
        raise ValueError("nothing to pack: no records")
    first = records[0]
    for r in records:
        for name in ("hidden", "token_fields", "record_fields"):
            got, expected = set(getattr(r, name)), set(getattr(first, name))
            if got != expected:
                what = f"{name} {sorted(got)}, and record {first.id!r} {sorted(expected)}"
                raise ValueError(f"records of one batch have the same arrays: record {r.id!r} has {what}")
    lengths = np.array([r.num_tokens for r in records])
    return Packed(
        ids=tuple(r.id for r in records),
        input_ids=_joined([r.input_ids for r in records]),
        loss_mask=_joined([r.loss_mask for r in records]),
        position_ids=_joined([r.position_ids for r in records]),
        hidden={k: _joined([r.hidden[k] for r in records]) for k in first.hidden},
        token_fields={k: _joined([r.token_fields[k] for r in records]) for k in first.token_fields},
        record_fields={k: _joined([r.record_fields[k][None] for r in records]) for k in first.record_fields},
        cu_seqlens=_offsets(lengths.tolist()),
        cu_states=_offsets([r.num_states for r in records]),
        record_index=torch.from_numpy(np.repeat(np.arange(len(records)), lengths)),
        generations=tuple(r.generation for r in records),
    )


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the first axis.

    By NumPy: torch would start threads of its own for each thread that asks; and NumPy asks the system for huge pages,
    without which most of the time goes into memory that is new to the process (docs/benchmarks.md).
    """
    parts = [_bytes(t) for t in tensors]
    out = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.uint8)
    np.concatenate(parts, out=out)
    return torch.from_numpy(out).view(tensors[0].dtype)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.contiguous().view(torch.uint8).numpy()


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
