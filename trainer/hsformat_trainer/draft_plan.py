"""The draft that will be trained: its sizes and options, and its config as engines will read it. Brings no torch.

There are three sources of it: the target's sizes and the run's options; an existing draft's config
(``--draft-config``); an existing draft's folder (``--init``). Of the last two, what the config states holds, and an
option of the run that says otherwise is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hsformat.contract import TargetModel
from hsformat.engines.drafts import Draft, draft_of, read_draft
from hsformat.engines.emission import emit_for
from hsformat.engines.inspection import inspect_draft, rules_for
from hsformat.engines.options import NORMS, read_options
from hsformat.engines.profile import EngineProfile
from hsformat.engines.rows import DraftRow
from hsformat.engines.sizes import DraftSizes, read_sizes
from hsformat.engines.targets import TargetFacts
from hsformat.layout import Layout, ServingLayout
from hsformat.problems import NothingToOpen, Problem, Severity, problem
from hsformat.target.describe import TargetDescription
from hsformat.target.jsonfiles import read_object
from hsformat_trainer.attempt import attempt
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.draft_files import draft_config, plain_config, rope_parameters, weight_shapes
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.engines_named import NamedEngine
from hsformat_trainer.rope_served import rope_problems

__all__ = ["existing_spec", "exported_draft", "new_spec", "served_by"]

NEW = "the draft that will be trained"

_SIZES = {
    "draft_layers": "num_layers", "draft_hidden_size": "hidden_size", "draft_intermediate_size": "intermediate_size",
    "draft_heads": "num_heads", "draft_kv_heads": "num_kv_heads", "draft_head_dim": "head_dim",
    "draft_max_positions": "max_position_embeddings", "draft_vocab_size": "draft_vocab_size", "draft_rope": "rope",
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "fc_norm": "fc_norm",
    "norm_output": "norm_output",
}  # fmt: skip
"""Options of the run and the fields of a spec that they are."""

_TARGET_KEYS = {
    "draft_heads": "num_attention_heads", "draft_kv_heads": "num_key_value_heads", "draft_head_dim": "head_dim",
    "draft_intermediate_size": "intermediate_size",
}  # fmt: skip


def new_spec(
    config: TrainConfig,
    described: TargetDescription,
    layout: Layout,
    engines: Sequence[NamedEngine],
    profile: EngineProfile | None,
    problems: list[Problem],
) -> DraftSpec | None:
    """Return a new draft of the target's shape, with what the options change.

    None, with HS408, HS409 or HS603 in ``problems``: sizes are missing, or do not fit together. HS405: the engines run
    more than one layer in different ways.
    """
    later = _later_norm(config.draft_layers, engines, profile, problems)
    values = _new_values(config, described, layout, later, problems)
    return None if values is None else _spec(values, problems)


def existing_spec(
    config: TrainConfig,
    facts: TargetFacts,
    engines: Sequence[NamedEngine],
    profile: EngineProfile | None,
    problems: list[Problem],
) -> tuple[DraftSpec | None, list[ServingLayout | None]]:
    """Return the draft of ``config.init`` or ``config.draft_config``, and what each engine does with it as it is.

    Everything that is wrong with it is added to ``problems``, with the engine's name.
    """
    draft = _read(config, problems)
    if draft is None:
        return None, [None] * len(engines)
    servings = served_by(draft, facts, engines, profile, problems)
    rows = [rules.draft for e in engines if (rules := _rules(e, draft, facts, profile, [])) is not None]
    read = [read_sizes(draft, [], row) for row in rows]
    sizes = next((s for s in read if s is not None), None)
    first = next((s for s in servings if s is not None), None)
    if sizes is None or first is None:
        return None, servings
    if any(s is not None and s != sizes for s in read):
        got, expected = "sizes that the engines take from different keys", "the same sizes in all engines"
        fix = "state the same width at intermediate_size and intermediate_size_mlp"
        problems.append(problem("HS411", where=draft.at("sizes"), got=got, expected=expected, fix=fix))
    values = _existing_values(config, draft, sizes, first, attention_bias=_trainable(draft, rows, problems))
    spec = _spec(values, problems)
    if spec is not None:
        problems += _contradictions(config, spec, draft)
        problems += _unused_embedding(spec, draft)
    return spec, servings


def exported_draft(
    spec: DraftSpec,
    layout: Layout,
    target: TargetModel,
    engines: Sequence[NamedEngine],
    profile: EngineProfile | None,
    problems: list[Problem],
) -> Draft | None:
    """Return the folder that will be exported after training, as engines would see it: config, names and shapes.

    None, with HS304, HS401, HS402, HS405, HS410 or HS412 in ``problems``: no config makes the engines do what the draft
    would be trained for, so that it would be trained for nothing. HS407 is added for a rotary embedding that an engine
    computes otherwise.
    """
    problems += rope_problems(spec, engines)
    versions: dict[str, str] = {}
    for e in engines:
        if not e.is_custom:
            versions.setdefault(e.engine, e.version_or(profile))
    keys: dict[str, Any] | None = {}
    if versions:
        about: dict[str, Any] = {"architecture": target.architecture, "num_layers": target.num_layers}
        keys, found = emit_for(layout.aux, draft_config(spec), versions, profile=profile, **about)
        serving = ", ".join(f"{e} {v}".strip() for e, v in versions.items())
        problems += [p.at(f"a config for {serving}") for p in found]
    if keys is None:
        return None
    return draft_of(plain_config(spec, keys), where=NEW, problems=problems, shapes=weight_shapes(spec))


def served_by(
    draft: Draft,
    facts: TargetFacts,
    engines: Sequence[NamedEngine],
    profile: EngineProfile | None,
    problems: list[Problem],
) -> list[ServingLayout | None]:
    """Return what each engine does with a draft; None: it cannot be told. Problems are added with the engine's name."""
    out: list[ServingLayout | None] = []
    for engine in engines:
        rules = _rules(engine, draft, facts, profile, problems)
        layout, found = (None, []) if rules is None else inspect_draft(draft, facts, rules)
        problems += [p.at(str(engine)) for p in found]
        out.append(layout)
    return out


