"""Draft folders that show what an engine makes of a draft: the facts of a :class:`~hsformat.engines.rows.DraftRow`.

Of ``shift`` the token alone: positions that all move by one give the same attention. Each folder is a plain one with a
few changes. What hsformat says of it by a row must be what the engine computes; where the engine must fail on it,
``works`` says by which fact of the row. Pure data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsformat.engines.rows import DraftRow
from hsformat_extractors.probes import tiny
from hsformat_extractors.probes.trials import id_keys

__all__ = ["DraftTrial", "draft_trials"]

_IDS = "eagle_aux_hidden_state_layer_ids"
_AUX = (2, 4, 6)


def _always(_row: DraftRow) -> bool:
    return True


def _never(_row: DraftRow) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class DraftTrial:
    """One draft folder.

    Attributes
    ----------
    name
        Of its folder.
    asked
        What is different about it, in words.
    facts
        Fields of the row that it is about.
    keys, without
        Merged into the config, where None is null; left out of it.
    slots
        Captures that ``fc`` takes.
    weights
        Added to the weights, in place of those of the same name; None: removed.
    works, loud
        Whether the engine serves it as hsformat reads it, by a row; whether it says so if it does not.
    silent
        Whether by a row the engine generates without the draft, and says nothing of it.
    """

    name: str
    asked: str
    facts: tuple[str, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    slots: int = len(_AUX)
    weights: Mapping[str, tiny.Array | None] = field(default_factory=dict)
    works: Callable[[DraftRow], bool] = _always
    loud: bool = True
    silent: Callable[[DraftRow], bool] = _never
    hidden: int = tiny.HIDDEN

    def config(self, dtype: str) -> dict[str, Any]:
        """Return the folder's config."""
        config = tiny.draft_config({**id_keys(_AUX, self.slots), **self.keys}, dtype=dtype)
        return {key: value for key, value in config.items() if key not in self.without}

    def tensors(self) -> dict[str, tiny.Array]:
        """Return the folder's weights."""
        all_of_them = {**tiny.draft_weights(self.slots, self.hidden), **self.weights}
        return {name: w for name, w in all_of_them.items() if w is not None}


def draft_trials() -> tuple[DraftTrial, ...]:
    """Return all trials; the first is the plain folder, which every engine must serve."""
    return (
        DraftTrial(
            name="plain",
            asked="no option, a reduced vocabulary, no embedding",
            facts=("shift", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "layer_names"),
            keys={"rope_theta": 50.0},
            works=lambda row: "midlayer" in row.layer_names and "" in row.weight_prefixes,
        ),
        *_options(),
        *_sharing(),
        *_shapes(),
        *_rope(),
        *_places(),
    )


