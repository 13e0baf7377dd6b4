"""A target's final norm and head in NumPy: from states at depth N to logits, without loading the model.

The head's matrix stays on the disk and is read in blocks of rows, so that memory does not grow with the vocabulary. May
import ``contract`` and the other modules of ``target``. Shapes: R rows of states, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import TargetModel
from hsformat.dtypes import to_float32
from hsformat.problems import ForeignFileError, Problem
from hsformat.target.checkpoint import TensorInfo, read_checkpoint, read_tensor
from hsformat.target.config import read_config
from hsformat.target.keytensors import find_key_tensors
from hsformat.target.rows import row_blocks

__all__ = ["TargetEnds", "open_ends"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetEnds:
    """The two ends of a target: the embedding, and the final norm with the head. Computes in float32.

    Attributes
    ----------
    model
        Says what norm, scale, cap and vocabulary are.
    embedding, lm_head
        Where the rows are; one and the same where they are tied.
    norm_weight, norm_bias, head_bias
        None: the target has none.
    """

    model: TargetModel
    embedding: TensorInfo
    lm_head: TensorInfo
    norm_weight: Floats | None
    norm_bias: Floats | None
    head_bias: Floats | None

    def normed(self, states_RH: Floats) -> Floats:
        """Return states at depth N after the final norm."""
        norm = self.model.final_norm
        x_RH = states_RH
        if norm.kind == "layernorm":
            x_RH = x_RH - x_RH.mean(axis=1, keepdims=True)
        y_RH: Floats = x_RH / np.sqrt(np.square(x_RH).mean(axis=1, keepdims=True) + np.float32(norm.eps))
        if self.norm_weight is not None:
            y_RH *= self.norm_weight + np.float32(norm.unit_offset)
        if self.norm_bias is not None:
            y_RH += self.norm_bias
        return y_RH

    def logit_blocks(self, normed_RH: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield ``(first token id, logits)`` over the vocabulary; rows that pad the head are left out.

        Raises
        ------
        ForeignFileError
            HS602: the file cannot be read or has become shorter.
        """
        head = self.model.head
        for first, rows_VH in row_blocks(self.lm_head, stop=self.model.vocab_size, columns=len(normed_RH)):
            logits_RV: Floats = normed_RH @ rows_VH.T
            if self.head_bias is not None:
                logits_RV += self.head_bias[first : first + len(rows_VH)]
            logits_RV *= np.float32(head.scale)
            if head.softcap is not None:
                logits_RV = np.float32(head.softcap) * np.tanh(logits_RV / np.float32(head.softcap))
            yield first, logits_RV


def open_ends(folder: str | Path, model: TargetModel) -> TargetEnds:
    """Return the ends of the target in a model folder; of the matrices no byte is read yet.

    Parameters
    ----------
    model
        What the folder was described as (:func:`hsformat.target.describe`).

    Raises
    ------
    ForeignFileError
        HS411, HS601, HS602, HS603: the folder has no such tensors or cannot be read.
    """
    path = Path(folder)
    problems: list[Problem] = []
    # norm_weight: None: a final norm without a weight is no problem here, the description has said so.
    tensors = find_key_tensors(
        read_checkpoint(path), tied=read_config(path).tied, norm_weight=None, problems=problems
    )  # fmt: skip
    embedding, lm_head = tensors["embedding"], tensors["lm_head"]
    if problems or embedding is None or lm_head is None:
        raise ForeignFileError(problems)
    small: dict[str, Any] = {
        name: None if info is None else to_float32(read_tensor(info))
        for name, info in (
            ("norm_weight", tensors["final_norm"]),
            ("norm_bias", tensors["final_norm_bias"]),
            ("head_bias", tensors["lm_head_bias"]),
        )
    }
    return TargetEnds(model=model, embedding=embedding, lm_head=lm_head, **small)