def _rules(
    engine: NamedEngine, draft: Draft, facts: TargetFacts, profile: EngineProfile | None, problems: list[Problem]
) -> Any:
    return attempt(lambda: rules_for(engine.engine, engine.version, draft, facts, profile), problems)


def _read(config: TrainConfig, problems: list[Problem]) -> Draft | None:
    given = str(config.init or config.draft_config)
    path = Path(given)
    if not path.exists():
        expected = "a draft folder" if config.init else "a draft's config.json"
        raise NothingToOpen(problem("HS602", where=given, got="no such path", expected=expected, fix="check the path"))
    if config.init is not None:
        draft, found = read_draft(path)
        problems += found
        return draft
    file = path / "config.json" if path.is_dir() else path
    values = attempt(lambda: read_object(file), problems)
    if values is None:
        return None
    where = os.fspath(file.parent if file.name == "config.json" else file)
    return draft_of(values, where=where, problems=problems)


def _later_norm(
    layers: int, engines: Sequence[NamedEngine], profile: EngineProfile | None, problems: list[Problem]
) -> str | None:
    if layers == 1:
        return None
    found = [attempt(lambda e=e: e.later_layers_norm(profile), []) for e in engines]  # type: ignore[misc]  # mypy infers no default of a lambda
    norms = [norm for norm in found if norm is not None]
    if len(set(norms)) > 1:
        ways = "; ".join(f"{e}: {n}" for e, n in zip(engines, found, strict=True))
        fix = "use one layer, or serve with one engine"
        expected = "the same norm before the later layers in every engine"
        problems.append(problem("HS405", where="--draft-layers", got=ways, expected=expected, fix=fix))
    return norms[0] if norms else "input_layernorm"


