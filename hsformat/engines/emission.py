"""The config keys of a draft that make an engine do what the draft was trained for, or why no keys can.

What is emitted is read back by the code that inspects drafts before it is given out: a draft that would be fed anything
else is refused, not written. May import everything of ``engines`` but ``inspection`` and ``words``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from hsformat.engines.drafts import draft_of
from hsformat.engines.fc_inputs import check_skipped_fc, fc_captures
from hsformat.engines.ids import capturable, fed, ids_of
from hsformat.engines.layer_ids import FedBy, fed_depths, shared_key
from hsformat.engines.options import NORMS, read_options
from hsformat.engines.profile import EngineProfile
from hsformat.engines.rows import CaptureRow, DraftRow, OptionRule, parse_depth
from hsformat.engines.sizes import read_sizes
from hsformat.engines.table import ENGINES, capture_row, draft_row, engine_of
from hsformat.layout import AuxInput, parse_capture_key
from hsformat.models import Frozen
from hsformat.problems import HsError, Problem, Severity, problem

__all__ = ["DraftConfig", "emit", "emit_for"]

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""The one name of a draft's class that both engines load."""

Aux = Sequence[str | AuxInput]

_LEFT_OUT: Final = {
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "intermediate_size": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1,
}  # fmt: skip


class DraftConfig(Frozen):
    """What a draft is, and what it was trained with.

    Attributes
    ----------
    hidden_size, target_hidden_size, num_layers
        The draft's width, that of a capture, and the draft's layers.
    vocab_size, draft_vocab_size
        Of the target, and rows of the draft's head.
    norm_before_residual, norm_before_fc, fc_norm, norm_output
        As in :class:`hsformat.layout.ServingLayout`.
    embedding, head
        ``draft``: trained, and stored with the draft. ``target``: the target's.
    """

    hidden_size: Annotated[int, Field(gt=0)]
    target_hidden_size: Annotated[int, Field(gt=0)]
    num_layers: Annotated[int, Field(gt=0)]
    vocab_size: Annotated[int, Field(gt=0)]
    draft_vocab_size: Annotated[int, Field(gt=0)]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    embedding: Literal["draft", "target"]
    head: Literal["draft", "target"]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        if self.head == "target" and self.draft_vocab_size != self.vocab_size:
            raise ValueError("the target's head has the target's vocabulary: draft_vocab_size must be vocab_size")
        if "target" in (self.embedding, self.head) and self.hidden_size != self.target_hidden_size:
            raise ValueError("the target's embedding and head fit a draft of the target's width alone")
        return self


