"""A model's config: read, checked, and normalised so that two versions of Transformers give one digest.

The normalised config (docs/spec cites this rule) is made of ``config.json`` in this order:

1. Of a multimodal config that is listed in ``WRAPPERS``, its ``text_config``, with the outer ``architectures``,
   ``tie_word_embeddings`` and ``quantization_config``. Where there is none, ModelOpt's
   ``hf_quant_config.json`` stands for ``quantization_config``, with ``quant_method`` ``modelopt``.
2. Keys get their usual names: the family's ``renames``, and ``num_experts`` and ``n_routed_experts`` become
   ``num_local_experts``. Of a family outside the table, sizes may stand under one of :data:`OTHER_NAMES`. A null never
   replaces another value.
3. ``head_dim`` is filled in: the family's default, else ``hidden_size // num_attention_heads``; with latent attention
   it is ``qk_rope_head_dim``. ``num_key_value_heads``: null is ``num_attention_heads``. Where layers differ in them,
   ``per_layer_config`` says how, in one form (``hsformat.target.layerwise``).
4. With ``use_sliding_window`` false there is no ``sliding_window``. ``layer_types`` is computed as the family does
   where it is missing, and replaces what it was computed from (:data:`DERIVED`); where all layers are
   ``full_attention`` it is left out.
5. Every RoPE key is replaced by ``rope``: the list of :class:`hsformat.contract.Rope`.
6. Left out: :data:`IGNORED` and :data:`IGNORED_PARTS`, which change no state; keys that begin with ``_``; a value that
   equals the family's default (``family_defaults.json``), which is what a missing key means; null and the empty list,
   except where the family's default is another value.
7. Always present: ``model_type``, ``architecture`` (the first of ``architectures``), ``num_hidden_layers``,
   ``hidden_size``, ``vocab_size`` and ``tie_word_embeddings``.

Anything else enters as it stands. So a key that nobody here has heard of changes the digest instead of being missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsformat.contract import Rope
from hsformat.digests import canonical_json
from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.target.families import FAMILIES, SEVERAL_STREAMS, WRAPPERS, Family, family_defaults
from hsformat.target.jsonfiles import corrupt, read_object, require_folder
from hsformat.target.layerwise import head_dims, layer_overrides
from hsformat.target.rope import ROPE_KEYS, normalise_ropes

__all__ = [
    "DERIVED", "IGNORED", "IGNORED_PARTS", "OTHER_NAMES", "ModelConfig", "is_ignored", "normalise", "read_config",
    "unknown_family_problem",
]  # fmt: skip

# fmt: off
IGNORED = frozenset({
    # about the file and the library
    "architectures", "transformers_version", "torch_dtype", "dtype", "auto_map", "name_or_path",
    "use_cache", "cache_implementation",
    "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "torchscript", "use_bfloat16", "attn_implementation", "tokenizer_class", "tf_legacy_loss", "pruned_heads",
    "gradient_checkpointing",
    # about training
    "initializer_range", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise",
    "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers",
    "num_mtp_layers",
    # about other tasks and generation
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "tie_encoder_decoder", "chunk_size_feed_forward", "prefix", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
    # computed from other keys
    "qk_head_dim",
})
# fmt: on
"""Keys that change no hidden state."""

IGNORED_PARTS = ("dropout", "_pdrop", "summary_", "_token_id", "_token_index")
"""Parts of such keys."""

DERIVED = frozenset({"use_sliding_window", "max_window_layers", "sliding_window_pattern", "no_rope_layer_interval"})
"""Keys that ``layer_types`` and ``no_rope_layers`` replace."""

OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"), "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}  # fmt: skip
"""Names of sizes in configs that do not use the usual ones: in the ``attribute_map`` of bloom, ctrl, dbrx, gptj, mpt
and xglm in Transformers 5.24.0. One that is there alone is taken; the Transformers extractor compares depth and width
with the loaded model."""

_EXPERTS = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
_INTEGERS = {
    "num_hidden_layers": (1, 100_000), "hidden_size": (1, 2**31), "vocab_size": (1, 2**31), "head_dim": (1, 2**31),
    "num_attention_heads": (1, 2**31), "num_key_value_heads": (1, 2**31), "qk_rope_head_dim": (1, 2**31),
    "sliding_window": (0, 2**53), "sliding_window_pattern": (1, 2**31), "max_window_layers": (0, 2**31),
    "no_rope_layer_interval": (1, 2**31), "global_head_dim": (1, 2**31), "num_global_key_value_heads": (1, 2**31),
}  # fmt: skip
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A config of one decoder.

    Attributes
    ----------
    path
        The file.
    values
        The decoder's keys by their usual names, after steps 1 to 4 of the rule above.
    family
        The row of its ``model_type``; None: not in the table (``measured`` must stand in for it).
    model_type, architecture, tied
        Of the decoder, the first of ``architectures``, and whether the head is the embedding.
    dtype
        As the config gives it, without ``torch.``; None: it does not.
    wrapper
        ``model_type`` of the multimodal model around the decoder; None: there is none.
    """

    path: Path
    values: Mapping[str, Any]
    family: Family | None
    model_type: str
    architecture: str
    tied: bool
    dtype: str | None
    wrapper: str | None

    def get(self, key: str) -> Any:
        """Return a value of the config or, where it is missing, what the family's config class fills in."""
        return self.values[key] if key in self.values else family_defaults(self.model_type).get(key)


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a model folder.

    Raises
    ------
    ForeignFileError
        HS602: no folder, no config, not JSON. HS603: fields missing or wrong, each by name. HS410: a model without a
        single residual stream.
    """
    require_folder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise corrupt(str(folder), "no config.json", "a model folder with config.json")
    outer = read_object(path)
    outer_type = outer.get("model_type")
    problems: list[Problem] = []
    nested = isinstance(outer_type, str) and outer_type in WRAPPERS and isinstance(outer.get("text_config"), dict)
    text = outer["text_config"] if nested else outer
    model_type = text.get("model_type", f"{outer_type}_text" if nested else None)
    if not isinstance(model_type, str):
        raise ForeignFileError(_field(path, "model_type", model_type, "text"))
    if reason := _several_streams(outer, model_type):
        fix = "no single tensor is the residual stream after d layers: hsformat cannot hold its states"
        raise ForeignFileError(_unsupported(path, f"{outer_type}: {reason}", "one residual stream", fix))
    family = FAMILIES.get(model_type)
    if family is None and isinstance(outer.get("text_config"), dict):
        fix = "use a version of hsformat that knows how its decoder stands in it, or the decoder alone"
        raise ForeignFileError(_unsupported(path, f"{model_type}, around a text_config", _known(), fix))
    values = _usual_names(text, family)
    defaults = family_defaults(model_type)
    for key in _SIZES + (("num_attention_heads",) if family is None or family.rope else ()):
        if nested and key not in values and key in defaults:  # Transformers 4 writes only what differs from the default
            values[key] = defaults[key]
        if values.get(key) is None:
            problems.append(_field(path, key, None, "an integer above 0"))
    problems += [
        _field(path, k, values[k], f"an integer from {low} to {high}")
        for k, (low, high) in _INTEGERS.items()
        if values.get(k) is not None and not (type(values[k]) is int and low <= values[k] <= high)
    ]
    architectures = outer.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        problems.append(_field(path, "architectures", architectures, "a list that begins with a class name"))
    tied = next((c["tie_word_embeddings"] for c in (outer, text, defaults) if "tie_word_embeddings" in c), None)
    if not isinstance(tied, bool):
        problems.append(_field(path, "tie_word_embeddings", tied, "true or false"))
    dtype = _dtype(path, outer, text, problems)
    if problems:
        raise ForeignFileError(problems)
    if (quantization := _quantization(folder, outer)) is not None:
        values["quantization_config"] = quantization
    _fill_in(values, family, defaults, path=path)
    return ModelConfig(
        path=path, values=values, family=family, model_type=model_type, architecture=str(outer["architectures"][0]),
        tied=bool(tied), dtype=dtype, wrapper=str(outer_type) if nested else None,
    )  # fmt: skip


def unknown_family_problem(path: Path, model_type: str) -> Problem:
    """Return HS410 for a ``model_type`` without a row: its norm, scales and cap are not known, only measurable."""
    fix = (
        "pass `measured`, which an extractor that can measure finds by running the model (hsformat extract does so by "
        "itself), or use a version of hsformat that knows the family"
    )
    return _unsupported(path, model_type, _known(), fix)


def normalise(config: ModelConfig, *, problems: list[Problem]) -> tuple[dict[str, Any], tuple[Rope, ...]]:
    """Return the normalised config, by the rule at the top of this module, and its RoPE (HS603 where it is unknown)."""
    rule = config.family.rope if config.family else None
    ropes: tuple[Rope, ...] = ()
    if config.family is None or rule is not None:
        where = str(config.path)
        widths: dict[str, int] = {}
        if config.family and config.family.full_head_dim is not None:
            widths, found = head_dims(config.values, where=where)
            problems += found
        ropes = normalise_ropes(
            config.values, rule, head_dim=config.values["head_dim"], head_dims=widths, where=where, problems=problems
        )
    defaults = family_defaults(config.model_type)
    always = ("model_type", "tie_word_embeddings", *_SIZES)
    out: dict[str, Any] = {}
    for key, value in config.values.items():
        if key in always or key in ROPE_KEYS or key in DERIVED or is_ignored(key):
            continue
        empty = value is None or value == []
        if not (_equal(value, defaults[key]) if key in defaults else empty):
            out[key] = value
    out |= {key: config.values[key] for key in _SIZES}
    out |= {"model_type": config.model_type, "architecture": config.architecture, "tie_word_embeddings": config.tied}
    out["rope"] = [rope.model_dump(mode="json") for rope in ropes]
    return dict(sorted(out.items())), ropes


def _equal(a: Any, b: Any) -> bool:
    try:
        return canonical_json(a) == canonical_json(b)
    except ValueError:  # a number that JSON does not keep: digest_json reports it
        return False


def is_ignored(key: str) -> bool:
    """Return whether a config key changes no hidden state."""
    return key.startswith("_") or key in IGNORED or any(part in key for part in IGNORED_PARTS)


def _usual_names(text: Mapping[str, Any], family: Family | None) -> dict[str, Any]:
    renames = {**_EXPERTS, **(family.renames if family else {})}
    for name, others in OTHER_NAMES.items() if family is None else ():
        there = [other for other in others if text.get(other) is not None]
        if text.get(name) is None and len(there) == 1:
            renames[there[0]] = name
    values = {k: v for k, v in text.items() if k not in renames}
    values |= {renames[k]: v for k, v in text.items() if k in renames and v is not None}
    return values


def _fill_in(values: dict[str, Any], family: Family | None, defaults: Mapping[str, Any], *, path: Path) -> None:
    """Fill in what follows from other keys (steps 3 and 4 of the rule)."""
    heads = values.get("num_attention_heads", defaults.get("num_attention_heads"))
    if values.get("num_key_value_heads", defaults.get("num_key_value_heads", heads)) is None:
        values["num_key_value_heads"] = heads
    if "num_key_value_heads" not in defaults:
        values.setdefault("num_key_value_heads", heads)
    if family and family.latent_attention:
        values["head_dim"] = values.get("qk_rope_head_dim", defaults.get("qk_rope_head_dim"))
    elif values.get("head_dim") is None:
        values["head_dim"] = defaults.get("head_dim") or values["hidden_size"] // (heads or 1)
    if "use_sliding_window" in defaults and not values.get("use_sliding_window", False):
        values["sliding_window"] = None
    elif "sliding_window" not in values and "sliding_window" in defaults:
        values["sliding_window"] = defaults["sliding_window"]
    if "no_rope_layer_interval" in defaults and values.get("no_rope_layers") is None:
        every = values.get("no_rope_layer_interval", defaults["no_rope_layer_interval"])
        values["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(values["num_hidden_layers"])]
    _check_list(values, "no_rope_layers", int, path)
    if family and family.layer_types and values.get("layer_types") is None:
        values["layer_types"] = family.layer_types(values)
    _check_list(values, "layer_types", str, path)
    if family and family.ends_full:
        values["layer_types"] = [*values["layer_types"][:-1], "full_attention"]
    if family and family.full_head_dim is not None:
        problems = layer_overrides(values, full_head_dim=family.full_head_dim, defaults=defaults, where=str(path))
        if problems:
            raise ForeignFileError(problems)
    if set(values.get("layer_types") or ()) == {"full_attention"}:
        del values["layer_types"]


def _check_list(values: Mapping[str, Any], key: str, kind: type, path: Path) -> None:
    """Refuse a list of layers that has not one entry of ``kind`` a layer."""
    value, n = values.get(key), values["num_hidden_layers"]
    if value is not None and not (
        isinstance(value, list) and len(value) == n and all(isinstance(v, kind) for v in value)
    ):
        raise ForeignFileError(_field(path, key, value, f"a list of {n} entries of type {kind.__name__}"))


def _several_streams(outer: Mapping[str, Any], model_type: str) -> str | None:
    for name in (outer.get("model_type"), model_type):
        if isinstance(name, str) and (reason := SEVERAL_STREAMS.get(name.removesuffix("_text"))):
            return reason
    return "an encoder and a decoder have two residual streams" if outer.get("is_encoder_decoder") is True else None


def _quantization(folder: Path, outer: Mapping[str, Any]) -> Any:
    path = folder / "hf_quant_config.json"
    if outer.get("quantization_config") is not None or not path.exists():
        return outer.get("quantization_config")
    settings = read_object(path).get("quantization")
    if not isinstance(settings, dict):
        raise corrupt(f"{path}: quantization", type(settings).__name__, "a JSON object")
    return {"quant_method": "modelopt", **settings}


def _dtype(path: Path, outer: Mapping[str, Any], text: Mapping[str, Any], problems: list[Problem]) -> str | None:
    for config in (outer, text):
        names = {str(config[k]).removeprefix("torch.") for k in ("dtype", "torch_dtype") if config.get(k) is not None}
        if len(names) > 1:
            problems.append(_field(path, "dtype and torch_dtype", " and ".join(sorted(names)), "one dtype"))
        if names:
            return min(names)
    return None


def _field(path: Path, key: str, got: Any, expected: str) -> Problem:
    shown = "no such field" if got is None else repr(got)[:200]
    fix = f"set {key!r} in config.json as the model's publisher does"
    return problem("HS603", where=f"{path}: {key}", got=shown, expected=expected, fix=fix)


def _known() -> str:
    return f"one of {', '.join(sorted({*FAMILIES, *WRAPPERS}))}"


def _unsupported(path: Path, got: Any, expected: str, fix: str) -> Problem:
    return problem("HS410", where=f"{path}: model_type", got=got, expected=expected, fix=fix)
