"""Rotary embedding and positions of a draft, as an engine reads them. May import ``drafts`` and ``target.rope``."""

from __future__ import annotations

from hsformat.engines.drafts import ABSENT, Draft, DraftSizes, lookup
from hsformat.engines.rows import DraftRow
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
_LAYOUT_KEYS = {"rope_theta": ("rope_theta", "rope_scaling"), "rope_parameters": ("rope_parameters",)}


def read_ropes(draft: Draft, sizes: DraftSizes, row: DraftRow, title: str, problems: list[Problem]) -> tuple[Rope, ...]:
    """Return the rotary embedding; HS407 is added to ``problems`` where the engine would apply another or a default."""
    decoder = draft.decoder
    there = {kind: [k for k in keys if decoder.get(k) is not None] for kind, keys in _LAYOUT_KEYS.items()}
    found: list[Problem] = []
    ropes = normalise_ropes(
        decoder,
        _rule(decoder.get("model_type")),
        head_dim=_rotated(draft, sizes, row),
        where=f"{draft.where}/config.json",
        problems=found,
    )
    problems += [problem("HS407", where=p.where, got=p.got, expected=p.expected, fix=p.fix) for p in found]
    unread = [k for kind, keys in there.items() if kind not in row.rope_layouts for k in keys]
    if unread and not any(there[kind] for kind in row.rope_layouts):
        got = f"{', '.join(unread)} alone, which {title} does not read: it takes a base of 10000"
        expected = " or ".join(row.rope_layouts)
        fix = "write the config in the layout of Transformers 4 as well"
        problems.append(problem("HS407", where=draft.at(unread[0]), got=got, expected=expected, fix=fix))
    elif not found and not any(there.values()):
        base = ropes[0].theta if ropes else 10_000.0
        got, fix = f"nothing: {title} takes a base of {base:g}", "write rope_theta as the draft was trained"
        where = draft.at(f"{draft.decoder_prefix}rope_theta")
        severity = Severity.WARNING
        problems.append(problem("HS407", where=where, got=got, expected="a stated base", fix=fix, severity=severity))
    _check_partial(draft, row, title, problems)
    return ropes


def max_positions(draft: Draft, problems: list[Problem]) -> int | None:
    """Return ``max_position_embeddings``; HS603 if it is no number above 0."""
    value = draft.decoder.get("max_position_embeddings")
    if value is None:
        return None
    if type(value) is not int or not 0 < value < 2**53:
        where = draft.at(f"{draft.decoder_prefix}max_position_embeddings")
        problems.append(problem("HS603", where=where, got=repr(value)[:100], expected="an integer above 0"))
        return None
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
            where=draft.at(f"{draft.decoder_prefix}max_position_embeddings"),
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


def _rotated(draft: Draft, sizes: DraftSizes, row: DraftRow) -> int:
    if row.attention == "mla":
        value = draft.decoder.get("qk_rope_head_dim")
        return value if type(value) is int and value > 0 else sizes.head_dim
    return sizes.head_dim


def _check_partial(draft: Draft, row: DraftRow, title: str, problems: list[Problem]) -> None:
    """Add HS407 for a share of the head that stands where the engine does not look (speculators#613, #738)."""
    prefix = draft.decoder_prefix
    places = ("rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor", "partial_rotary_factor")
    stated = {p: v for p in places if (v := lookup(draft.decoder, p)) not in (ABSENT, None)}
    if not stated or any(p in row.partial_rotary_keys for p in stated):
        return
    path, value = next(iter(stated.items()))
    if value != 1:
        got = f"{value}, which {title} does not read there: it rotates all dimensions of a head"
        fix = f"write {row.partial_rotary_keys[0]} as well" if row.partial_rotary_keys else None
        expected = f"it at {' or '.join(row.partial_rotary_keys) or 'nowhere'}"
        problems.append(problem("HS407", where=draft.at(f"{prefix}{path}"), got=got, expected=expected, fix=fix))