def _options() -> tuple[DraftTrial, ...]:
    h = tiny.HIDDEN
    input_norm = {"input_norm.weight": 1 + tiny.draw("input_norm", len(_AUX) * h)}
    fc_norm = {f"fc_norm.{i}.weight": 1 + tiny.draw(f"fc_norm.{i}", h) for i in range(len(_AUX))}
    qkv = {
        f"midlayer.self_attn.{p}_proj.bias": tiny.draw(f"{p}.bias", n)
        for p, n in (("q", tiny.HEADS * tiny.HEAD_DIM), ("k", tiny.HEAD_DIM), ("v", tiny.HEAD_DIM))
    }
    out = {"midlayer.self_attn.o_proj.bias": tiny.draw("o.bias", h)}
    mlp = {
        f"midlayer.mlp.{p}_proj.bias": tiny.draw(f"{p}.bias", n)
        for p, n in (("gate", tiny.INNER), ("up", tiny.INNER), ("down", h))
    }
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    nested = {_IDS: list(_AUX)}
    return (
        DraftTrial(name="residual", asked="norm_before_residual true", facts=("norm_before_residual",),
                   keys={"norm_before_residual": True}),
        DraftTrial(name="output", asked="norm_output true", facts=("norm_output",), keys={"norm_output": True}),
        DraftTrial(name="fc-norm", asked="fc_norm true", facts=("fc_norm",), keys={"fc_norm": True}, weights=fc_norm,
                   works=lambda row: bool(row.fc_norm.keys) or row.unknown_weights == "dropped"),
        DraftTrial(name="before-fc", asked="norm_before_fc true at the top level", facts=("norm_before_fc",),
                   keys={"norm_before_fc": True}, weights=input_norm),
        DraftTrial(name="before-fc-nested", asked="norm_before_fc true in eagle_config, false at the top level",
                   facts=("norm_before_fc",), weights=input_norm,
                   keys={"norm_before_fc": False, "eagle_config": {**nested, "norm_before_fc": True}}),
        DraftTrial(name="nested", asked="norm_before_residual and norm_output true in eagle_config", facts=norms,
                   keys={"eagle_config": {**nested, "norm_before_residual": True, "norm_output": True}}),
        DraftTrial(name="attention-bias", asked="attention_bias true, with biases of q, k, v and o_proj",
                   facts=("attention_bias", "output_bias"), keys={"attention_bias": True}, weights={**qkv, **out}),
        DraftTrial(name="bias", asked="bias true, with biases of fc and o_proj", facts=("fc_bias", "output_bias"),
                   keys={"bias": True}, weights={"fc.bias": tiny.draw("fc.bias", h), **out}),
        DraftTrial(name="mlp-bias", asked="mlp_bias true, with biases of the MLP", facts=("mlp_bias",),
                   keys={"mlp_bias": True}, weights=mlp),
    )  # fmt: skip


def _sharing() -> tuple[DraftTrial, ...]:
    embedding = {"embed_tokens.weight": tiny.draw("embed_tokens", tiny.VOCAB, tiny.HIDDEN)}
    full = {"d2t": None, "t2d": None, "lm_head.weight": tiny.draw("lm_head", tiny.VOCAB, tiny.HIDDEN)}
    zeros, wide = np.zeros(tiny.VOCAB, np.int64), tiny.HIDDEN + 32
    return (
        DraftTrial(name="embedding", asked="an embedding of its own", facts=("embedding",), weights=embedding),
        DraftTrial(name="width", asked="another width than the target's, an embedding of its own", facts=("embedding",),
                   keys={"hidden_size": wide, "target_hidden_size": tiny.HIDDEN}, hidden=wide,
                   weights={"embed_tokens.weight": tiny.draw("wide", tiny.VOCAB, wide)}),
        DraftTrial(name="full", asked="the whole vocabulary, a head of its own", facts=("head",),
                   keys={"draft_vocab_size": tiny.VOCAB}, weights=full),
        DraftTrial(name="full-map", asked="the whole vocabulary, with d2t", facts=("full_vocabulary_map",),
                   keys={"draft_vocab_size": tiny.VOCAB}, weights={**full, "d2t": zeros},
                   works=lambda row: row.full_vocabulary_map),
        DraftTrial(name="no-vocabulary", asked="draft_vocab_size null, a head of its own", facts=("head",),
                   keys={"draft_vocab_size": None}, weights=full),
        DraftTrial(name="no-head", asked="draft_vocab_size null, no head", facts=("head",),
                   keys={"draft_vocab_size": None}, weights={**full, "lm_head.weight": None}),
        DraftTrial(name="tied", asked="tie_word_embeddings true, the whole vocabulary", facts=("tied_head",),
                   keys={"draft_vocab_size": tiny.VOCAB, "tie_word_embeddings": True}, weights=full),
    )  # fmt: skip


