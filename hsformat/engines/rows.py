"""The form of what is known about an engine: rows of facts, each with the versions it was seen in and its evidence.

A :class:`CaptureRow` is about the target: what number means which depth, and which depths there are. A
:class:`DraftRow` is about the draft: which keys of its folder are read, and what is made of its weights. The tables
(``vllm``, ``sglang``) and the profiles that a probe writes are made of the same rows. Rows are data: what reads them
is ``ids`` and ``inspection``. This module may import ``models`` and ``layout``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hsformat.layout import Shift
from hsformat.models import FromList, Frozen

__all__ = [
    "CaptureRow", "DraftRow", "Evidence", "HiddenKey", "IdKey", "IdReader", "Loading", "NotRun", "OptionRule", "Row",
    "Unsupported", "parse_depth",
]  # fmt: skip

Evidence = Literal["ran", "read", "proved"]
"""``ran``: seen by running the engine. ``read``: in its source alone. ``proved``: by the probe, on that version."""

Texts = Annotated[tuple[str, ...], FromList]

_SIZES_TRIED = (1, 2, 100)
"""Numbers of layers that tell whether an expression can go beyond N, as every plain number does somewhere."""

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
        if any(parse_depth(self.deepest, n) > n for n in _SIZES_TRIED):
            raise ValueError(f"deepest {self.deepest!r} is beyond the last layer, N")
        return self


class OptionRule(Frozen):
    """How an engine reads one option of a draft's config.

    Attributes
    ----------
    keys
        Where it is looked for, dots for nesting. Empty: the engine has no such option and does what ``default`` says,
        whatever the config holds.
    combine
        ``first``: the first that is there counts. ``any``: it is on if one of them is.
    default
        When it is nowhere.
    """

    keys: Texts
    combine: Literal["first", "any"]
    default: bool


class Unsupported(Row):
    """Targets that an engine captures something else of than the residual stream: refused, with the reason."""

    architectures: Annotated[tuple[str, ...], Field(min_length=1), FromList]
    reason: Annotated[str, Field(min_length=1)]


class NotRun(Frozen):
    """Something of an engine that was tried and does not run on a CPU, so that no row about it can say ``ran``.

    Attributes
    ----------
    versions
        Of the engine, that were tried.
    what
        In words: targets, or a part of the engine.
    reason
        What it says or lacks.
    """

    versions: Annotated[tuple[str, ...], Field(min_length=1), FromList]
    what: Annotated[str, Field(min_length=1)]
    reason: Annotated[str, Field(min_length=1)]


class IdKey(Frozen):
    """A place of layer ids in a draft's config: dots for nesting; ``plus`` is added to each number found there."""

    path: str
    plus: int


class IdReader(Frozen):
    """A part of an engine that looks for layer ids, of which one runs at a time.

    Attributes
    ----------
    name
        As its people call it; empty: the engine has one.
    keys
        Where it looks; the first that is there and not empty counts.
    positions
        What it does with a draft at positions from the ``max_position_embeddings`` of the draft's config on, where
        the target goes further. ``drafted``: as before, the table of sines and cosines being made as long as the
        target's context. ``not_drafted``: it runs without the draft as soon as a sequence and the tokens to be drafted
        do not fit. ``refused``: it does not start, unless its user limits the context or overrides the check, and
        then drafts as before. ``past_table``: it reads past the end of a table of that size.
    """

    name: str
    keys: Annotated[tuple[IdKey, ...], FromList]
    positions: Literal["drafted", "not_drafted", "refused", "past_table"]


class HiddenKey(Frozen):
    """A place of layer ids that a reader forgets again where another key, ``by``, is an object that is not empty."""

    reader: str
    path: str
    by: str


class Loading(Frozen):
    """What an engine makes of a draft's config and weights in the cases that the probe does not try.

    Attributes
    ----------
    mlp_width
        Where the width of the MLP stands. ``intermediate_size``; ``llama4``: ``intermediate_size_mlp`` where the
        ``model_type`` is ``llama4_text``, otherwise ``intermediate_size``.
    null_target_width
        ``target_hidden_size: null``. ``absent``: as if it were not there. ``fails``: the engine multiplies by null.
    no_draft_vocab
        No ``draft_vocab_size``. ``null``: as null. ``fails``: the engine does not load the draft.
    empty_ids
        An empty list of layer ids. ``absent``: as if it were not there. ``nothing``: nothing is captured.
    hidden_keys
        Places of layer ids that a reader forgets again.
    map_name
        Which tensor is the vocabulary map. ``d2t``: that of this name, and another one whose name holds it makes the
        engine fail. ``part``: one whose name is ``d2t`` or ends with ``.d2t``. ``anywhere``: one whose name holds it.
    other_names
        Older parts of weights' names by the part that they stand for.
    skipped
        Parts of names of weights that are left out with a warning.
    query_rank
        Of latent attention: ``any``: without ``q_lora_rank`` queries have one projection. ``needed``: it is refused.
    config_class
        Whether the config is read by the class of its ``model_type``, which fills in constants (``filled``).
    needed
        Keys of the decoder without which the engine fails, where no class fills them in.
    source
        Where from.
    """

    mlp_width: Literal["intermediate_size", "llama4"]
    null_target_width: Literal["absent", "fails"]
    no_draft_vocab: Literal["null", "fails"]
    empty_ids: Literal["absent", "nothing"]
    hidden_keys: Annotated[tuple[HiddenKey, ...], FromList]
    map_name: Literal["d2t", "part", "anywhere"]
    other_names: dict[str, str]
    skipped: Texts
    query_rank: Literal["any", "needed"]
    config_class: bool
    needed: Texts
    source: Annotated[str, Field(min_length=1)]


