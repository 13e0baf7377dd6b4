"""What training-time test needs of a packed batch: which row is computed at which step, from which token and state.

All shifts and masks come from :mod:`hsformat.align`. Numbers of rows, all over the whole pack: M tokens, n active rows
of a step, N key rows. Row t of a record at step k has token t+1+k, and reads the state of row t at step 0.

Rows that carry loss at step k need what the same rows gave at the steps before, and the keys and values of step 0 of
all rows before them. So a row is **active** at step k if it carries loss at k or later; at step 0 the others up to the
last active row of their record give a key and a value alone; and nothing else is computed (exactly: a row's output is
read by nobody else).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128

from hsformat.align import MaskRule, step_view, supervised
from hsformat.layout import parse_capture_key
from hsformat.torch import Packed
from hsformat_trainer.attention import Visible

__all__ = ["KeyRows", "StepRows", "TrainBatch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyRows:
    """The rows whose step 0 gives a key and a value, record after record, ascending.

    Attributes
    ----------
    states
        [N] into the captures.
    tokens, positions
        [N] what is fed in at step 0.
    visible
        Which key rows each of them sees, where a layer's output is wanted for all of them.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    visible: Visible

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """The active rows of one step, ascending.

    Attributes
    ----------
    rows
        [n] as numbers of tokens of the pack.
    within
        [n] into the active rows of the step before (of step 0: into the key rows); None: they are the same.
    tokens, positions
        [n] what is fed in.
    visible
        Which key rows each sees: from the first of its record to the row itself.
    loss
        Those that carry loss, [s] into the active rows; None: all of them.
    distribution
        [s] of these: into :attr:`TrainBatch.distributions`.
    targets
        [s] the token that the distribution is over, if the target wrote the record.
    host
        ``distribution`` in an array of the CPU.
    """

    rows: torch.Tensor
    within: torch.Tensor | None
    tokens: torch.Tensor
    positions: torch.Tensor
    visible: Visible
    loss: torch.Tensor | None
    distribution: torch.Tensor
    targets: torch.Tensor
    host: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """A packed batch, planned for K steps.

    Attributes
    ----------
    ids
        Of the records.
    num_tokens
        M, all tokens.
    starts
        [R + 1] where the tokens of each record begin, and where the last ends.
    aux
        The captures that ``fc`` concatenates, in order, each [sum S, H].
    last
        [sum S, H] the capture that gives the target's distribution, and whether the final norm is in it.
    last_normed
        Whether the final norm is already in ``last``.
    supervised
        [K, M] bool: which rows carry loss.
    counts
        [K] int64: how many, over all records; from masks alone.
    keys, steps
        What is computed.
    distributions
        [P] into ``last``, ascending: the states whose distributions are asked for, each once for all steps.
    written
        [P] int64 of the CPU: the token that the target took from each of these distributions, being the largest; -1
        where the record does not say that it did: it is not greedy, or the token is not the target's.
    distribution_starts
        R + 1 numbers: where those of each record begin, and where the last end.
    content_hash
        R numbers: XXH3-128 of each record's mask and rows of ``last``, and of its tokens where it is greedy, from which
        follows what is known of them, whatever the record's id is and in which store. Empty: not asked for.
    """

    ids: tuple[str, ...]
    num_tokens: int
    starts: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    last: torch.Tensor
    last_normed: bool
    supervised: torch.Tensor
    counts: torch.Tensor
    keys: KeyRows
    steps: tuple[StepRows, ...]
    distributions: torch.Tensor
    written: npt.NDArray[np.int64]
    distribution_starts: tuple[int, ...]
    content_hash: tuple[int, ...]

    @classmethod
    def from_packed(
        cls,
        packed: Packed,
        *,
        aux: Sequence[str],
        last: str,
        steps: int,
        rule: MaskRule = "serving",
        hashed: bool = False,
    ) -> TrainBatch:
        """Plan a batch.

        Parameters
        ----------
        packed
            Records with at least the captures named.
        aux, last
            Keys of captures, as :class:`hsformat.layout.Layout` has them.
        steps
            K, at least 1.
        rule
            Which rows carry loss: :func:`hsformat.align.supervised`.
        hashed
            Whether ``content_hash`` is wanted.

        Raises
        ------
        ValueError
            ``steps`` is below 1.
        KeyError
            The batch has no such capture.
        """
        if steps < 1:
            raise ValueError(f"steps is {steps}, and must be at least 1")
        device = packed.input_ids.device
        plan = _plan(packed, steps, rule)
        batch = cls(
            ids=packed.ids,
            num_tokens=packed.num_tokens,
            starts=packed.cu_seqlens.long(),
            aux=tuple(packed.hidden[key] for key in aux),
            last=packed.hidden[last],
            last_normed=parse_capture_key(last)[1],
            content_hash=_content(packed, last) if hashed else (),
            **plan,
        )
        return batch if device.type == "cpu" else batch.to(device)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TrainBatch:
        """Return the same on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, (torch.Tensor, Visible)):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, tuple):
                return tuple(moved(v) for v in value)
            if isinstance(value, (KeyRows, StepRows)):
                return replace(value, **{f.name: moved(getattr(value, f.name)) for f in fields(value)})
            return value

        return replace(self, **{f.name: moved(getattr(self, f.name)) for f in fields(self)})


def _plan(packed: Packed, num_steps: int, rule: MaskRule) -> dict[str, Any]:
    """Return what is computed, on the CPU: indexes are made record by record, where shifts are slices."""
    tokens, states = packed.cu_seqlens.tolist(), packed.cu_states.tolist()
    ids, positions, mask = packed.input_ids.cpu(), packed.position_ids.cpu(), packed.loss_mask.cpu()
    total = packed.num_tokens
    carries = torch.zeros((num_steps, total), dtype=torch.bool)
    # Of each row and step: the token fed in, its position, the state of the distribution and the token it is over.
    token_of, position_of = torch.zeros((2, num_steps, total), dtype=torch.int64)
    state_of, target_of = torch.zeros((2, num_steps, total), dtype=torch.int64)
    feature_of = torch.zeros(total, dtype=torch.int64)
    written_of = torch.full((states[-1],), -1)
    for r in range(len(packed)):
        first, end = tokens[r], tokens[r + 1]
        if packed.generations[r].mode == "greedy":
            view = step_view(end - first, 0)  # which has all the distributions of later steps
            taken = torch.where(mask[first:end][view.target], ids[first:end][view.target], -1)
            written_of[states[r] : states[r + 1]][view.distribution] = taken
        for k in range(num_steps):
            view = step_view(end - first, k)
            here = slice(first, first + view.count)
            at = slice(first, end)
            carries[k, at] = supervised(mask[at], k, rule=rule)
            token_of[k, here] = ids[at][view.token]
            position_of[k, here] = positions[at][view.position]
            target_of[k, here] = ids[at][view.target]
            rows = torch.arange(end - first)
            state_of[k, here] = rows[view.distribution] + states[r]
            if k == 0:
                feature_of[here] = rows[view.feature] + states[r]
    active = carries.flip(0).cumsum(0).flip(0) > 0  # at this step or a later one
    is_key, first_of = _keys(active[0], tokens)
    keys = is_key.nonzero()[:, 0]
    key_number = is_key.cumsum(0) - 1
    distributions, inverse = torch.unique(state_of[carries], return_inverse=True)
    per_step = inverse.split(carries.sum(1).tolist())
    steps = []
    before = keys
    for k in range(num_steps):
        rows = active[k].nonzero()[:, 0]
        loss = carries[k][rows].nonzero()[:, 0]
        lossy = rows[loss]
        steps.append(
            StepRows(
                rows=rows,
                within=None if len(rows) == len(before) else torch.searchsorted(before, rows),
                tokens=token_of[k, rows],
                positions=position_of[k, rows],
                visible=Visible.of(key_number[first_of[rows]], key_number[rows]),
                loss=None if len(loss) == len(rows) else loss,
                distribution=per_step[k],
                targets=target_of[k, lossy],
                host=per_step[k].numpy(),
            )
        )
        before = rows
    return {
        "supervised": carries,
        "counts": carries.sum(1),
        "keys": KeyRows(
            states=feature_of[keys],
            tokens=token_of[0, keys],
            positions=position_of[0, keys],
            visible=Visible.of(key_number[first_of[keys]], torch.arange(len(keys))),
        ),
        "steps": tuple(steps),
        "distributions": distributions,
        "written": written_of[distributions].numpy(),
        "distribution_starts": tuple(torch.searchsorted(distributions, packed.cu_states.cpu().long()).tolist()),
    }


def _content(packed: Packed, last: str) -> tuple[int, ...]:
    tokens, states = packed.cu_seqlens.tolist(), packed.cu_states.tolist()
    ids, mask, rows = packed.input_ids.cpu(), packed.loss_mask.cpu(), packed.hidden[last].detach().cpu()
    out = []
    for r in range(len(packed)):
        h = xxh3_128(mask[tokens[r] : tokens[r + 1]].contiguous().view(torch.uint8).numpy().data)
        h.update(rows[states[r] : states[r + 1]].contiguous().view(torch.uint8).numpy().data)
        if packed.generations[r].mode == "greedy":
            h.update(ids[tokens[r] : tokens[r + 1]].contiguous().numpy().data)
        out.append(h.intdigest())
    return tuple(out)


def _keys(active: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows give a key, and the first row of each row's record."""
    is_key, first_of = torch.zeros_like(active), torch.zeros(len(active), dtype=torch.int64)
    for first, end in itertools.pairwise(starts):
        there = active[first:end].nonzero()[:, 0]
        if len(there):
            is_key[first : first + int(there[-1]) + 1] = True
        first_of[first:end] = first
    return is_key, first_of
