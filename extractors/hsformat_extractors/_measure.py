"""What neither a config nor the table of families says, from numbers: final norm, scales and cap of a model.

The model runs in float32 on the probe's sequences. A fact is fitted to what its parts give for chosen input, then
replaced by the exact number that it stands for: one of the config or, where none is that near, the fit rounded to two
digits. What then does not give the numbers again is refused, with all that was tried: nothing is guessed, and nothing
is taken for known by its name. Loading the model for the run (``_probe``) proves the facts once more, in its dtype.

Shapes: S rows, H hidden, N positions that both sequences of the probe have, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from hsformat.contract import FinalNorm
from hsformat.problems import HsError, problem
from hsformat_extractors._capture import Anatomy, PaddedBatch, find_anatomy
from hsformat_extractors._probe import (
    Reference,
    claimed_norm,
    depth_0_differences,
    head_response,
    probe_batch,
    row_error,
)

__all__ = ["measure"]

TOLERANCE = 1e-5
"""Relative error of float32 numbers that a fact gives again (up to 4e-7 seen)."""
NEAR = 1e-4
"""Relative distance of a fit from the number that it stands for (5e-7 seen, 2e-5 for a cap that hardly shows). A wrong
number that is so near fails TOLERANCE."""
NORM_SIZES = 10.0 ** -torch.arange(0, 7.5, 0.5)
"""Sizes of a norm's test input: its eps shows where it is as large as the square, which is true for 1e-14 to 1."""
DOUBLINGS = 14
"""Test logits are 0.125, 0.25, ... 1024."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A model that was run once, and the numbers of its config by key."""

    model: Any
    anatomy: Anatomy
    batch: PaddedBatch
    reference: Reference
    numbers: Mapping[str, float]


@torch.inference_mode()
def measure(model: Any) -> dict[str, Any]:
    """Return the facts of a model that was loaded in float32, as :func:`hsformat.target.describe` takes them.

    Raises
    ------
    HsError
        HS205: the final norm is none that a contract can describe. HS410: nor is the way from tokens to depth 0, or
        from the norm to the logits; or the model has not one residual stream. All that is found.
    """
    config = model.config.get_text_config()
    batch = probe_batch(config.vocab_size, device=model.device)
    anatomy = find_anatomy(model, batch, getattr(config, "num_hidden_layers", 0))
    run = _Run(
        model=model,
        anatomy=anatomy,
        batch=batch,
        reference=Reference(model, anatomy, batch, tolerance=TOLERANCE),
        numbers=dict(_numbers(config.to_dict())),
    )
    facts: dict[str, Any] = {}
    problems = []
    for part in (_final_norm, _embedding, _head):
        try:
            facts |= part(run)
        except HsError as e:
            problems += e.problems
    if problems:
        raise HsError(problems)
    return facts


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-30 < value < 1e30:
            yield key, float(value)


def _exact(fit: float, known: Iterable[float]) -> float | None:
    """Return the known number that a fit stands for, else the fit rounded to two digits; None: neither is near."""
    if not 0 < fit < math.inf:
        return None
    nearest = min(known, key=lambda v: abs(v - fit), default=0.0)
    return next((v for v in (nearest, float(f"{fit:.1e}")) if abs(v - fit) <= NEAR * fit), None)


def _final_norm(run: _Run) -> dict[str, Any]:
    """Try both kinds, with and without an offset of the weight."""
    norm = run.anatomy.final_norm
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    generator = torch.Generator().manual_seed(0)
    width = run.reference.norm_in.shape[-1]
    x = torch.randn(8, width, generator=generator) + 1  # a mean tells layernorm from rmsnorm
    x_SH = (NORM_SIZES[:, None, None] * x).flatten(0, 1).to(run.reference.norm_in)
    y_SH = norm(x_SH[None])[0]
    known = [v for k, v in run.numbers.items() if "eps" in k]
    tried: list[str] = []
    good: list[FinalNorm] = []
    for kind, offset in product(("rmsnorm", "layernorm"), (False, True) if weight is not None else (False,)):
        name = kind + (" with a weight stored minus one" if offset else "")
        fit = _fit_eps(x_SH, y_SH, kind, None if weight is None else weight + float(offset), bias)
        eps = _exact(fit, known)
        if eps is None:
            tried.append(f"{name}: eps would be {fit:.5g}")
            continue
        claim = FinalNorm.model_validate({"kind": kind, "eps": eps, "unit_offset": offset})
        error = row_error(y_SH, claimed_norm(x_SH, claim, weight, bias))
        tried.append(f"{name}, eps {eps:g}: relative error {error:.2g}")
        if error <= TOLERANCE:
            good.append(claim)
    if len(good) != 1:
        raise HsError(
            problem("HS205", where="target: final_norm", got=f"{type(norm).__name__} is none of: {'; '.join(tried)}",
                    expected=f"one of them to {TOLERANCE:g}, with an eps of the config or of two digits",
                    fix="a contract cannot describe this norm: hsformat cannot hold this model's states")
        )  # fmt: skip
    facts: dict[str, Any] = {"final_norm": good[0].model_dump()}
    return facts if weight is not None else {**facts, "final_norm_weight": False}


