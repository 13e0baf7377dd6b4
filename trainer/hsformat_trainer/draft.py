"""The draft: EAGLE-3's head of Llama shape, as the engines run it.

Parameter names are those of a served draft. Shapes: N key rows, n active rows of a step, H width of the draft, Ht of
the target's states, A key heads, Q query heads, D width of a head, Vd rows of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from hsformat_trainer.attention import Visible, attend
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.norms import RMSNorm
from hsformat_trainer.rope import Rotary, rotate
from hsformat_trainer.served_weights import load_served
from hsformat_trainer.target_head import TargetHead

__all__ = ["Draft", "Vocabulary"]


class Vocabulary(Protocol):
    """What is needed of a draft's vocabulary: ``vocabulary.DraftVocabulary`` is one."""

    @property
    def d2t(self) -> Any:
        """[Vd] int64 offsets from draft id to target id."""

    @property
    def t2d(self) -> Any:
        """[V] bool."""


@dataclass(slots=True, eq=False)
class _Cache:
    """Keys and values of a layer, rotated: those of step 0, and of later steps for the rows that are still active."""

    key: torch.Tensor
    value: torch.Tensor
    own_keys: list[torch.Tensor] = field(default_factory=list)
    own_values: list[torch.Tensor] = field(default_factory=list)

    def narrow(self, within: torch.Tensor | None) -> None:
        if within is not None:
            self.own_keys = [k[within] for k in self.own_keys]
            self.own_values = [v[within] for v in self.own_values]