def emit(
    aux: Aux,
    config: DraftConfig,
    *,
    engine: str,
    version: str,
    architecture: str,
    num_layers: int,
    profile: EngineProfile | None = None,
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Return config keys with which an engine does what a draft was trained for, or None and why there are none.

    Parameters
    ----------
    aux
        What the draft was fed in training, in order: keys (``d15``) or inputs.
    config
        What it was trained with.
    engine, version
        That will serve it.
    architecture, num_layers
        Of the target.
    profile
        What the probe proved of the version.

    Returns
    -------
    The keys, to be merged into the draft's ``config.json``, and problems: HS304, HS401, HS402, HS404, HS405, HS410,
    HS412, HS603.
    """
    return emit_for(aux, config, {engine: version}, architecture=architecture, num_layers=num_layers, profile=profile)


def emit_for(
    aux: Aux,
    config: DraftConfig,
    engines: Mapping[str, str],
    *,
    architecture: str,
    num_layers: int,
    profile: EngineProfile | None = None,
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Return config keys with which every one of several engines does the same, where such a folder can be written.

    Parameters
    ----------
    engines
        Versions by engine. The others are as of :func:`emit`.
    """
    problems: list[Problem] = []
    if type(num_layers) is not int or not 0 < num_layers < 2**31:
        fix = "give the target's num_hidden_layers"
        got, expected = repr(num_layers)[:100], "an integer from 1 to 2147483647"
        return None, [problem("HS603", where="num_layers", got=got, expected=expected, fix=fix)]
    inputs = _inputs(aux, num_layers, problems)
    if not engines:
        fix = "name the engines that will serve the draft, with their versions"
        problems.append(problem("HS410", where="engines", got="none", expected="one or more", fix=fix))
    rows: dict[str, tuple[CaptureRow, DraftRow]] = {}
    for engine, version in engines.items():
        try:
            engine_of(engine, serving=True)
            found = capture_row(engine, version, architecture, profile)
            rows[engine] = (found, draft_row(engine, version, "plain", ARCHITECTURE, profile))
        except HsError as e:
            problems += e.problems
    if problems:
        return None, problems
    keys: dict[str, Any] = {}
    for engine, (captures, row) in rows.items():
        title = ENGINES[engine].title
        _merge(keys, _sizes(config, row, title, problems))
        _merge(keys, _layers(inputs, captures, row, num_layers, title, problems))
        _merge(keys, _norms(config, row, title, problems))
    if config.num_layers > 1 and len({row.later_layers_norm for _, row in rows.values()}) > 1:
        ways = "; ".join(f"{ENGINES[e].title}: {row.later_layers_norm}" for e, (_, row) in rows.items())
        fix = "use one layer, or write a folder for one engine"
        expected = "the same norm before the later layers in every engine"
        problems.append(problem("HS405", where="num_hidden_layers", got=ways, expected=expected, fix=fix))
    if not problems:
        for engine, (captures, row) in rows.items():
            by = FedBy(
                engine=engine, version=engines[engine], row=row, captures=captures, architecture=architecture,
                num_layers=num_layers, profile=profile, versions=engines,
            )  # fmt: skip
            back = _read_back(keys, inputs, config, by)
            problems += [p for p in back if p not in problems]  # of sizes, what is wrong for one is for all
    return (None, problems) if problems else (keys, [])


def _inputs(aux: Sequence[object], num_layers: int, problems: list[Problem]) -> list[AuxInput]:
    out = []
    for i, given in enumerate(aux):
        where = f"aux[{i}]"
        if isinstance(given, AuxInput):
            x = AuxInput(depth=given.depth, norm=given.norm)
        elif not isinstance(given, str):
            expected, fix = (
                "the key of a capture: d15, or d30n after the final norm",
                "name depths, not an engine's ids",
            )
            problems.append(problem("HS304", where=where, got=repr(given)[:100], expected=expected, fix=fix))
            continue
        else:
            try:
                depth, normed = parse_capture_key(given)
            except ValueError as e:
                problems.append(problem("HS304", where=where, got=repr(given)[:100], expected=str(e)))
                continue
            x = AuxInput(depth=depth, norm="final" if normed else "none")
        if x.depth > num_layers or (x.norm == "final" and x.depth != num_layers):
            expected = f"depths 0 to {num_layers}, the final norm at {num_layers} alone"
            problems.append(problem("HS304", where=where, got=x.key, expected=expected))
        out.append(x)
    if not aux:
        problems.append(problem("HS402", where="aux", got="no captures", expected="one or more"))
    return out


def _layers(
    inputs: Sequence[AuxInput],
    captures: CaptureRow,
    row: DraftRow,
    num_layers: int,
    title: str,
    problems: list[Problem],
) -> dict[str, Any]:
    depths = [x.depth for x in inputs]
    before = len(problems)
    for x in inputs:
        if x.norm == "final" and captures.norm != "final":
            fix = f"train on d{x.depth}: {title} captures before the final norm"
            problems.append(problem("HS405", where="aux", got=x.key, expected=f"d{x.depth}", fix=fix))
        if not capturable(captures, x.depth, num_layers):
            expected = (
                f"depths {captures.lowest} to {parse_depth(captures.deepest, num_layers)}, which {title} captures"
            )
            problems.append(problem("HS304", where="aux", got=x.key, expected=expected))
    arrives = fed(captures, depths)
    if arrives != depths:
        fix = "train with this order, each layer once"
        expected = f"{_shown(arrives)}, as {title} feeds them whatever the order of the list"
        problems.append(problem("HS401", where="aux", got=_shown(depths), expected=expected, fix=fix))
    if len(problems) > before:
        return {}
    ids = ids_of(captures, depths, num_layers)
    if ids is None:
        fix = "train with other depths: no list of ids stands for these"
        expected = f"depths that a list of ids can stand for ({captures.rule.replace('_', ' ')})"
        problems.append(problem("HS401", where="aux", got=_shown(depths), expected=f"{expected} in {title}", fix=fix))
        return {}
    key = shared_key(row)
    if key is None:
        raise ValueError(f"a row of {title} whose readers have no place in common")  # a defect of the tables
    out: dict[str, Any] = {}
    section, _, name = key.path.rpartition(".")
    listed: dict[str, Any] = {name: [i - key.plus for i in ids]}
    out |= {section: {**listed, "use_aux_hidden_state": True}} if section else listed
    if "num_aux_hidden_states" in row.count_keys:
        out["num_aux_hidden_states"] = len(ids)
    elif len(ids) != row.count_default and key.path not in row.count_keys:
        fix = f"train with {row.count_default} captures, or serve with a newer version"
        expected = f"{row.count_default}, for which {title} makes fc whatever the config says"
        problems.append(problem("HS402", where="aux", got=len(ids), expected=expected, fix=fix))
    return out


def _norms(config: DraftConfig, row: DraftRow, title: str, problems: list[Problem]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in NORMS:
        rule: OptionRule = getattr(row, name)
        wanted: bool = getattr(config, name)
        if rule.keys:
            out[min(rule.keys, key=lambda k: k.count("."))] = wanted
        elif wanted != rule.default:
            fix = f"train with {name} {str(rule.default).lower()}, or serve with an engine that has the option"
            expected = f"{str(rule.default).lower()}: {title} has no such option"
            problems.append(problem("HS405", where=name, got=str(wanted).lower(), expected=expected, fix=fix))
    return out


def _sizes(config: DraftConfig, row: DraftRow, title: str, problems: list[Problem]) -> dict[str, Any]:
    same = config.hidden_size == config.target_hidden_size
    if row.max_layers is not None and config.num_layers > row.max_layers:
        expected = f"at most {row.max_layers}, which {title} runs"
        problems.append(problem("HS410", where="num_layers", got=config.num_layers, expected=expected))
    keeps = row.embedding == "own" or (row.embedding == "own_if_other_width" and not same)
    if config.embedding == "draft" and not keeps:
        fix = "freeze the embedding when training, or serve with an engine that keeps it"
        expected = f"the target's, which {title} puts in its place"
        problems.append(
            problem("HS412", where="embedding", got="an embedding of the draft's own", expected=expected, fix=fix)
        )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": None if config.head == "target" else config.draft_vocab_size,
        "tie_word_embeddings": False,
    }


def _read_back(
    keys: Mapping[str, Any],
    inputs: Sequence[AuxInput],
    config: DraftConfig,
    by: FedBy,
) -> list[Problem]:
    """Return what an engine would do otherwise with the keys of all engines together."""
    problems: list[Problem] = []
    draft = draft_of(keys, where="the config that would be written", problems=problems)
    title, row = by.title, by.row
    if draft is None:
        return problems
    found = fed_depths(draft, by, problems)
    options = read_options(draft, row, title, problems)
    captures = fc_captures(draft, row, found, title, problems)
    # What the keys leave to the draft's writer is filled in: sizes that are read and are not emitted.
    whole = draft_of({**_LEFT_OUT, **keys}, where=draft.where, problems=problems)
    sizes = None if whole is None else read_sizes(whole, problems, row)
    wanted = tuple(x.depth for x in inputs)
    if not problems and found.depths != wanted:
        got, expected = _shown(found.depths or ()), _shown(wanted)
        fix = "write a folder for one engine: the keys that the engines need contradict each other"
        problems.append(problem("HS404", where=f"{title}: aux", got=got, expected=expected, fix=fix))
    for name in NORMS:
        if (applied := getattr(options, name)) != (asked := getattr(config, name)) and not problems:
            problems.append(problem("HS405", where=f"{title}: {name}", got=applied, expected=asked))
    if sizes is not None:
        problems += check_skipped_fc(draft, sizes, row, captures, title)
    fix = "train with numbers in this range: a draft with others is refused when it is inspected"
    return [replace(p, fix=fix) if p.code == "HS603" else p for p in problems if p.severity is Severity.ERROR]


def _merge(keys: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(keys.setdefault(key, {}), value)
        else:
            keys[key] = value


def _shown(depths: Sequence[int]) -> str:
    return f"[{', '.join(f'd{d}' for d in depths)}]"
