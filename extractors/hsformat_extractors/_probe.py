"""Proof, from numbers, that captures and the target's description are what they are called.

Run once after loading, on two short sequences of random ids of different length, in the dtype of the run:

1. every capture, taken as it is in a real batch, equals Transformers' own ``output_hidden_states`` at its depth and is
   nearer to no other (HS204); whether Transformers norms the last of them is decided by the numbers (transformers
   PR#26142, #13461, PR#48087);
2. a sequence in a padded batch has the states that it has alone (HS206);
3. the final norm computes what the contract says, on input that shows its eps and offset (HS205);
4. ``logits = cap(scale * head(norm(h_N)))`` with the contract's scale and cap. The head's output is replaced by numbers
   from 0.1 to 1000 for this: the logits of a short input are too small to show a cap (HS301);
5. depth 0 is ``scale * row``, up to a term that depends on the position alone (HS301).

Shapes: B sequences, T tokens padded, S tokens without padding, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from hsformat.contract import Capture, FinalNorm, TargetModel
from hsformat.problems import HsError, Problem, problem
from hsformat_extractors._capture import Anatomy, Capturer, PaddedBatch, call, hooked, pad, stream_argument
from hsformat_extractors._tolerance import BATCH_TOLERANCE, TOLERANCE

__all__ = [
    "LastConvention", "Reference", "claimed_norm", "depth_0_differences", "head_response", "last_convention",
    "probe_batch", "prove", "row_error",
]  # fmt: skip

LastConvention = Literal["pre", "post"]

LENGTHS = (13, 7)


def probe_batch(vocab_size: int, *, device: Any) -> PaddedBatch:
    """Return the fixed random sequences of the probe."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(0, vocab_size, (n,), generator=generator).numpy() for n in LENGTHS]
    return pad(draw, device=device)


def row_error(got_SH: torch.Tensor, want_SH: torch.Tensor) -> float:
    """Return the mean over rows of ``|got - want| / |want|``: one massive row does not hide the others."""
    got, want = got_SH.double(), want_SH.double()
    size = want.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((got - want).norm(dim=-1) / size).mean())


def last_convention(
    last_SH: torch.Tensor, norm_in_SH: torch.Tensor, norm_out_SH: torch.Tensor, *, tolerance: float
) -> LastConvention:
    """Decide from numbers whether ``hidden_states[N]`` is the final norm's input or its output.

    Raises
    ------
    HsError
        HS205: it is neither, or the norm changes nothing, so that the numbers do not tell.
    """
    pre, post = row_error(last_SH, norm_in_SH), row_error(last_SH, norm_out_SH)
    if (pre <= tolerance) != (post <= tolerance):
        return "pre" if pre <= tolerance else "post"
    raise HsError(
        problem(
            "HS205",
            where="target: hidden_states[N]",
            got=f"relative error {pre:.2g} to the final norm's input, {post:.2g} to its output",
            expected=f"one of the two at most {tolerance:g}",
            fix="the last capture cannot be told apart here; extract with another engine",
        )
    )