class DraftRow(Row):
    """What an engine makes of a draft folder.

    Attributes
    ----------
    layout
        ``plain``: config as SafeAILab's and SGLang's (options at the top level or in ``eagle_config``).
        ``speculators``: with ``speculators_model_type`` and ``transformer_layer_config``.
    architectures
        First entry of ``architectures`` in the draft's config (of the speculators layout: ``model_type`` of its
        ``transformer_layer_config``).
    attention
        ``llama``: q, k, v and o projections. ``qwen3``: these, and norms of q and k. ``mla``: latent, as DeepSeek's.
    readers
        Who looks for layer ids; the first is what runs by default. Where they disagree, the folder is ambiguous.
    count_keys, count_default
        Where the number of aux captures that ``fc`` takes is looked for (a number, or a list that is counted), and
        that number when it is nowhere.
    norm_before_residual, norm_before_fc, fc_norm, norm_output
        The draft's norms: the residual of the first layer is the normed ``fc`` output; one RMSNorm over the
        concatenated captures; one RMSNorm a capture; the draft's own output is passed on after its final norm.
    attention_bias, output_bias, mlp_bias, fc_bias
        Whether q, k and v, ``o_proj``, the MLP's projections and ``fc`` have a bias.
    embedding
        ``own``: the draft's where its folder has one, the target's otherwise. ``target``: always the target's.
        ``own_if_other_width``: the draft's only where ``target_hidden_size`` is stated and differs from its width.
    head
        ``own``: the draft's where its folder has one, the target's otherwise. ``own_unless_no_draft_vocab``: the
        target's if ``draft_vocab_size`` is null; otherwise the draft's, left at its random start if there is none.
    tied_head
        What ``tie_word_embeddings: true`` does: ``ignored``, or ``embedding``: the embedding becomes the head.
    full_vocabulary_map
        Whether a folder without reduced vocabulary may hold ``d2t``.
    single_capture_skips_fc
        With one aux capture of the draft's own width ``fc`` is not applied.
    max_layers
        Layers of the draft that can be run; null: any number.
    later_layers_norm
        Which norm stands before the attention of the layers after the first.
    weight_prefixes, layer_names
        What may stand before a weight's name, and how the first layer may be called.
    unknown_weights
        What happens to a weight of another name: ``dropped`` without a word, or ``refused``.
    rope_layouts
        Configs whose rotary embedding it reads: ``rope_theta`` (as Transformers 4 writes), ``rope_parameters`` (5).
    partial_rotary_keys
        Where it looks for the share of a head's dimensions that is rotated, dots for nesting.
    shift
        Token, position and target of a training index.
    loading
        What no probe tries; null in a profile's row, where the newest row of the tables says it (``table.draft_row``).
    """

    layout: Literal["plain", "speculators"]
    architectures: Annotated[tuple[str, ...], Field(min_length=1), FromList]
    attention: Literal["llama", "qwen3", "mla"]
    readers: Annotated[tuple[IdReader, ...], Field(min_length=1), FromList]
    count_keys: Texts
    count_default: Annotated[int, Field(gt=0)]
    norm_before_residual: OptionRule
    norm_before_fc: OptionRule
    fc_norm: OptionRule
    norm_output: OptionRule
    attention_bias: OptionRule
    output_bias: OptionRule
    mlp_bias: OptionRule
    fc_bias: OptionRule
    embedding: Literal["own", "target", "own_if_other_width"]
    head: Literal["own", "own_unless_no_draft_vocab"]
    tied_head: Literal["ignored", "embedding"]
    full_vocabulary_map: bool
    single_capture_skips_fc: bool
    max_layers: Annotated[int, Field(gt=0)] | None
    later_layers_norm: Literal["input_layernorm", "hidden_norm"]
    weight_prefixes: Texts
    layer_names: Texts
    unknown_weights: Literal["dropped", "refused"]
    rope_layouts: Annotated[tuple[Literal["rope_theta", "rope_parameters"], ...], Field(min_length=1), FromList]
    partial_rotary_keys: Texts
    shift: Shift
    loading: Loading | None = None

    @property
    def loads(self) -> Loading:
        """``loading`` of a row that has it, as all rows of ``table.draft_row``.

        Raises
        ------
        ValueError
            It has none.
        """
        if self.loading is None:
            raise ValueError("a row without what no probe tries; table.draft_row gives it")
        return self.loading

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.loading is None:
            data.pop("loading", None)
        return data
