"""docs/engines.md: what is known of each engine, generated from the tables (``make docs``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hsformat.engines.extraction_table import extracted
from hsformat.engines.options import BIASES
from hsformat.engines.rows import CaptureRow, DraftRow, OptionRule
from hsformat.engines.table import ENGINES, Engine
from hsformat.engines.words import depths_text, rule_text, versions_text

__all__ = ["engine_rows", "engines_document"]

_INTRODUCTION = """# Engines

Generated from `hsformat/engines` by `make docs`. `hsformat engines` prints which ids and targets are known, and
`hsformat engines --format json` every row with its source. What an engine does is known for the versions that a row
names and for no other: another version is HS410, never the nearest guess. `ran`: seen by running the engine. `read`: in
the source of these versions. A newer version is proved where it is installed by `hsformat engines probe`, whose profile
`--engine-profile` takes; what no probe tries (marked †) is taken from the newest row of such drafts.

**depth** d: the residual stream after d decoder layers; N is the number of layers. In all rows captures are fed
ascending by depth, each once, before the final norm, unless a row says otherwise. What the options of a draft do:
`norm_before_residual`: the residual of the first layer is the normed output of `fc`. `norm_before_fc`: one RMSNorm
over the concatenated captures. `fc_norm`: one RMSNorm a capture. `norm_output`: the draft's output is passed to its
next step after the final norm. What a config leaves out, the config class of its `model_type` fills in where a row
says so, and hsformat names it (`hsformat/engines/config_defaults.json`, made with Transformers 5.24.0). A guide with
examples: [guides/serving.md](guides/serving.md).
"""


def engine_rows(engine: Engine) -> list[dict[str, Any]]:
    """Return all that is known of an engine as JSON-able rows: captures, drafts and what is refused."""
    kinds = (("captures", engine.captures), ("draft", engine.drafts), ("unsupported", engine.unsupported))
    return [{"kind": kind, **row.model_dump(mode="json")} for kind, rows in kinds for row in rows]


def engines_document() -> str:
    """Return docs/engines.md."""
    lines = [_INTRODUCTION]
    for engine in ENGINES.values():
        lines += [f"## {engine.title}", "", "### From ids to depths", ""]
        lines += _table(
            ("versions", "target", "ids", "depths captured", "without ids", "known", "source"),
            (_capture(engine, row) for row in engine.captures),
        )
        if engine.unsupported:
            lines += ["", "Refused (HS410):", ""]
            lines += _table(
                ("versions", "target", "reason", "known", "source"),
                (
                    (versions_text(engine.name, r.versions), _join(r.architectures), r.reason, r.evidence, r.source)
                    for r in engine.unsupported
                ),
            )
        if engine.not_run:
            lines += ["", "Tried, and not run on a CPU, so that what is known of it was read:", ""]
            lines += _table(
                ("versions", "what", "reason"),
                ((versions_text(engine.name, r.versions), r.what, r.reason) for r in engine.not_run),
            )
        if engine.drafts:
            lines += ["", "### Drafts", ""]
            for row in engine.drafts:
                lines += [*_draft(engine, row), ""]
        else:
            lines += ["", f"{engine.title} serves no EAGLE-3 drafts.", ""]
        lines += _extraction(engine)
    return "\n".join(lines).rstrip("\n") + "\n"


def _extraction(engine: Engine) -> Iterator[str]:
    ran = [(found, row) for found in extracted(engine.name) for row in found.captures]
    if not ran:
        return
    yield "### Extraction"
    yield ""
    yield "What hsformat's extractor captured when its conformance suite ran; other targets and depths were not run."
    yield ""
    head = ("version", "target", "depths", "N after the norm", "answers", "largest error of a row", "known")
    yield from _table(
        head,
        (
            (
                f"{found.version}, {found.device.upper()}",
                f"{row.architecture}, {row.num_layers} layers, {row.dtype}",
                _ranges(row.depths, row.num_layers),
                "yes" if row.normed else "no",
                "yes" if row.answers else "not run",
                f"{row.worst_relative_error:.1e}" if row.worst_relative_error else "0",
                "ran",
            )
            for found, row in ran
        ),
    )
    yield ""


def _ranges(depths: Sequence[int], num_layers: int) -> str:
    """Return depths with runs joined, N by its name: ``0 to N``, ``1 to 3, 14 to 16, N``."""
    runs: list[list[int]] = []
    for d in depths:
        if runs and d == runs[-1][-1] + 1:
            runs[-1].append(d)
        else:
            runs.append([d])

    def name(d: int) -> str:
        return "N" if d == num_layers else str(d)

    return ", ".join(name(r[0]) if len(r) == 1 else f"{name(r[0])} to {name(r[-1])}" for r in runs)


def _capture(engine: Engine, row: CaptureRow) -> tuple[str, ...]:
    depths = depths_text(row) + ("; depth N after the final norm" if row.norm == "final" else "")
    if row.order == "as_given":
        depths += "; in the order asked for"
    default = f"depths {', '.join(row.default)}" if row.default else "refused"
    return (
        versions_text(engine.name, row.versions), _join(row.architectures), rule_text(row), depths, default,
        row.evidence, row.source,
    )  # fmt: skip


def _draft(engine: Engine, row: DraftRow) -> Iterator[str]:
    yield (
        f"**{versions_text(engine.name, row.versions)}, {row.layout} layout, {_join(row.architectures)}** "
        f"({row.evidence}: {row.source})"
    )
    yield ""
    for reader in row.readers:
        places = ", ".join(f"`{k.path}`" + (f" (+{k.plus})" if k.plus else "") for k in reader.keys)
        yield f"- layer ids{f' ({reader.name})' if reader.name else ''}: {places or 'nowhere'}"
    counted = ", ".join(f"`{k}`" for k in row.count_keys)
    yield f"- captures that `fc` takes: {counted + ', otherwise ' if counted else ''}{row.count_default}"
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", *BIASES):
        yield f"- `{name}`: {_option(getattr(row, name))}"
    yield f"- embedding: {_EMBEDDING[row.embedding]}; head: {_HEAD[row.head]}"
    yield f"- `tie_word_embeddings: true`: {_TIED[row.tied_head]}"
    whole = "may be there" if row.full_vocabulary_map else "makes it fail to load"
    yield f"- `d2t` (offsets) beside a whole vocabulary: {whole}"
    layers = "any number" if row.max_layers is None else f"at most {row.max_layers}"
    yield f"- layers: {layers}; later ones begin with `{row.later_layers_norm}`; attention as {row.attention}"
    if row.single_capture_skips_fc:
        yield "- captures that are together as wide as the draft: `fc` is left out"
    prefixes = " or ".join(f"`{p}`" for p in row.weight_prefixes if p)
    names = " or ".join(f"`{n}`" for n in row.layer_names)
    prefixed = f"may begin with {prefixes}; " if prefixes else ""
    yield f"- weights: {prefixed}the first layer is {names}; other names are {row.unknown_weights}"
    partial = ", ".join(f"`{k}`" for k in row.partial_rotary_keys)
    ropes = ", ".join(f"`{k}`" for k in row.rope_layouts)
    yield f"- rotary embedding: {ropes}; share of a head: {partial}"
    yield from _loading(row)
    for reader in row.readers:
        name = f" ({reader.name})" if reader.name else ""
        yield f"- positions beyond the draft's `max_position_embeddings`{name}: {_POSITIONS[reader.positions]}"


def _loading(row: DraftRow) -> Iterator[str]:
    loads = row.loads
    for hidden in loads.hidden_keys:
        if any(hidden.path in (k.path for k in reader.keys) for reader in row.readers if reader.name == hidden.reader):
            yield f"- † `{hidden.path}` ({hidden.reader}): forgotten where `{hidden.by}` is an object that is not empty"
    yield f"- † an empty list of ids: {'as none' if loads.empty_ids == 'absent' else 'nothing is captured'}"
    null = "as if it were not there" if loads.null_target_width == "absent" else "fails"
    yield f"- † `target_hidden_size: null`: {null}; no `draft_vocab_size`: {_NO_VOCABULARY[loads.no_draft_vocab]}"
    width = "`intermediate_size`"
    if loads.mlp_width == "llama4":
        width += ", `intermediate_size_mlp` where `model_type` is `llama4_text`"
    yield f"- † width of the MLP: {width}"
    if row.attention == "mla":
        yield f"- † no `q_lora_rank`: {'refused' if loads.query_rank == 'needed' else 'one projection of queries'}"
    yield f"- † the vocabulary map: {_MAP_NAMES[loads.map_name]}"
    if loads.other_names:
        yield f"- † older names: {', '.join(f'`{o}` for `{n}`' for n, o in loads.other_names.items())}"
    if loads.skipped:
        yield f"- † left out with a warning: {', '.join(f'`{s}`' for s in loads.skipped)}"
    filled = "filled in by the config class of `model_type`" if loads.config_class else "filled in by nothing"
    needed = f"; needed: {', '.join(f'`{k}`' for k in loads.needed)}" if loads.needed else ""
    yield f"- † keys that are not stated: {filled}{needed}"
    yield f"- † source: {loads.source}"


_NO_VOCABULARY = {"null": "as null", "fails": "fails"}
_MAP_NAMES = {
    "d2t": "`d2t`; another name that holds it makes the engine fail",
    "part": "`d2t`, or a name that ends with `.d2t`",
    "anywhere": "any name that holds `d2t`",
}
_POSITIONS = {
    "drafted": "drafted as the others",
    "not_drafted": "nothing is drafted",
    "refused": "a draft whose number is below the target's context is refused at the start",
    "past_table": "read past the end of the table of sines and cosines",
}
_EMBEDDING = {
    "own": "the draft's where its folder has one, otherwise the target's",
    "target": "the target's",
    "own_if_other_width": "the target's, unless `target_hidden_size` is stated and differs from `hidden_size`",
}
_HEAD = {
    "own": "the draft's where its folder has one, otherwise the target's",
    "own_unless_no_draft_vocab": "the draft's; with `draft_vocab_size: null` head and embedding are the "
    "target's, whatever their width",
}
_TIED = {"ignored": "ignored", "embedding": "the embedding, which is the target's, becomes the draft's head"}


def _option(rule: OptionRule) -> str:
    default = str(rule.default).lower()
    if not rule.keys:
        return f"always {default}"
    either = " or " if rule.combine == "any" else ", then "
    return f"{either.join(f'`{k}`' for k in rule.keys)}; {default} without"


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(c.replace('|', chr(92) + '|') for c in row)} |" for row in rows]


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)
