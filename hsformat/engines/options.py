"""The options of a draft: what its config asks for, and what an engine applies.

An option that is asked for where the engine does not look, or that it does not have, is a norm on one side alone
(HS405); so is a norm whose weights are in the folder and which is off. May import ``drafts`` and ``sizes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hsformat.engines.drafts import ABSENT, INNER, Draft, lookup
from hsformat.engines.filled import attribute, class_of, named
from hsformat.engines.rows import DraftRow, OptionRule
from hsformat.engines.sizes import DraftSizes
from hsformat.problems import Problem, Severity, problem

__all__ = [
    "BIASES", "NORMS", "DraftOptions", "check_layers", "check_sections", "norm_weight_owner", "read_options",
]  # fmt: skip

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BIASES = ("attention_bias", "output_bias", "mlp_bias", "fc_bias")

_OTHER_NAMES = {"fc_norm": ("use_aux_norm",)}
_MEANING = {
    "norm_before_residual": "the residual of the first layer is the normed output of fc",
    "norm_before_fc": "one RMSNorm over the concatenated captures",
    "fc_norm": "one RMSNorm a capture",
    "norm_output": "the draft's output is passed to its next step after the final norm",
}
_WEIGHTS = {
    "norm_before_fc": ("input_norm.",),
    "fc_norm": ("fc_norm.", "aux_norm_low", "aux_norm_mid", "aux_norm_high"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What an engine applies; the norms are those of :class:`hsformat.layout.ServingLayout`."""

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    fc_bias: bool


def read_options(draft: Draft, row: DraftRow, title: str, problems: list[Problem]) -> DraftOptions:
    """Return what the engine applies; HS405 and HS603 are added to ``problems``."""
    applied = {name: _read(draft, row, getattr(row, name), problems) for name in (*NORMS, *BIASES)}
    for path in (path for name in NORMS for path in _places(name)):  # also where this engine does not look
        value = lookup(draft.config, path)
        if value is not ABSENT and value is not None and not isinstance(value, bool):
            _add(_not_boolean(draft, path, value), problems)
    for name in NORMS:
        rule: OptionRule = getattr(row, name)
        asked = [path for path in _places(name) if lookup(draft.config, path) is True]
        nulls = [key for key in rule.keys if rule.default and lookup(draft.config, key) is None]
        if nulls:
            got = f"null, which {title} takes for false; left out it is true ({_MEANING[name]})"
            fix = f"write {nulls[0]}: true, or false, as the draft was trained"
            problems.append(_mismatch(draft.at(nulls[0]), got, "true or false", fix, Severity.WARNING))
        if asked and not applied[name]:
            looks = f"it looks at {', '.join(rule.keys)}" if rule.keys else "it has no such option"
            fix = (
                f"write {rule.keys[0]}: true"
                if rule.keys
                else "train with it false, or serve with an engine that has it"
            )
            problems.append(_mismatch(draft.at(asked[0]), f"true: {_MEANING[name]}", f"false: {title} ({looks})", fix))
        elif (
            applied[name] and not asked and rule.keys and not _stated(draft, rule)
        ):  # no keys: a custom layout states it
            key = rule.keys[-1]
            got = f"nothing: {title} applies it by its own default in this layout ({_MEANING[name]})"
            fix = f"write {key}: true, or false, as the draft was trained"
            where = draft.at(key)
            problems.append(_mismatch(where, got, "a stated value", fix, Severity.WARNING))
    for name, parts in _WEIGHTS.items():
        weights = [w for w in draft.shapes or () if any(part in w for part in parts)]
        if weights and not applied[name] and not any(lookup(draft.config, path) is True for path in _places(name)):
            stated = f"write {name}: true if the draft was trained with it" if getattr(row, name).keys else None
            got = f"{', '.join(sorted(weights)[:3])} in the folder"
            problems.append(_mismatch(draft.at(name), got, f"no such norm: {title} does not apply it", stated))
    return DraftOptions(**applied)


