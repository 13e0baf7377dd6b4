"""Serving layouts and rows in plain words, for people. Pure functions; may import ``layout``, ``rows``, ``table``."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import Version

from hsformat.engines.rows import CaptureRow
from hsformat.engines.table import ENGINES, known_versions
from hsformat.layout import AuxInput, ServingLayout

__all__ = [
    "aux_text", "columns", "depths_text", "layout_lines", "rule_text", "serving_engines", "versions_text",
]  # fmt: skip


def aux_text(a: AuxInput, num_layers: int) -> str:
    """Say what a draft is fed.

    Examples
    --------
    >>> aux_text(AuxInput(depth=15, norm="none"), 30)
    'output of block 14 (0-based), residual after 15 of 30 layers'
    """
    if a.depth == 0:
        return "embedding output, the input of block 0 (0-based)"
    block = f"output of block {a.depth - 1} (0-based)"
    if a.depth < num_layers:
        return f"{block}, residual after {a.depth} of {num_layers} layers"
    return f"{block}, the last, {'after' if a.norm == 'final' else 'before'} the final norm"


def layout_lines(layout: ServingLayout) -> list[str]:
    """Return a serving layout as lines of text, without its title."""
    n = len(layout.aux)
    rows = [[str(i + 1), a.key, aux_text(a, layout.num_layers)] for i, a in enumerate(layout.aux)]
    norms = [
        f"residual of the first layer {'normed' if layout.norm_before_residual else 'not normed'}",
        f"{'one' if layout.norm_before_fc else 'no'} norm over all captures before fc",
        "a norm a capture before fc" if layout.fc_norm else "no norm a capture",
        f"the draft's output is passed on {'after' if layout.norm_output else 'before'} its final norm",
        f"epsilon {'not known' if layout.rms_norm_eps is None else f'{layout.rms_norm_eps:g}'}",
    ]
    if layout.later_layers_norm:
        norms.append(f"later layers begin with {layout.later_layers_norm}")
    vocabulary = f"{layout.draft_vocab_size} of {layout.vocab_size} ids"
    if layout.vocab_map == "unknown":
        vocabulary += ", by a map that cannot be read"
    elif layout.vocab_map is not None:
        vocabulary += f", map {layout.vocab_map}"
    ropes = [
        f"{r.kind}, base {r.theta:g}, {r.rotary_dim} dimensions"
        + "".join(f", {k} {v}" for k, v in sorted(r.parameters.items()))
        for r in layout.rope
    ]
    limit = "no limit stated" if layout.max_positions is None else f"{layout.max_positions} positions"
    s = layout.shift
    return [
        "  aux inputs, in the order in which fc concatenates them",
        *(f"    {line}" for line in columns(rows)),
        f"  fc          {n} x {layout.target_hidden_size} to {layout.hidden_size}",
        f"  norms       {'; '.join(norms)}",
        f"  draft       {layout.num_draft_layers} layer{'s' if layout.num_draft_layers > 1 else ''}; "
        f"{_owned(layout.embedding, 'embedding')}, {_owned(layout.head, 'head')}",
        f"  vocabulary  {vocabulary}",
        f"  rope        {'; '.join(ropes) or 'none'}; {limit}",
        f"  shift       at training index t: h[t], token t{s.token:+d}, position t{s.position:+d}, target "
        f"t{s.target:+d}",
    ]


def _owned(owner: str, what: str) -> str:
    return (
        f"the draft's {what} or the target's: its weights cannot be read"
        if owner == "unknown"
        else f"the {owner}'s {what}"
    )


def rule_text(row: CaptureRow) -> str:
    """Say what an id means: ``depth = id + 1``."""
    moved = "depth = id" + (f" + {row.shift}" if row.shift else "")
    return {
        "shift": moved,
        "shift_if_first_is_one": f"{moved} if the first id is 1, otherwise depth = id",
        "shift_unless_max_is_n": f"depth = id if the largest id is N, otherwise {moved}",
    }[row.rule]


def depths_text(row: CaptureRow) -> str:
    """Say which depths are captured, and what is filled in: ``1 to N-1``."""
    return f"{row.lowest} to {row.deepest}"


def versions_text(engine: str, versions: Sequence[str]) -> str:
    """Return versions for people: a run of all known ones in between as its ends."""
    known = known_versions(engine)
    ordered = sorted(versions, key=Version)
    first, last = known.index(ordered[0]), known.index(ordered[-1])
    if len(ordered) > 3 and list(known[first : last + 1]) == ordered:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(ordered)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns are aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def serving_engines() -> tuple[str, ...]:
    """Return the engines that serve drafts."""
    return tuple(name for name, engine in ENGINES.items() if engine.drafts)