class _Attention(nn.Module):
    def __init__(self, spec: DraftSpec, width_in: int) -> None:
        super().__init__()
        heads, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(width_in, heads, bias=spec.attention_bias)
        self.k_proj = nn.Linear(width_in, keys, bias=spec.attention_bias)
        self.v_proj = nn.Linear(width_in, keys, bias=spec.attention_bias)
        self.o_proj = nn.Linear(heads, spec.hidden_size, bias=False)
        self._head_dim = spec.head_dim

    def heads(self, projection: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = projection(x)
        return out.reshape(len(x), projection.out_features // self._head_dim, self._head_dim)


class _Mlp(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    """One decoder layer; the first one reads the embedding beside the features."""

    def __init__(self, spec: DraftSpec, index: int) -> None:
        super().__init__()
        first = index == 0
        self._first, self._norm_residual = first, spec.norm_before_residual
        self._before = "hidden_norm" if first else str(spec.later_layers_norm)
        width = spec.hidden_size
        if first or self._before == "hidden_norm":
            self.hidden_norm = RMSNorm(width, spec.rms_norm_eps)
        if first or self._before == "input_layernorm":
            self.input_layernorm = RMSNorm(width, spec.rms_norm_eps)
        self.self_attn = _Attention(spec, 2 * width if first else width)
        self.post_attention_layernorm = RMSNorm(width, spec.rms_norm_eps)
        self.mlp = _Mlp(spec)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        visible: Visible,
        cache: _Cache | None,
        queries: torch.Tensor | None,
    ) -> tuple[torch.Tensor, _Cache]:
        """Run rows of one step.

        Parameters
        ----------
        hidden, embedded
            [m, H] of the rows; ``embedded`` for the first layer alone.
        angles
            Of the rows' positions.
        visible
            Which keys of step 0 the rows see whose output is wanted.
        cache
            None at step 0, whose rows are all key rows.
        queries
            At step 0: those of the key rows whose output is wanted; None: all of them (and at later steps).

        Returns
        -------
        [n, H] of the rows whose output is wanted, and the cache.
        """
        attention = self.self_attn
        norm: RMSNorm = getattr(self, self._before)
        x = normed = norm(hidden)
        residual = normed if self._first and self._norm_residual else hidden
        if self._first:
            x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        key = rotate(attention.heads(attention.k_proj, x), *angles)
        value = attention.heads(attention.v_proj, x)
        if cache is None:
            cache = _Cache(key, value)
        else:
            cache.own_keys.append(key)
            cache.own_values.append(value)
        if queries is not None:
            x, residual = x[queries], residual[queries]
            angles = (angles[0][queries], angles[1][queries])
        query = rotate(attention.heads(attention.q_proj, x), *angles)
        mixed = attend(query, cache.key, cache.value, cache.own_keys, cache.own_values, visible)
        residual = residual + attention.o_proj(mixed.flatten(1))
        return residual + self.mlp(self.post_attention_layernorm(residual)), cache


class Draft(nn.Module):
    """A draft and what it shares with its target.

    Parameters
    ----------
    spec
        Its shape.
    vocabulary
        The target ids that it can propose; None: all.
    target
        Gives the head's first weights, and the embedding's where it is trained; otherwise the embedding is the
        target's.
    init
        ``random``: a normal distribution of the usual width, 0.02. Or the folder of a draft whose weights it begins
        with.

    Attributes
    ----------
    lm_head
        Rows of the target's head at first. Frozen unless ``spec.train_head``.
    embed_tokens
        None unless ``spec.train_embedding``.

    Raises
    ------
    ValueError
        The spec and the target or the vocabulary contradict each other.
    ForeignFileError
        HS411: a weight of ``init`` is missing, has another shape, or is none of the draft's. HS201: it is not finite.
    """

    def __init__(
        self,
        spec: DraftSpec,
        *,
        vocabulary: Vocabulary | None,
        target: TargetHead,
        init: Literal["random"] | str | Path = "random",
    ) -> None:
        super().__init__()
        self.spec = spec
        _check(spec, vocabulary, target)
        width, states = spec.hidden_size, spec.target_hidden_size
        self.fc = nn.Linear(spec.num_aux * states, width, bias=False)
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(spec.num_aux * states, spec.rms_norm_eps)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(states, spec.rms_norm_eps) for _ in range(spec.num_aux))
        self.layers = nn.ModuleList(_Layer(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(width, spec.rms_norm_eps)
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(spec.vocab_size, width) if spec.train_embedding else None
        self.rotary = Rotary(spec)
        self.d2t: torch.Tensor | None
        self.t2d: torch.Tensor | None
        self.target_ids: torch.Tensor | None
        d2t = None if vocabulary is None else torch.as_tensor(np.asarray(vocabulary.d2t, np.int64))
        t2d = None if vocabulary is None else torch.as_tensor(np.asarray(vocabulary.t2d, np.bool_))
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        ids = None if d2t is None else d2t + torch.arange(len(d2t))
        self.register_buffer("target_ids", ids, persistent=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)
        with torch.no_grad():
            if width == states:
                head = target.head_weight.cpu()
                self.lm_head.weight.copy_(head if ids is None else head[ids])
            if self.embed_tokens is not None and width == target.embed_weight.shape[1]:
                self.embed_tokens.weight.copy_(target.embed_weight)
        self.lm_head.weight.requires_grad_(spec.train_head)
        self._frozen_head: torch.Tensor | None = None
        if init != "random":
            self._load(Path(init))
        self.to(target.embed_weight.device)

    def embed(self, ids: torch.Tensor, target: TargetHead) -> torch.Tensor:
        """Return [n, H], what the engines feed the draft: the row of its own embedding, or the target's row as stored.

        A target that scales its embedding (Gemma) does so outside of the matrix that it shares with a draft.
        """
        weight = target.embed_weight if self.embed_tokens is None else self.embed_tokens.weight
        return nn.functional.embedding(ids, weight)

    def combine(self, aux: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what ``fc`` makes of the captures, each [N, Ht]: [N, H]."""
        if self.spec.fc_norm and not self.spec.norm_before_fc:
            aux = [norm(a) for norm, a in zip(self.fc_norm, aux, strict=True)]
        x = torch.cat(tuple(aux), dim=-1)
        if self.spec.norm_before_fc:
            x = self.input_norm(x)
            if self.spec.fc_norm:
                x = torch.cat([norm(a) for norm, a in zip(self.fc_norm, x.chunk(len(aux), -1), strict=True)], dim=-1)
        out: torch.Tensor = self.fc(x.to(self.fc.weight.dtype))
        return out

    def forward(self, batch: TrainBatch, target: TargetHead) -> list[torch.Tensor]:
        """Return, a step, the normed outputs of the rows that carry loss: [s, H], what the head reads."""
        keys, outputs = batch.keys, []
        hidden = self.combine([a[keys.states] for a in batch.aux])
        caches: list[_Cache | None] = [None] * len(self.layers)
        for k, rows in enumerate(batch.steps):
            if k == 0:
                embedded, angles = self.embed(keys.tokens, target), self.rotary(keys.positions)
            else:
                hidden = hidden if rows.within is None else hidden[rows.within]
                embedded, angles = self.embed(rows.tokens, target), self.rotary(rows.positions)
                for cache in caches:
                    if cache is not None:
                        cache.narrow(rows.within)
            for i, layer in enumerate(self.layers):
                # At step 0 the next layer reads a layer's output at all key rows, for keys of its own.
                inner = k == 0 and i < len(self.layers) - 1
                wanted = rows.within if k == 0 and not inner else None
                visible = keys.visible if inner else rows.visible
                hidden, caches[i] = layer(hidden, embedded, angles, visible, caches[i], wanted)
            if self.spec.norm_output:
                hidden = self.norm(hidden)
            last = hidden if rows.loss is None else hidden[rows.loss]
            outputs.append(last if self.spec.norm_output else self.norm(last))
        return outputs

    def head_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the head's weight in a dtype; a frozen one is converted once and kept."""
        weight = self.lm_head.weight
        if weight.dtype == dtype:
            return weight
        if weight.requires_grad:
            return weight.to(dtype)
        kept = self._frozen_head
        if kept is None or kept.dtype != dtype or kept.device != weight.device:
            kept = self._frozen_head = weight.detach().to(dtype)
        return kept

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target ids that draft ids stand for."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def _load(self, folder: Path) -> None:
        """Begin with the weights of a folder as engines serve it; what it has not is left as it is."""
        missing, unknown = self.load_state_dict(load_served(folder, self.spec), strict=False)
        shared = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
        if unknown or not shared.issuperset(missing):
            raise RuntimeError(f"{folder}: missing {missing}, unknown {unknown}: names were checked")


def _check(spec: DraftSpec, vocabulary: Vocabulary | None, target: TargetHead) -> None:
    vocab, hidden = target.embed_weight.shape
    if (vocab, hidden) != (spec.vocab_size, spec.target_hidden_size):
        raise ValueError(f"the target has [{vocab}, {hidden}], the spec {[spec.vocab_size, spec.target_hidden_size]}")
    rows = vocab if vocabulary is None else len(vocabulary.d2t)
    if rows != spec.draft_vocab_size:
        raise ValueError(f"draft_vocab_size is {spec.draft_vocab_size} and the vocabulary has {rows} ids")