def check_layers(draft: Draft, sizes: DraftSizes, row: DraftRow, title: str, problems: list[Problem]) -> None:
    """Add HS410 for more layers than the engine runs, and a note on how it runs more than one."""
    where = draft.at(f"{draft.decoder_prefix}num_hidden_layers")
    if row.max_layers is not None and sizes.num_layers > row.max_layers:
        fix = f"{title} refuses it when it loads the draft: use a newer version, or a draft of {row.max_layers} layer"
        expected = f"at most {row.max_layers}"
        problems.append(problem("HS410", where=where, got=sizes.num_layers, expected=expected, fix=fix))
    elif sizes.num_layers > 1:
        got = f"{sizes.num_layers} layers: {title} norms before the later ones with {row.later_layers_norm}"
        fix = "train it so; engines differ, so that no folder of more than one layer means the same to all"
        expected = "one layer, which all engines run alike"
        problems.append(_mismatch(where, got, expected, fix, Severity.NOTE))


def check_sections(draft: Draft, problems: list[Problem]) -> None:
    """Add HS603 for an ``eagle_config`` that is no object, and HS410 for a draft that is fed no aux captures.

    Engines ask ``eagle_config or {}`` and then for its keys, and take ``use_aux_hidden_state`` by its truth.
    """
    section = draft.decoder.get("eagle_config")
    place = draft.at(f"{draft.decoder_prefix}eagle_config")
    if not isinstance(section, dict):
        if section:
            fix = "engines fail to load the draft: leave it out, or write an object"
            got, expected = repr(section)[:100], "an object, or no such field"
            problems.append(problem("HS603", where=place, got=got, expected=expected, fix=fix))
        return
    use_aux = section.get("use_aux_hidden_state", True)
    where = f"{place}.use_aux_hidden_state"
    if not use_aux:
        fix = "hsformat knows drafts that are fed aux captures alone (EAGLE-3)"
        got = "null" if use_aux is None else repr(use_aux).lower()
        problems.append(problem("HS410", where=where, got=got, expected="true, or nothing", fix=fix))
    elif use_aux is not True:
        fix = "engines take any text and any other number for true"
        problems.append(problem("HS603", where=where, got=repr(use_aux)[:100], expected="true or false", fix=fix))


def norm_weight_owner(name: str) -> str | None:
    """Return the option that a weight of this name belongs to."""
    return next((option for option, parts in _WEIGHTS.items() if any(part in name for part in parts)), None)


def _read(draft: Draft, row: DraftRow, rule: OptionRule, problems: list[Problem]) -> bool:
    values = []
    cls = class_of(draft, row)
    for path in rule.keys:
        value = lookup(draft.config, path)
        if value is ABSENT and draft.layout == "plain":
            found = attribute(draft, path, row)
            value = found.value
            if value is True and (warning := named(draft, path, found, "HS603")) not in problems:
                problems.append(warning)
        if value is ABSENT:
            continue
        refused = value is None and cls is not None and path in cls.defaults and path not in cls.null
        if refused or (value is not None and not isinstance(value, bool)):
            _add(_not_boolean(draft, path, value), problems)
        values.append(bool(value))
    if not values:
        return rule.default
    return any(values) if rule.combine == "any" else values[0]


def _not_boolean(draft: Draft, path: str, value: object) -> Problem:
    fix = "write true or false: engines take any text and any other number for true"
    got = "null" if value is None else repr(value)[:100]
    return problem("HS603", where=draft.at(path), got=got, expected="true or false", fix=fix)


def _stated(draft: Draft, rule: OptionRule) -> bool:
    """Return whether an option has a value where the engine looks, be it a wrong one."""
    return any(lookup(draft.config, path) not in (ABSENT, None) for path in rule.keys)


def _add(found: Problem, problems: list[Problem]) -> None:
    if found not in problems:
        problems.append(found)


def _places(name: str) -> Iterable[str]:
    for key in (name, *_OTHER_NAMES.get(name, ())):
        yield from (key, f"eagle_config.{key}", f"{INNER}.{key}")


def _mismatch(where: str, got: str, expected: str, fix: str | None, severity: Severity | None = None) -> Problem:
    return problem("HS405", where=where, got=got, expected=expected, fix=fix, severity=severity)
