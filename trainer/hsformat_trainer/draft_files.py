"""The files of a draft: config keys and weight names under which engines serve it. Brings no torch.

Two things are written for every engine: the rotary embedding in the layouts of Transformers 4 and 5, since engines read
one of them, and ``draft_vocab_size``, without which SGLang takes the target's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsformat.contract import TargetModel
from hsformat.engines.emission import ARCHITECTURE, DraftConfig
from hsformat.layout import EAGLE3_SHIFT, AuxInput, Layout, ServingLayout, parse_capture_key
from hsformat.problems import Problem
from hsformat.rotary import Rope
from hsformat.target.families import RopeRule
from hsformat.target.rope import normalise_ropes
from hsformat_trainer.draft_spec import DraftSpec

__all__ = ["FIRST_LAYER", "draft_config", "exported_name", "plain_config", "rope_parameters", "trained_layout",
           "weight_shapes"]  # fmt: skip

FIRST_LAYER = "midlayer"
"""What both engines call the first layer; a draft in training calls it ``layers.0``."""


def exported_name(name: str, first_layer: str = FIRST_LAYER) -> str:
    """Return the name of a weight in a folder that is served."""
    inner = "layers.0."
    return f"{first_layer}.{name.removeprefix(inner)}" if name.startswith(inner) else name


def weight_shapes(spec: DraftSpec, first_layer: str = FIRST_LAYER) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of everything that a served folder holds; of the vocabulary map, ``d2t`` alone."""
    h, wide = spec.hidden_size, spec.target_hidden_size * spec.num_aux
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    out: dict[str, tuple[int, ...]] = {"fc.weight": (h, wide)}
    if spec.norm_before_fc:
        out["input_norm.weight"] = (wide,)
    if spec.fc_norm:
        out |= {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(spec.num_aux)}
    for i in range(spec.num_layers):
        layer, width = (first_layer, 2 * h) if i == 0 else (f"layers.{i}", h)
        before = ["hidden_norm", "input_layernorm"] if i == 0 else [str(spec.later_layers_norm)]
        out |= {f"{layer}.{norm}.weight": (h,) for norm in (*before, "post_attention_layernorm")}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{layer}.self_attn.{name}_proj.weight"] = (rows, width)
            if spec.attention_bias:
                out[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        out[f"{layer}.self_attn.o_proj.weight"] = (h, q)
        out |= {f"{layer}.mlp.{name}_proj.weight": (spec.intermediate_size, h) for name in ("gate", "up")}
        out[f"{layer}.mlp.down_proj.weight"] = (h, spec.intermediate_size)
    out |= {"norm.weight": (h,), "lm_head.weight": (spec.draft_vocab_size, h)}
    if spec.train_embedding:
        out["embed_tokens.weight"] = (spec.vocab_size, h)
    if spec.draft_vocab_size < spec.vocab_size:
        out["d2t"] = (spec.draft_vocab_size,)
    return out


def draft_config(spec: DraftSpec) -> DraftConfig:
    """Return a draft as :func:`hsformat.engines.emit` takes it."""
    return DraftConfig(
        hidden_size=spec.hidden_size,
        target_hidden_size=spec.target_hidden_size,
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.draft_vocab_size,
        norm_before_residual=spec.norm_before_residual,
        norm_before_fc=spec.norm_before_fc,
        fc_norm=spec.fc_norm,
        norm_output=spec.norm_output,
        embedding="draft" if spec.train_embedding else "target",
        head="draft",
    )


def plain_config(spec: DraftSpec, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole ``config.json`` in the layout that both engines read.

    Parameters
    ----------
    keys
        What :func:`hsformat.engines.emit_for` gave for the engines; empty: for a custom layout, which states all.
    """
    rope = dict(spec.rope)
    older: dict[str, Any] = {"rope_theta": rope.pop("rope_theta")}
    share = rope.pop("partial_rotary_factor", None)
    if share is not None:
        older["partial_rotary_factor"] = share
    if rope.get("rope_type") != "default":
        older["rope_scaling"] = rope
    named = {"architectures": [ARCHITECTURE]}
    return {**named, **spec.to_config(), **older, **keys, "tie_word_embeddings": False}


def rope_parameters(rope: Rope, head_dim: int) -> dict[str, Any]:
    """Return a rotary embedding as Transformers' ``rope_parameters``; ``head_dim``: of what it was read from."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.parameters}
    if rope.kind == "proportional":
        head_dim = out.pop("head_dim")
    if rope.rotary_dim != head_dim:
        out["partial_rotary_factor"] = rope.rotary_dim / head_dim
    return out


def trained_layout(spec: DraftSpec, layout: Layout, target: TargetModel, problems: list[Problem]) -> ServingLayout:
    """Return what training does with a draft, in the words of serving; the vocabulary map is left open.

    Parameters
    ----------
    problems
        HS603 is added for a rotary embedding of a kind that is not known.
    """
    config = plain_config(spec, {})
    ropes = normalise_ropes(
        config, RopeRule(), head_dim=spec.head_dim, where="the draft that is trained", problems=problems
    )
    parsed = [parse_capture_key(key) for key in layout.aux]
    return ServingLayout(
        engine="training",
        version="1",
        evidence="ran",
        architecture=target.architecture,
        num_layers=target.num_layers,
        target_hidden_size=spec.target_hidden_size,
        vocab_size=spec.vocab_size,
        aux=tuple(AuxInput(depth=depth, norm="final" if normed else "none") for depth, normed in parsed),
        hidden_size=spec.hidden_size,
        num_draft_layers=spec.num_layers,
        norm_before_residual=spec.norm_before_residual,
        norm_before_fc=spec.norm_before_fc,
        fc_norm=spec.fc_norm,
        norm_output=spec.norm_output,
        later_layers_norm=spec.later_layers_norm,
        rope=ropes,
        max_positions=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        embedding="draft" if spec.train_embedding else "target",
        head="draft",
        draft_vocab_size=spec.draft_vocab_size,
        vocab_map=None,
        shift=EAGLE3_SHIFT,
    )
