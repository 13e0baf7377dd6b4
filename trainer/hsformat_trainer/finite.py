"""NaN and infinity, found where numbers come in: in states of records and in weights of files, each with its place.

Met later they look like something else: like a learning rate that is too high, or like a draft that is never right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hsformat.problems import Problem, problem
from hsformat.torch import Packed

__all__ = ["is_finite", "states_not_finite", "weights_not_finite"]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity; one of 16 bits or more is not copied for it."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    wide = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()  # aminmax takes no float8
    low, high = torch.aminmax(wide)  # NaN comes through both
    return bool(torch.isfinite(low) & torch.isfinite(high))


def states_not_finite(packed: Packed) -> list[Problem]:
    """Return HS201 for each record and capture of a batch that holds NaN or infinity, with the first such state."""
    problems = []
    for record in packed.unpack():
        for key, states in record.hidden.items():
            bad = ~torch.isfinite(states).all(1)
            if bool(bad.any()):
                row = int(bad.nonzero()[0])
                problems.append(
                    problem(
                        "HS201",
                        where=f"record {record.id!r}: {key}: state {row}",
                        got="NaN or infinity",
                        expected="finite numbers",
                        record=record.id,
                    )
                )
    return problems


def weights_not_finite(weights: Iterable[tuple[str, torch.Tensor]], *, where: str, fix: str) -> list[Problem]:
    """Return HS201 for each weight that holds NaN or infinity.

    Parameters
    ----------
    weights
        Names and tensors.
    where
        The file or folder that they were read from.
    """
    return [
        problem("HS201", where=f"{where}: {name}", got="NaN or infinity", expected="finite weights", fix=fix)
        for name, tensor in weights
        if not is_finite(tensor)
    ]