@torch.inference_mode()
def prove(model: Any, anatomy: Anatomy, capturer: Capturer, target: TargetModel, batch: PaddedBatch) -> LastConvention:
    """Compare everything that can be compared; return Transformers' convention for the last state.

    Raises
    ------
    HsError
        All of HS201, HS204, HS205, HS206, HS301 and HS410 that the numbers show.
    """
    reference = Reference(model, anatomy, batch, tolerance=TOLERANCE[target.dtype])
    if len(reference.states_BTH) != len(anatomy.layers) + 1:
        raise HsError(
            problem(
                "HS410",
                where="target: output_hidden_states",
                got=f"{len(reference.states_BTH)} hidden states",
                expected=f"{len(anatomy.layers) + 1}: the embedding and one a layer",
                fix="Transformers cannot show this model's states, so that captures cannot be proved",
            )
        )
    logits_SV = reference.rows(reference.logits_BTV)
    if bool((logits_SV.isnan() | logits_SV.isposinf()).any()):  # minus infinity rules a padded token out
        raise HsError(
            problem(
                "HS201",
                where="target: logits of a short input",
                got="NaN or infinity",
                expected="finite logits",
                fix="check lm_head's weights, or run the target in another dtype",
            )
        )
    convention = last_convention(
        reference.rows(reference.states_BTH[-1]),
        reference.rows(reference.norm_in),
        reference.rows(reference.norm_out),
        tolerance=reference.tolerance,
    )
    problems = [
        *_check_captures(capturer, reference, batch),
        *_check_padding(capturer, batch, tolerance=BATCH_TOLERANCE[target.dtype]),
        *_check_norm(anatomy, target.final_norm, tolerance=reference.tolerance),
        *_check_head(model, anatomy, target, reference, batch),
        *_check_embedding(anatomy, target, reference, batch),
    ]
    if problems:
        raise HsError(problems)
    return convention