def _shapes() -> tuple[DraftTrial, ...]:
    second = tiny.layer_weights("layers.1", 1)
    plain = tiny.draft_weights(len(_AUX))
    renamed = {n.replace("midlayer", "layers.0"): w for n, w in plain.items() if n.startswith("midlayer")}
    gone: dict[str, tiny.Array | None] = dict.fromkeys((n for n in plain if n.startswith("midlayer")), None)
    prefixed: dict[str, tiny.Array | None] = {
        f"model.{n}" if not n.startswith(("lm_head", "d2t", "t2d")) else n: w for n, w in plain.items()
    }
    unprefixed: dict[str, tiny.Array | None] = dict.fromkeys((n for n in plain if f"model.{n}" in prefixed), None)
    return (
        DraftTrial(name="one-capture", asked="one capture", facts=("single_capture_skips_fc",), slots=1,
                   keys=id_keys(_AUX[:1], 1)),
        DraftTrial(name="two-layers", asked="two layers", facts=("max_layers", "later_layers_norm"),
                   keys={"num_hidden_layers": 2}, weights=second,
                   works=lambda row: row.max_layers is None or row.max_layers > 1),
        DraftTrial(name="layer-name", asked="layers.0 in place of midlayer", facts=("layer_names",),
                   weights={**gone, **renamed}, works=lambda row: "layers.0" in row.layer_names,
                   loud=False),
        DraftTrial(name="prefix", asked="names that begin with model.", facts=("weight_prefixes",),
                   weights={**unprefixed, **prefixed}, works=lambda row: "model." in row.weight_prefixes,
                   loud=False),
        DraftTrial(name="unknown-weight", asked="a weight of a name that nothing has", facts=("unknown_weights",),
                   weights={"hsformat_unknown.weight": tiny.draw("unknown", 4)},
                   works=lambda row: row.unknown_weights == "dropped"),
    )  # fmt: skip


def _rope() -> tuple[DraftTrial, ...]:
    return (
        DraftTrial(name="rope-parameters", asked="rope_parameters in place of rope_theta", facts=("rope_layouts",),
                   keys={"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, without=("rope_theta",),
                   works=lambda row: "rope_parameters" in row.rope_layouts, loud=False),
        DraftTrial(name="partial", asked="partial_rotary_factor 0.5", facts=("partial_rotary_keys",),
                   keys={"partial_rotary_factor": 0.5, "rope_theta": 50.0}, loud=False),
        DraftTrial(name="positions", asked=f"max_position_embeddings 8, of {len(tiny.PROMPT)} tokens",
                   facts=("readers",), keys={"max_position_embeddings": 8},
                   works=lambda row: row.readers[0].positions == "drafted",
                   silent=lambda row: row.readers[0].positions == "not_drafted"),
    )  # fmt: skip


def _places() -> tuple[DraftTrial, ...]:
    four = (1, 3, 5, 7)

    def places(top: tuple[int, ...] = (), inner: tuple[int, ...] = ()) -> dict[str, Any]:
        return {_IDS: list(top), "eagle_config": {_IDS: list(inner)} if inner else {}}

    return (
        DraftTrial(name="top", asked="ids at the top level alone", facts=("readers",), keys=places(top=(1, 4, 5))),
        DraftTrial(name="inner", asked="ids in eagle_config alone", facts=("readers",), keys=places(inner=(1, 4, 5))),
        DraftTrial(name="both", asked="other ids at the top level than in eagle_config", facts=("readers",),
                   keys=places(top=(1, 4, 5), inner=(2, 4, 7))),
        DraftTrial(name="dflash", asked="ids in dflash_config.target_layer_ids alone", facts=("readers",),
                   keys={**places(), "dflash_config": {"target_layer_ids": [0, 2, 4]}}),
        DraftTrial(name="count", asked="four ids, num_aux_hidden_states", facts=("count_keys",), slots=4,
                   keys=id_keys(four, 4)),
        DraftTrial(name="count-inner", asked="four ids in eagle_config, no num_aux_hidden_states", slots=4,
                   facts=("count_keys",), keys=places(inner=four), without=("num_aux_hidden_states",),
                   works=lambda row: f"eagle_config.{_IDS}" in row.count_keys),
        DraftTrial(name="count-none", asked="four ids at the top level, no num_aux_hidden_states", slots=4,
                   facts=("count_keys", "count_default"), keys=places(top=four), without=("num_aux_hidden_states",),
                   works=lambda row: _IDS in row.count_keys),
    )  # fmt: skip
