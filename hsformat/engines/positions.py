"""Rotary embedding and positions of a draft, as an engine reads them. May import ``sizes``, ``target.rope``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hsformat.engines.drafts import ABSENT, Draft, lookup
from hsformat.engines.filled import attribute, named
from hsformat.engines.rows import DraftRow
from hsformat.engines.sizes import DraftSizes
from hsformat.engines.targets import TargetFacts
from hsformat.problems import Problem, Severity, problem
from hsformat.rotary import Rope
from hsformat.target.families import FAMILIES, RopeRule
from hsformat.target.rope import normalise_ropes

__all__ = ["check_positions", "check_record_length", "max_positions", "read_ropes"]

_BEYOND = {
    "not_drafted": "drafts nothing for longer sequences",
    "refused": "refuses to start with a longer context",
    "past_table": "reads past the end of its table of sines and cosines",
}
_POSITIONS, _SHARE = "max_position_embeddings", "partial_rotary_factor"
_LAYOUT_KEYS = {"rope_theta": ("rope_theta", "rope_scaling"), "rope_parameters": ("rope_parameters",)}


def read_ropes(draft: Draft, sizes: DraftSizes, row: DraftRow, title: str, problems: list[Problem]) -> tuple[Rope, ...]:
    """Return the rotary embedding; HS407 is added to ``problems`` where the engine would apply another or a default."""
    decoder = _as_read(draft.decoder, row)
    there = {kind: [k for k in keys if decoder.get(k) is not None] for kind, keys in _LAYOUT_KEYS.items()}
    found: list[Problem] = []
    rule = _rule(decoder.get("model_type"))
    if not any(path.startswith("rope_parameters.") for path in row.partial_rotary_keys):
        rule = replace(rule, partial=1.0)  # a class has its share there alone
    ropes = normalise_ropes(
        decoder,
        rule,
        head_dim=_rotated(sizes),
        where=f"{draft.where}/config.json",
        problems=found,
    )
    problems += [problem("HS407", where=p.where, got=p.got, expected=p.expected, fix=p.fix) for p in found]
    if (layered := _by_layer_type(decoder)) is not None:
        # The outer object is asked for its base: vLLM 0.32.0 model_executor/layers/rotary_embedding (get_rope), SGLang
        # 0.5.23 models/llama.py (LlamaDecoderLayer), whose layers/rotary_embedding/factory.py then misses a rope_type.
        got = f"parameters by layer type, into which {title} does not look: it takes a base of 10000, or fails"
        fix = "write one object with rope_theta and rope_type: a draft has one kind of layer"
        where, expected = draft.at(f"{draft.decoder_prefix}{layered}"), "parameters of all layers"
        problems.append(problem("HS407", where=where, got=got, expected=expected, fix=fix))
        ropes = (Rope(applies_to="all", kind="default", theta=10_000.0, rotary_dim=_rotated(sizes), parameters={}),)
    unread = [k for kind, keys in there.items() if kind not in row.rope_layouts for k in keys]
    if unread and not any(there[kind] for kind in row.rope_layouts):
        got = f"{', '.join(unread)} alone, which {title} does not read: it takes a base of 10000"
        expected = " or ".join(row.rope_layouts)
        fix = "write the config in the layout of Transformers 4 as well"
        problems.append(problem("HS407", where=draft.at(unread[0]), got=got, expected=expected, fix=fix))
    elif not found and layered is None and not _states_base(decoder):
        base = ropes[0].theta if ropes else 10_000.0
        got, fix = f"nothing: {title} takes a base of {base:g}", "write rope_theta as the draft was trained"
        where = draft.at(f"{draft.decoder_prefix}rope_theta")
        severity = Severity.WARNING
        problems.append(problem("HS407", where=where, got=got, expected="a stated base", fix=fix, severity=severity))
    _check_partial(draft, row, title, problems)
    return ropes


def max_positions(draft: Draft, row: DraftRow, problems: list[Problem]) -> int | None:
    """Return ``max_position_embeddings``; HS603 if it is no number above 0, HS407 (warning) if a class fills it in."""
    found = attribute(draft, _POSITIONS, row)
    value = found.value
    if value is ABSENT:
        return None
    if type(value) is not int or not 0 < value < 2**53:
        where = draft.at(f"{draft.decoder_prefix}{_POSITIONS}")
        got = "null" if value is None else repr(value)[:100]
        fix = "write the number of positions as the draft was trained"
        problems.append(problem("HS603", where=where, got=got, expected="an integer above 0", fix=fix))
        return None
    if found.owner is not None:
        problems.append(named(draft, _POSITIONS, found, "HS407"))
    return value


def check_positions(draft: Draft, limit: int | None, row: DraftRow, target: TargetFacts, title: str) -> list[Problem]:
    """Return HS407 (warning) if the target goes further than the draft and the engine then does not draft as before."""
    reaction = {r.name: _BEYOND[r.positions] for r in row.readers if r.positions != "drafted"}
    if limit is None or target.max_positions is None or limit >= target.max_positions or not reaction:
        return []
    said = "; ".join(f"{name or title} {what}" for name, what in reaction.items())
    return [
        problem(
            "HS407",
            where=draft.at(f"{draft.decoder_prefix}{_POSITIONS}"),
            got=f"{limit}, and the target's is {target.max_positions}: {said}",
            expected=f"{target.max_positions}, as the target's",
            fix="raise it, or serve with a context of at most this length",
            severity=Severity.WARNING,
        )
    ]


def check_record_length(limit: int | None, longest: int, *, where: str, draft: str) -> list[Problem]:
    """Return HS407 (warning) if a store's longest record has more tokens than a draft's positions (sglang#6783)."""
    if limit is None or longest <= limit:
        return []
    return [
        problem(
            "HS407",
            where=f"{draft}/config.json: max_position_embeddings",
            got=f"{limit}, and a record of {longest} tokens in {where}",
            expected=f"at least {longest}",
            fix="raise it: beyond it an engine drafts nothing, or reads past the end of a table (docs/engines.md)",
            severity=Severity.WARNING,
        )
    ]


def _rule(model_type: object) -> RopeRule:
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return (family.rope if family else None) or RopeRule()


def _as_read(decoder: Mapping[str, Any], row: DraftRow) -> Mapping[str, Any]:
    """Return the decoder's config without shares of the head that stand where the engine does not look."""
    out = dict(decoder)
    for section in ("rope_parameters", "rope_scaling"):
        inner = out.get(section)
        if isinstance(inner, dict) and f"{section}.{_SHARE}" not in row.partial_rotary_keys:
            out[section] = {k: v for k, v in inner.items() if k != _SHARE}
    if _SHARE not in row.partial_rotary_keys:
        out.pop(_SHARE, None)
    return out


def _states_base(decoder: Mapping[str, Any]) -> bool:
    """Return whether a base stands beside the parameters or in them."""
    sections = [s for key in ("rope_parameters", "rope_scaling") if isinstance(s := decoder.get(key), dict)]
    return any(s.get("rope_theta") is not None for s in (decoder, *sections))


def _by_layer_type(decoder: Mapping[str, Any]) -> str | None:
    """Return the key whose parameters are one object a layer type."""
    for key in ("rope_parameters", "rope_scaling"):
        section = decoder.get(key)
        if isinstance(section, dict) and any(isinstance(value, dict) for value in section.values()):
            return key
    return None


def _rotated(sizes: DraftSizes) -> int:
    return sizes.head_dim if sizes.latent is None else sizes.latent.rope


def _check_partial(draft: Draft, row: DraftRow, title: str, problems: list[Problem]) -> None:
    """Add HS407 for a share of the head that stands where the engine does not look (speculators#613, #738)."""
    prefix = draft.decoder_prefix
    places = (f"rope_parameters.{_SHARE}", f"rope_scaling.{_SHARE}", _SHARE)
    stated = {p: v for p in places if (v := lookup(draft.decoder, p)) not in (ABSENT, None)}
    if not stated or any(p in row.partial_rotary_keys for p in stated):
        return
    path, value = next(iter(stated.items()))
    if value != 1:
        got = f"{value}, which {title} does not read there: it rotates all dimensions of a head"
        fix = f"write {row.partial_rotary_keys[0]} as well" if row.partial_rotary_keys else None
        expected = f"it at {' or '.join(row.partial_rotary_keys) or 'nowhere'}"
        problems.append(problem("HS407", where=draft.at(f"{prefix}{path}"), got=got, expected=expected, fix=fix))