class Reference:
    """One forward pass of the whole model with all that Transformers returns, and what its parts were given."""

    def __init__(self, model: Any, anatomy: Anatomy, batch: PaddedBatch, *, tolerance: float) -> None:
        self.tolerance = tolerance
        self._rows_S = batch.rows_S
        self.h0_BTH = self.norm_in = self.norm_out = self.head_in = torch.empty(0)

        def first(_module: Any, args: Any, kwargs: Any) -> None:
            self.h0_BTH = stream_argument(args, kwargs).clone()

        def norm(_module: Any, args: Any, kwargs: Any, y_BTH: torch.Tensor) -> None:
            self.norm_in, self.norm_out = stream_argument(args, kwargs).clone(), y_BTH.clone()

        def head(_module: Any, args: Any) -> None:
            self.head_in = args[0].clone()

        handles = [
            anatomy.layers[0].register_forward_pre_hook(first, with_kwargs=True),
            anatomy.final_norm.register_forward_hook(norm, with_kwargs=True),
            anatomy.head.register_forward_pre_hook(head),
        ]
        with hooked(handles):
            out = call(model, batch, output_hidden_states=True)
        self.states_BTH: tuple[torch.Tensor, ...] = tuple(out.hidden_states or ())
        self.logits_BTV: torch.Tensor = out.logits

    def rows(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Return the rows without padding, [S, H]."""
        return x_BTH.flatten(0, 1).index_select(0, self._rows_S)

    def depth(self, depth: int) -> torch.Tensor:
        """Return the residual stream at a depth, [S, H]; before the norm at depth N, whatever Transformers returns."""
        inside = depth < len(self.states_BTH) - 1
        return self.rows(self.states_BTH[depth] if inside else self.norm_in)


def _check_captures(capturer: Capturer, reference: Reference, batch: PaddedBatch) -> Iterator[Problem]:
    got = capturer.run(batch)
    for capture in capturer.captures:
        where = f"target: capture {capture.key}"
        if capture.key not in got:
            yield problem("HS109", where=where, got="the model did not run the module it is read from",
                          expected="one tensor a forward pass")  # fmt: skip
            continue
        rows_SH = got[capture.key]
        errors = _errors_by_key(rows_SH, reference, capture)
        own, nearest = errors[capture.key], min(errors, key=errors.__getitem__)
        if not own <= reference.tolerance or errors[nearest] < own:
            yield problem(
                "HS204",
                where=where,
                got=f"relative error {own:.2g}; nearest is {nearest} ({errors[nearest]:.2g})",
                expected=f"Transformers' own hidden state, to {reference.tolerance:g}",
                fix="a defect of the extractor, or this model's code in Transformers numbers its states in another way",
            )


def _errors_by_key(rows_SH: torch.Tensor, reference: Reference, capture: Capture) -> dict[str, float]:
    """Return the error of a capture against every hidden state of the model, by key."""
    depths = range(len(reference.states_BTH))
    errors = {f"d{d}": row_error(rows_SH, reference.depth(d)) for d in depths}
    errors[f"d{depths[-1]}n"] = row_error(rows_SH, reference.rows(reference.norm_out))
    return {k: float("inf") if e != e else e for k, e in errors.items()}  # NaN is near to nothing


def _check_padding(capturer: Capturer, batch: PaddedBatch, *, tolerance: float) -> Iterator[Problem]:
    """Compare the shorter sequence alone with itself beside a longer one (speculators#279)."""
    together = capturer.run(batch)
    alone = capturer.run(pad([batch.ids_BT[1, : batch.lengths[1]].cpu().numpy()], device=batch.ids_BT.device))
    for key in alone.keys() & together.keys():
        error = row_error(together[key][batch.lengths[0] :], alone[key])
        if not error <= tolerance:
            yield problem("HS206", where=f"target: capture {key}, a padded sequence against itself alone",
                          got=f"relative error {error:.2g}", expected=f"at most {tolerance:g}",
                          fix="choose another attention implementation: --option attention=eager")  # fmt: skip


def _check_norm(anatomy: Anatomy, claim: FinalNorm, *, tolerance: float) -> Iterator[Problem]:
    norm = anatomy.final_norm
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    embedding: Any = anatomy.embedding
    like: torch.Tensor = weight if weight is not None else embedding.weight[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, len(like), generator=generator) + 1  # a mean tells layernorm from rmsnorm
    x = torch.cat([x, x * claim.eps**0.5])  # input of the size of eps shows eps
    x_SH = x.to(device=like.device, dtype=like.dtype)
    got_SH = norm(x_SH[None])[0]
    want_SH = claimed_norm(x_SH.float(), claim, weight, bias)
    error = row_error(got_SH, want_SH)
    if not error <= tolerance:
        yield problem("HS205", where="target: final_norm",
                      got=f"{type(norm).__name__}, which differs from that by a relative {error:.2g}",
                      expected=f"{claim.kind}, eps {claim.eps:g}, unit_offset {claim.unit_offset}",
                      fix="describe the target's final norm as it computes")  # fmt: skip


def claimed_norm(
    x_SH: torch.Tensor, claim: FinalNorm, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return what a final norm of this description makes of float32 rows."""
    size = x_SH.shape[-1:]
    if claim.kind == "layernorm":
        y = functional.layer_norm(x_SH, size, eps=claim.eps)
    else:
        y = x_SH * torch.rsqrt(x_SH.square().mean(-1, keepdim=True) + claim.eps)
    if weight is not None:
        y = y * (weight.float() + float(claim.unit_offset))
    return y if bias is None else y + bias.float()


def _check_head(
    model: Any, anatomy: Anatomy, target: TargetModel, reference: Reference, batch: PaddedBatch
) -> Iterator[Problem]:
    claim, head = target.head, anatomy.head
    input_error = row_error(reference.rows(reference.head_in), reference.rows(reference.norm_out))
    if not input_error <= reference.tolerance:
        yield _contradiction("head", f"input that differs from the final norm's output by a relative {input_error:.2g}",
                             "the final norm's output")  # fmt: skip
    has_bias = getattr(head, "bias", None) is not None
    if has_bias != claim.bias:
        yield _contradiction("head.bias", has_bias, claim.bias)
    dtype = reference.logits_BTV.dtype
    z_V, got_V = head_response(model, head, batch, lambda width: _test_logits(width, claim.scale, dtype=dtype))
    if len(z_V) != claim.padded_vocab:
        yield _contradiction("head.padded_vocab", len(z_V), claim.padded_vocab)
        return
    want_V = z_V * claim.scale
    if claim.softcap is not None:
        want_V = claim.softcap * torch.tanh(want_V / claim.softcap)
    want_V = want_V[: len(got_V)]
    error_V = (got_V - want_V).abs() / want_V.abs()
    worst = int(error_V.nan_to_num(nan=float("inf")).argmax())
    if not float(error_V[worst]) <= reference.tolerance:
        yield _contradiction(
            "head.scale, head.softcap",
            f"logit {float(got_V[worst]):.5g} from {float(z_V[worst]):.5g}",
            f"{float(want_V[worst]):.5g} with scale {claim.scale:g} and softcap {claim.softcap}",
        )


def head_response(
    model: Any, head: nn.Module, batch: PaddedBatch, make: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the head's output by ``make(width)``, [V]; return that and the logits that come of it, in float32."""
    z_V = torch.empty(0)

    def replace(_module: Any, _args: Any, y: torch.Tensor) -> torch.Tensor:
        nonlocal z_V
        z_V = make(y.shape[-1]).to(y)
        return z_V.expand_as(y)

    with hooked([head.register_forward_hook(replace)]):
        got_V = call(model, batch).logits[0, 0]
    return z_V.float(), got_V.float()


def _test_logits(width: int, scale: float, *, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of both signs, 0.1 to 1000 once scaled, as far as the dtype goes."""
    top = min(1000.0, torch.finfo(dtype).max / 4 * scale)
    size = torch.logspace(-1, float(torch.tensor(top).log10()), width) / scale
    return (size * torch.tensor([1.0, -1.0]).repeat(width)[:width]).to(dtype)


def _check_embedding(
    anatomy: Anatomy, target: TargetModel, reference: Reference, batch: PaddedBatch
) -> Iterator[Problem]:
    embedding: Any = anatomy.embedding
    table_VH: torch.Tensor = embedding.weight
    head_VH = getattr(anatomy.head, "weight", None)
    tied = head_VH is not None and (head_VH is table_VH or head_VH.data_ptr() == table_VH.data_ptr())
    if tied and not target.embedding.tied:
        yield _contradiction("embedding.tied", tied, target.embedding.tied)
    width = reference.h0_BTH.shape[-1]
    if table_VH.shape[1] != width or not table_VH.is_floating_point():
        yield _contradiction("embedding", f"rows of width {table_VH.shape[1]}, {table_VH.dtype}",
                             f"floating-point rows of width {width}")  # fmt: skip
        return
    h_NH, row_NH = depth_0_differences(anatomy, reference, batch)
    size = reference.rows(reference.h0_BTH).float().norm()
    difference = float((h_NH - target.embedding.scale * row_NH).norm() / size)
    if not difference <= reference.tolerance:
        yield _contradiction(
            "embedding.scale",
            f"depth 0 differs from that by a relative {difference:.2g} that depends on the token",
            f"{target.embedding.scale:g} x row, but for a term of the position alone",
        )


def depth_0_differences(
    anatomy: Anatomy, reference: Reference, batch: PaddedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the difference of two sequences, position by position: of depth 0, and of the embedding's rows.

    A term of the position alone is gone from both.
    """
    n = min(batch.lengths)  # where both sequences have tokens, and at the same positions
    embedding: Any = anatomy.embedding
    a, b = reference.h0_BTH[:2, :n].float()
    row_a, row_b = embedding.weight[batch.ids_BT[:2, :n]].float()
    return a - b, row_a - row_b


def _contradiction(name: str, got: object, expected: object) -> Problem:
    return problem("HS301", where=f"target: {name}", got=got, expected=expected,
                   fix="describe the target as it computes; the model's folder and its code disagree")  # fmt: skip


def check_sizes(model: Any, target: TargetModel) -> list[Problem]:
    """Compare sizes that the probe needs to be right with the loaded model."""
    config = model.config.get_text_config()
    out = [
        _contradiction(name, found, getattr(target, name))
        for name, key in (("num_layers", "num_hidden_layers"), ("hidden_size", "hidden_size"))
        if (found := getattr(config, key, None)) not in (None, getattr(target, name))
    ]
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < target.vocab_size:
        out.append(_contradiction("vocab_size", f"{rows} rows of the embedding", target.vocab_size))
    return out
