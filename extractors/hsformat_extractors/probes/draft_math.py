"""EAGLE-3 decoding of a tiny draft in NumPy and float64, from what hsformat says that an engine does with its folder.

A second computation of what an engine computes, from a serving layout, the draft's weights and the target's states.
Shapes: T tokens of the prompt, K captures, H hidden, D width of a head, V vocabulary of the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.engines.drafts import Draft
from hsformat.engines.options import DraftOptions
from hsformat.engines.rows import DraftRow
from hsformat.engines.weights import find_weight
from hsformat.layout import ServingLayout
from hsformat_extractors.probes import tiny

__all__ = ["Reading", "Target", "Unservable", "first_two_steps"]

Array = npt.NDArray[np.float64]
_LAYER_NAMES = ("midlayer", "layers.0")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a draft is given of the target.

    Attributes
    ----------
    states
        Every capture of the prompt by key, [T, H].
    embedding, head
        [V, H].
    """

    states: Mapping[str, npt.NDArray[Any]]
    embedding: npt.NDArray[Any]
    head: npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a draft folder is read: what :func:`hsformat.engines.inspect` finds, by a row."""

    draft: Draft
    row: DraftRow
    layout: ServingLayout
    options: DraftOptions


class Unservable(ValueError):
    """By this reading the engine cannot compute anything from the folder."""


class _Run:
    """One prompt and the steps after it; keys and values are kept as in a cache."""

    def __init__(self, reading: Reading, weights: Mapping[str, npt.NDArray[Any]], target: Target) -> None:
        self._read, self._weights = reading, weights
        # By any name that some engine knows: whether this one does is what its logits tell.
        self._named = reading.row.model_copy(update={"weight_prefixes": ("", "model."), "layer_names": _LAYER_NAMES})
        self._embedding = _double(target.embedding)
        if reading.layout.embedding == "draft":
            self._embedding = self._weight("embed_tokens.weight")
        tied = reading.draft.config.get("tie_word_embeddings") is True and reading.row.tied_head == "embedding"
        if tied:
            self._head = self._embedding
        elif reading.layout.head == "target":
            self._head = _double(target.head)
        else:
            self._head = self._weight("lm_head.weight")
        if self._embedding.shape[1] != reading.layout.hidden_size:
            raise Unservable(f"an embedding of width {self._embedding.shape[1]} for {reading.layout.hidden_size}")
        self._cache: list[tuple[list[Array], list[Array]]] = [([], []) for _ in range(reading.layout.num_draft_layers)]

    def run(self, features_NH: Array, tokens: Sequence[int], first: int) -> tuple[Array, Array]:
        """Run rows at positions from ``first``; return the logits of the last one, [V], and what the next step gets."""
        layout, outputs = self._read.layout, []
        for i, token in enumerate(tokens):
            outputs.append(self._row(features_NH[i], self._embedding[token], first + i + layout.shift.position))
        prenorm_H = outputs[-1]
        normed_H = _rms(prenorm_H, self._weight("norm.weight"))
        return self._head @ normed_H, normed_H if layout.norm_output else prenorm_H

    def combine(self, features_TKH: Array) -> Array:
        """Return what ``fc`` makes of the captures, [T, H]."""
        layout, (t, k, h) = self._read.layout, features_TKH.shape
        if k == 1 and self._read.row.single_capture_skips_fc:
            return features_TKH[:, 0]
        x = features_TKH.reshape(t, k * h)
        if layout.norm_before_fc:
            x = _rms(x, self._weight("input_norm.weight"))
        if layout.fc_norm:
            chunks = [_rms(x[:, i * h : (i + 1) * h], self._weight(f"fc_norm.{i}.weight")) for i in range(k)]
            x = np.concatenate(chunks, axis=1)
        return self._linear("fc", x, bias=self._read.options.fc_bias)

    def _row(self, fc_H: Array, embedded_H: Array, position: int) -> Array:
        layout, residual_H, out_H = self._read.layout, fc_H, fc_H
        for i in range(layout.num_draft_layers):
            name = "midlayer" if i == 0 else f"layers.{i}"
            if i == 0:
                normed_H = _rms(fc_H, self._weight(f"{name}.hidden_norm.weight"))
                residual_H = normed_H if layout.norm_before_residual else fc_H
                embedded_H = _rms(embedded_H, self._weight(f"{name}.input_layernorm.weight"))
                x = np.concatenate([embedded_H, normed_H])
            else:
                residual_H = residual_H + out_H
                x = _rms(residual_H, self._weight(f"{name}.{layout.later_layers_norm}.weight"))
            residual_H = residual_H + self._attention(name, i, x, position)
            x = _rms(residual_H, self._weight(f"{name}.post_attention_layernorm.weight"))
            biased = self._read.options.mlp_bias
            gate, up = (self._linear(f"{name}.mlp.{p}_proj", x, bias=biased) for p in ("gate", "up"))
            out_H = self._linear(f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up, bias=biased)
        return residual_H + out_H

    def _attention(self, name: str, layer: int, x: Array, position: int) -> Array:
        bias = self._read.options.attention_bias
        q, k, v = (self._linear(f"{name}.self_attn.{p}_proj", x, bias=bias).reshape(-1, tiny.HEAD_DIM) for p in "qkv")
        (rope,) = self._read.layout.rope
        keys, values = self._cache[layer]
        keys.append(_rotate(k, position, rope.theta, rope.rotary_dim))
        values.append(v)
        q = _rotate(q, position, rope.theta, rope.rotary_dim)
        scores = np.stack([q @ past.T for past in keys], axis=-1)[:, 0] / tiny.HEAD_DIM**0.5  # one key head
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        out = (share @ np.concatenate(values)).reshape(-1)
        return self._linear(f"{name}.self_attn.o_proj", out, bias=self._read.options.output_bias)

    def _linear(self, name: str, x: Array, *, bias: bool = False) -> Array:
        weight = self._weight(f"{name}.weight")
        if weight.shape[1] != x.shape[-1]:
            raise Unservable(f"{name}.weight of width {weight.shape[1]} for {x.shape[-1]}")
        y: Array = x @ weight.T
        return y + self._weight(f"{name}.bias") if bias else y

    def _weight(self, name: str) -> Array:
        """Return a weight by the name that the folder has for it.

        Raises
        ------
        Unservable
            It has none.
        """
        there = find_weight(self._read.draft, self._named, name)
        if there is None:
            raise Unservable(f"no {name}")
        return _double(self._weights[there])


def first_two_steps(
    reading: Reading, weights: Mapping[str, npt.NDArray[Any]], target: Target, prompt: Sequence[int], first: int
) -> tuple[Array, Array]:
    """Return the logits of the first two drafted tokens after a prompt, [V] each.

    Parameters
    ----------
    first
        The token that the target says after the prompt.

    Raises
    ------
    Unservable
        A weight or a rotary embedding that the engine would need is not in the folder, or of another width.
    """
    if not reading.layout.rope:
        raise Unservable("no rotary embedding")
    run, layout = _Run(reading, weights, target), reading.layout
    features_TKH = np.stack([_double(target.states[key]) for key in layout.keys], axis=1)
    tokens = [*prompt, first][layout.shift.token :][: len(prompt)]
    logits_V, recurrent_H = run.run(run.combine(features_TKH), tokens, 0)
    drafted = int(logits_V.argmax())
    d2t = reading.draft.d2t
    if d2t is not None and layout.vocab_map is not None:
        drafted += int(d2t[drafted])
    return logits_V, run.run(recurrent_H[None], [drafted], len(prompt))[0]


def _double(x: npt.NDArray[Any]) -> Array:
    return x.astype(np.float64)


def _rms(x: Array, weight: Array) -> Array:
    y: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + tiny.RMS_EPS) * weight
    return y


def _rotate(x_QD: Array, position: int, theta: float, rotary_dim: int) -> Array:
    """Return rotary embedding of the first ``rotary_dim`` dimensions, in halves as Llama's."""
    half = rotary_dim // 2
    angle = position / theta ** (np.arange(half) / half)
    a, b, rest = x_QD[:, :half], x_QD[:, half:rotary_dim], x_QD[:, rotary_dim:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], axis=1)