def _new_values(
    config: TrainConfig,
    described: TargetDescription,
    layout: Layout,
    later: str | None,
    problems: list[Problem],
) -> dict[str, Any] | None:
    model, before = described.model, len(problems)
    sizes: dict[str, int] = {}
    for option, key in _TARGET_KEYS.items():
        value = getattr(config, option) or described.config.get(key)
        if type(value) is not int or value <= 0:
            flag = f"--{option.replace('_', '-')}"
            got = f"the target's config has no {key} that could stand for it"
            problems.append(problem("HS603", where=flag, got=got, expected="an integer above 0", fix=f"give {flag}"))
            continue
        sizes[_SIZES[option]] = value
    positions = config.draft_max_positions or described.max_positions
    if positions is None:
        got = "the target's config has no max_position_embeddings"
        fix = "give --draft-max-positions: as many as will be served"
        where, expected = "--draft-max-positions", "an integer above 0"
        problems.append(problem("HS603", where=where, got=got, expected=expected, fix=fix))
    if config.draft_vocab_size is not None and config.draft_vocab_size > model.vocab_size:
        expected = f"at most {model.vocab_size}, the ids of the target"
        fix = "leave it out for the whole vocabulary, or give fewer ids"
        size = config.draft_vocab_size
        problems.append(problem("HS408", where="--draft-vocab-size", got=size, expected=expected, fix=fix))
    if len(problems) > before:
        return None
    return {
        **sizes,
        "target_hidden_size": model.hidden_size,
        "num_aux": len(layout.aux),
        "hidden_size": config.draft_hidden_size or model.hidden_size,
        "num_layers": config.draft_layers,
        "rms_norm_eps": model.final_norm.eps,
        "rope": config.draft_rope or _target_rope(described),
        "max_position_embeddings": positions,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or model.vocab_size,
        **{
            name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
        "later_layers_norm": later,
        "train_embedding": config.train_embedding,
        "train_head": config.train_head,
    }


def _target_rope(described: TargetDescription) -> dict[str, Any]:
    """Return the target's rotary embedding; of several, that of the layers that see everything."""
    ropes = described.model.rope
    head_dim = described.config.get("head_dim")
    for kind in ("all", "full_attention"):
        for rope in ropes:
            if rope.applies_to == kind:
                return rope_parameters(rope, head_dim if isinstance(head_dim, int) else rope.rotary_dim)
    return {"rope_type": "default", "rope_theta": 10000.0}  # a target of learned positions: the usual base


def _trainable(draft: Draft, rows: Sequence[DraftRow], problems: list[Problem]) -> bool:
    """Return whether q, k and v have a bias; HS410 or HS411 is added for what cannot be trained or served alike."""
    for row in rows:
        if row.attention != "llama":
            where, fix = f"{draft.where}: attention", "begin a new draft"
            expected = "llama: what is trained has q, k, v and o projections alone"
            problems.append(problem("HS410", where=where, got=row.attention, expected=expected, fix=fix))
    options = [read_options(draft, row, "", []) for row in rows]
    biased = [n for n in ("output_bias", "mlp_bias", "fc_bias") if any(getattr(o, n) for o in options)]
    if biased:
        fix = "begin a new draft, or one without them"
        got, expected = f"{', '.join(biased)}, which are applied", "biases of q, k and v alone, or none"
        problems.append(problem("HS410", where=draft.at("biases"), got=got, expected=expected, fix=fix))
    if len({o.attention_bias for o in options}) > 1:
        got = "biases of q, k and v that one engine applies and another does not"
        problems.append(problem("HS411", where=draft.at("attention_bias"), got=got, expected="the same in all engines"))
    act = draft.decoder.get("hidden_act", "silu")
    if act != "silu":
        where = draft.at(f"{draft.decoder_prefix}hidden_act")
        problems.append(problem("HS410", where=where, got=repr(act)[:100], expected="silu, as engines apply it"))
    return any(o.attention_bias for o in options)


def _unused_embedding(spec: DraftSpec, draft: Draft) -> Iterator[Problem]:
    """Yield a warning for an embedding of the draft's own that is not trained on."""
    names = [name for name in draft.shapes or () if name.endswith("embed_tokens.weight")]
    if names and not spec.train_embedding:
        fix = "nothing, if it is a copy; --train-embedding goes on with it, for engines that keep it"
        got = "an embedding of the draft's own"
        where, expected = f"{draft.where}: {names[0]}", "the target's, which is used frozen"
        yield problem("HS412", where=where, got=got, expected=expected, fix=fix, severity=Severity.WARNING)


def _existing_values(
    config: TrainConfig, draft: Draft, sizes: DraftSizes, served: ServingLayout, *, attention_bias: bool
) -> dict[str, Any]:
    rope = rope_parameters(served.rope[0], sizes.head_dim) if served.rope else {}
    return {
        "target_hidden_size": sizes.target_hidden_size,
        "num_aux": len(served.aux),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_layers": sizes.num_layers,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": served.rms_norm_eps,
        "attention_bias": attention_bias,
        "rope": rope,
        "max_position_embeddings": served.max_positions or config.draft_max_positions or 0,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": served.draft_vocab_size,
        **{name: getattr(served, name) for name in NORMS},
        "later_layers_norm": served.later_layers_norm,
        "train_embedding": config.train_embedding,
        "train_head": config.train_head,
    }


def _contradictions(config: TrainConfig, spec: DraftSpec, draft: Draft) -> Iterator[Problem]:
    """Yield what the run's options say otherwise than the draft does; an option that was not given says nothing."""
    for option, name in _SIZES.items():
        if option not in config.model_fields_set or getattr(config, option) is None:
            continue
        given, is_ = getattr(config, option), getattr(spec, name)
        if given != is_:
            code = "HS405" if "norm" in option else "HS407" if option == "draft_rope" else "HS409"
            where = f"--{option.replace('_', '-')}"
            fix = f"leave {option} out, or begin a new draft"
            yield problem(code, where=where, got=given, expected=f"{is_}, as {draft.where} has it", fix=fix)


def _spec(values: Mapping[str, Any], problems: list[Problem]) -> DraftSpec | None:
    try:
        return DraftSpec.model_validate(values)
    except ValidationError as e:
        for err in e.errors(include_url=False):
            where = ": ".join(("the draft's sizes", *map(str, err["loc"])))
            got = str(err["ctx"]["error"]) if err["type"] == "value_error" else repr(err["input"])[:200]
            expected = "sizes that fit together" if err["type"] == "value_error" else err["msg"]
            fix = "change the options of the draft"
            problems.append(problem("HS409", where=where, got=got, expected=expected, fix=fix))
        return None