def _fit_eps(
    x_SH: torch.Tensor, y_SH: torch.Tensor, kind: str, factor: torch.Tensor | None, bias: torch.Tensor | None
) -> float:
    """Return eps of ``y = factor * x / sqrt(mean(x**2) + eps) + bias`` from the row that shows it best; NaN: none."""
    x, y = x_SH.double(), y_SH.double()
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    u = x if factor is None else x * factor
    y = y if bias is None else y - bias
    square_S = x.square().mean(-1)
    eps_S = (u.square().sum(-1) / (u * y).sum(-1)).square() - square_S
    distance_S = (eps_S / square_S).log().abs().nan_to_num(nan=math.inf)
    row = int(distance_S.argmin())
    return float(eps_S[row]) if distance_S[row] < math.inf else math.nan


def _scales(run: _Run) -> list[float]:
    """Return what a factor may stand for: 1, the root of the width, a number of the config or one divided by it."""
    root = math.sqrt(run.reference.norm_in.shape[-1])
    rounded = float(torch.tensor(root).bfloat16())  # RecurrentGemma
    return [1.0, root, rounded, *run.numbers.values(), *(1 / v for v in run.numbers.values())]


def _embedding(run: _Run) -> dict[str, Any]:
    """Fit depth 0 to the embedding's rows by least squares, without what depends on the position alone."""
    embedding: Any = run.anatomy.embedding
    shape, width = getattr(getattr(embedding, "weight", None), "shape", ()), run.reference.h0_BTH.shape[-1]
    if shape[1:] != (width,):
        raise _refused("embedding", f"a table of shape {list(shape)}", f"[V, {width}]: rows of the stream's width")
    h_NH, row_NH = (d.double() for d in depth_0_differences(run.anatomy, run.reference, run.batch))
    fit = float((h_NH * row_NH).sum() / row_NH.square().sum())
    scale = _exact(fit, _scales(run))
    error = float((h_NH - (scale or fit) * row_NH).norm() / h_NH.norm())
    if scale is None or not error <= TOLERANCE:
        raise _refused("embedding.scale", f"depth 0 is not {scale or fit:.7g} x row: relative error {error:.2g}",
                       "a factor (1, sqrt(hidden_size), of the config, or of two digits) x row, up to a term of the "
                       f"position alone, to {TOLERANCE:g}")  # fmt: skip
    return {"embedding_scale": scale}


def _head(run: _Run) -> dict[str, Any]:
    """Fit the logits to numbers of known size in place of the head's output."""
    reference = run.reference
    if (error := row_error(reference.rows(reference.head_in), reference.rows(reference.norm_out))) > TOLERANCE:
        raise _refused("head", f"input that differs from the final norm's output by a relative {error:.2g}",
                       "the final norm's output")  # fmt: skip
    z_V, got_V = head_response(run.model, run.anatomy.head, run.batch, _test_logits)
    z, y = z_V[: len(got_V)].double(), got_V.double()
    scale_fit, cap_fit = _fit_head(z[:DOUBLINGS], y[:DOUBLINGS])
    scale = _exact(scale_fit, _scales(run))
    cap = None if cap_fit is None else _exact(cap_fit, run.numbers.values())
    want = (scale or scale_fit) * z
    if cap_fit is not None:
        want = (cap or cap_fit) * (want / (cap or cap_fit)).tanh()
    error = float(((y - want) / want).abs().max())
    if scale is None or (cap is None) != (cap_fit is None) or not error <= TOLERANCE:
        shown = f"scale {scale or scale_fit:.7g} and softcap {'none' if cap_fit is None else f'{cap or cap_fit:.7g}'}"
        raise _refused("head.scale, head.softcap", f"logits do not follow {shown}: relative error up to {error:.2g}",
                       "cap(scale * logit) with numbers of the config (a scale may be one divided by such), or of two "
                       f"digits, to {TOLERANCE:g}")  # fmt: skip
    return {"head_scale": scale, "softcap": cap}


def _test_logits(width: int) -> torch.Tensor:
    """Return 0.125 to 1024 by doubling, then the same with the other sign, and so on."""
    i = torch.arange(width)
    return 0.125 * 2.0 ** (i % DOUBLINGS) * (1 - 2 * (i // DOUBLINGS % 2))


def _fit_head(z: torch.Tensor, y: torch.Tensor) -> tuple[float, float | None]:
    """Return scale and cap of ``y = cap * tanh(scale * z / cap)`` for ``z`` that doubles; cap None: y is scale * z.

    ``tanh(2a) / tanh(a) = 2 / (1 + tanh(a)**2)``, so that two numbers give ``tanh(a)``.
    """
    squares = 2 * y[:-1] / y[1:] - 1
    i = int((squares - 0.3).abs().nan_to_num(nan=math.inf).argmin())
    square = float(squares[i])
    if not 1e-6 < square < 1:  # float32 rounds to 1e-7
        return float(y[-1] / z[-1]), None
    tanh = math.sqrt(square)
    cap = float(y[i]) / tanh
    return cap * math.atanh(tanh) / float(z[i]), cap


def _refused(name: str, got: str, expected: str) -> HsError:
    return HsError(
        problem("HS410", where=f"target: {name}", got=got, expected=expected,
                fix="a contract cannot describe this model: hsformat cannot hold its states")
    )  # fmt: skip
