"""The form of what is known about an engine: rows of facts, each with the versions it was seen in and its evidence.

A :class:`CaptureRow` is about the target: what number means which depth, and which depths there are. A
:class:`DraftRow` is about the draft: which keys of its folder are read, and what is made of its weights. The tables
(``vllm``, ``sglang``) and the profiles that a probe writes are made of the same rows. Rows are data: what reads them
is ``ids`` and ``inspection``. This module imports ``models`` alone.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hsformat.models import FromList, Frozen

__all__ = ["CaptureRow", "DraftRow", "Evidence", "OptionRule", "Row", "parse_depth"]

Evidence = Literal["ran", "read", "proved"]
"""``ran``: seen by running the engine. ``read``: in its source alone. ``proved``: by the probe, on the version named."""

Texts = Annotated[tuple[str, ...], FromList]

_DEPTH = re.compile(r"(N//2|N)?([+-]?[0-9]+)?\Z")


def parse_depth(text: str, num_layers: int) -> int:
    """Return the depth that an expression of a row stands for.

    Raises
    ------
    ValueError
        The text is not a number, ``N`` or ``N//2``, or one of the two with a number added.

    Examples
    --------
    >>> [parse_depth(t, 61) for t in ("2", "N//2", "N-3", "N")]
    [2, 30, 58, 61]
    """
    m = _DEPTH.match(text)
    if m is None or not text:
        raise ValueError(f"not a depth: {text!r}; expected a number, N, N//2, N-3 or N//2+1")
    base = {None: 0, "N": num_layers, "N//2": num_layers // 2}[m[1]]
    return base + int(m[2] or 0)


class Row(Frozen):
    """What every row has.

    Attributes
    ----------
    versions
        The engine's versions that it was seen in, as its package names them; no other version is concluded from them.
    source
        Where from: files of the engine, or what was run.
    evidence
        How it is known.
    """

    versions: Annotated[tuple[str, ...], Field(min_length=1), FromList]
    source: Annotated[str, Field(min_length=1)]
    evidence: Evidence


class CaptureRow(Row):
    """How an engine numbers and captures the depths of some targets; N is the number of layers.

    Attributes
    ----------
    architectures
        As the first entry of ``architectures`` in the target's config.
    rule
        ``shift``: depth = id + ``shift``, always. ``shift_if_first_is_one``: so only if the first id of the list is 1,
        otherwise depth = id. ``shift_unless_max_is_n``: depth = id if the largest id is N, otherwise id + ``shift``.
    shift
        See ``rule``.
    lowest, deepest
        The captured depths are ``lowest`` to ``deepest`` (an expression: ``N``, ``N-1``), both included. Another id is
        dropped, repeats a layer, or kills the engine.
    default
        Depths that are captured when the draft's config names none, as expressions; empty: the engine refuses.
    order
        ``ascending``: by depth, whatever the list says. ``as_given``: as listed.
    duplicates
        ``once``: a depth that is named twice is captured once, so that fewer slots arrive than ids are listed.
        ``repeated``: it is captured twice.
    norm
        Of depth N: ``none``, before the final norm; ``final``, after it.
    """

    architectures: Annotated[tuple[str, ...], Field(min_length=1), FromList]
    rule: Literal["shift", "shift_if_first_is_one", "shift_unless_max_is_n"]
    shift: int
    lowest: Annotated[int, Field(ge=0)]
    deepest: str
    default: Texts
    order: Literal["ascending", "as_given"]
    duplicates: Literal["once", "repeated"]
    norm: Literal["none", "final"]

    @model_validator(mode="after")
    def _expressions(self) -> Self:
        for text in (self.deepest, *self.default):
            parse_depth(text, 100)
        return self


class OptionRule(Frozen):
    """How an engine reads one option of a draft's config.

    Attributes
    ----------
    keys
        Where it is looked for, dots for nesting; the first that is there counts. Empty: the engine has no such option
        and does what ``default`` says, whatever the config holds.
    default
        When it is nowhere.
    """

    keys: Texts
    default: bool


class DraftRow(Row):
    """What an engine makes of a draft folder.

    Attributes
    ----------
    layout
        ``plain``: config as SafeAILab's and SGLang's (options at the top level or in ``eagle_config``).
        ``speculators``: with ``speculators_model_type`` and ``transformer_layer_config``.
    architectures
        First entry of ``architectures`` in the draft's config.
    id_keys
        Where the layer ids are looked for, dots for nesting; the first that is there and not empty counts.
    ignored_id_keys
        Where configs have them, too, and this engine does not look.
    depth_id_keys
        Those of ``id_keys`` whose numbers are depth - 1 whatever the target's rule is (``dflash_config``).
    count_keys
        Where the number of aux captures that fc takes is looked for: a number, or the length of a list.
    count_default
        That number when it is nowhere.
    norm_before_residual, norm_before_fc, fc_norm, norm_output
        The draft's norms (docs/engines.md says what each does).
    embedding
        ``own``: the draft's where its folder has one, the target's otherwise. ``target``: always the target's.
        ``own_if_other_width``: the draft's only where its width differs from the target's.
    head
        ``own``: the draft's where its folder has one, the target's otherwise. ``own_or_random``: the draft's; without
        one it stays at its random start. ``own_unless_no_draft_vocab``: the draft's if the config has
        ``draft_vocab_size``, the target's otherwise.
    tied_head
        What ``tie_word_embeddings: true`` does: ``ignored``, or ``embedding``: the embedding becomes the head.
    full_vocabulary_map
        Whether a folder without reduced vocabulary may hold ``d2t``.
    single_capture_skips_fc
        With one aux capture of the draft's own width ``fc`` is not applied.
    later_layers_norm
        Which norm stands before the attention of the layers after the first.
    max_layers
        Layers of the draft that are run; null: as many as its config says.
    rope_keys
        Where the rotary embedding is looked for, the first that is there.
    """

    layout: Literal["plain", "speculators"]
    architectures: Annotated[tuple[str, ...], Field(min_length=1), FromList]
    id_keys: Texts
    ignored_id_keys: Texts
    depth_id_keys: Texts
    count_keys: Texts
    count_default: Annotated[int, Field(gt=0)]
    norm_before_residual: OptionRule
    norm_before_fc: OptionRule
    fc_norm: OptionRule
    norm_output: OptionRule
    embedding: Literal["own", "target", "own_if_other_width"]
    head: Literal["own", "own_or_random", "own_unless_no_draft_vocab"]
    tied_head: Literal["ignored", "embedding"]
    full_vocabulary_map: bool
    single_capture_skips_fc: bool
    later_layers_norm: Literal["input_layernorm", "hidden_norm"]
    max_layers: Annotated[int, Field(gt=0)] | None
    rope_keys: Texts
