"""One record as tensors. Shapes: T tokens, S states (T or T - 1), H hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hsformat.checks import check_loaded
from hsformat.contract import Contract
from hsformat.dtypes import BFLOAT16
from hsformat.problems import InvalidRecord
from hsformat.record import GIVEN, Generation, Record

__all__ = ["TensorRecord", "tensor_record", "to_tensor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorRecord:
    """One token sequence; every tensor is indexed by token and unshifted.

    Attributes
    ----------
    id
        The record's id.
    input_ids, position_ids
        [T] int64.
    loss_mask
        [T] bool: the assistant produced the token.
    hidden
        Capture key to [S, H] in the capture's dtype. S is T, or T - 1 for a generated record.
    token_fields
        Declared fields on the token axis: [T, *shape].
    record_fields
        Declared fields on the record axis: [*shape].
    generation
        Who wrote the supervised tokens, and how.
    """

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    hidden: Mapping[str, torch.Tensor]
    token_fields: Mapping[str, torch.Tensor]
    record_fields: Mapping[str, torch.Tensor]
    generation: Generation = GIVEN

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_states(self) -> int:
        """S; 0 without captures."""
        return next((len(h) for h in self.hidden.values()), 0)


def tensor_record(record: Record, contract: Contract, captures: Sequence[str]) -> TensorRecord:
    """Return a record as tensors; states share the record's memory.

    Parameters
    ----------
    captures
        Keys of the captures that it must have.

    Raises
    ------
    InvalidRecord
        It breaks the contract: lengths, mask, token ids, positions, fields, shapes or dtypes of captures. The numbers
        of states are not looked at.
    """
    if problems := check_loaded(contract, record, captures):
        raise InvalidRecord(problems)
    positions = np.arange(record.num_tokens) if record.position_ids is None else record.position_ids
    fields = {f.name: (f.axis, to_tensor(record.fields[f.name])) for f in contract.fields}
    return TensorRecord(
        id=record.id,
        input_ids=torch.from_numpy(record.input_ids.astype(np.int64)),
        loss_mask=torch.from_numpy(record.loss_mask.astype(np.bool_)),
        position_ids=torch.from_numpy(positions.astype(np.int64)),
        hidden={key: to_tensor(record.hidden[key]) for key in captures},
        token_fields={name: t for name, (axis, t) in fields.items() if axis == "token"},
        record_fields={name: t for name, (axis, t) in fields.items() if axis == "record"},
        generation=record.provenance.generation,
    )


def to_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor of the same dtype, bit for bit.

    It shares the array's memory, unless that cannot be written or is not contiguous, which torch wants of it.
    """
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy(order="C")
    if array.dtype == BFLOAT16:  # which torch does not know as NumPy's
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
