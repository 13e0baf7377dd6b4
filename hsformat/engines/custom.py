"""A layout of the user's own: what an engine that hsformat does not know does with drafts, stated in a JSON file.

``--engine custom:layout.json``. The same checks are made as for engines of the tables; what the file states is
believed, and a serving layout that comes of it has the evidence ``stated``. docs/guides/serving.md has an example.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, field_validator

from hsformat.engines.drafts import Draft
from hsformat.engines.rows import DraftRow, IdReader, Loading, OptionRule
from hsformat.layout import AuxInput, CaptureKey, Shift, parse_capture_key
from hsformat.models import FromList, Frozen
from hsformat.problems import ForeignFileError, NothingToOpen, Problem, problem
from hsformat.strict_json import parse_json

__all__ = ["PREFIX", "CustomLayout", "load_custom"]

PREFIX: Final = "custom:"
"""Before the path of such a file, in the place of an engine's name."""

_LOADING = Loading(
    mlp_width="intermediate_size", null_target_width="absent", no_draft_vocab="null", empty_ids="absent",
    hidden_keys=(), map_name="anywhere", other_names={}, skipped=(), query_rank="any", config_class=False, needed=(),
    source="of an engine that nobody described further",
)  # fmt: skip


class CustomLayout(Frozen):
    """What an engine does, as somebody states it. No field has a default.

    Attributes
    ----------
    hsformat_custom_layout
        ``1``: the version of this form.
    name, version
        Of the engine, for people.
    aux
        Keys of what ``fc`` concatenates, in that order.
    norm_before_residual, norm_before_fc, fc_norm, norm_output, later_layers_norm
        As in :class:`hsformat.layout.ServingLayout`.
    attention
        ``llama``, ``qwen3`` or ``mla``: which weights a layer of the draft has.
    attention_bias, output_bias, mlp_bias, fc_bias
        Whether q, k and v, ``o_proj``, the MLP's projections and ``fc`` have a bias.
    embedding, head
        ``own``: the draft's where its folder has one, the target's otherwise. ``target`` (embedding): always the
        target's.
    shift
        Token, position and target of a training index: ``{"token": 1, "position": 0, "distribution": 1, "target": 2}``
        is EAGLE-3's.
    """

    hsformat_custom_layout: Literal["1"]
    name: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1)]
    aux: Annotated[tuple[CaptureKey, ...], FromList]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    later_layers_norm: Literal["input_layernorm", "hidden_norm"]
    attention: Literal["llama", "qwen3", "mla"]
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    fc_bias: bool
    embedding: Literal["own", "target"]
    head: Literal["own"]
    shift: Shift

    @field_validator("aux")
    @classmethod
    def _once(cls, aux: tuple[str, ...]) -> tuple[str, ...]:
        if not aux:
            raise ValueError("no capture is named")
        for key in aux:
            parse_capture_key(key)  # the pattern has no end of digits
        if len(set(aux)) != len(aux):
            raise ValueError(f"a capture is named twice: {', '.join(aux)}")
        return aux

    @property
    def inputs(self) -> tuple[AuxInput, ...]:
        """The aux inputs."""
        parsed = [parse_capture_key(key) for key in self.aux]
        return tuple(AuxInput(depth=depth, norm="final" if normed else "none") for depth, normed in parsed)

    def draft_row(self, draft: Draft) -> DraftRow:
        """Return what is stated as a row, for a draft of any architecture and either config layout."""

        def stated(value: bool) -> OptionRule:  # noqa: FBT001 - the one value of a rule
            return OptionRule(keys=(), combine="first", default=value)

        return DraftRow(
            layout=draft.layout, architectures=(draft.architecture,), attention=self.attention,
            readers=(IdReader(name="", keys=(), positions="past_table"),), count_keys=(), count_default=len(self.aux),
            norm_before_residual=stated(self.norm_before_residual), norm_before_fc=stated(self.norm_before_fc),
            fc_norm=stated(self.fc_norm), norm_output=stated(self.norm_output),
            attention_bias=stated(self.attention_bias), output_bias=stated(self.output_bias),
            mlp_bias=stated(self.mlp_bias), fc_bias=stated(self.fc_bias), embedding=self.embedding,
            head=self.head, tied_head="ignored", full_vocabulary_map=True, single_capture_skips_fc=False,
            max_layers=None, later_layers_norm=self.later_layers_norm, weight_prefixes=("", "model."),
            layer_names=("midlayer", "layers.0"), unknown_weights="dropped",
            rope_layouts=("rope_theta", "rope_parameters"),
            partial_rotary_keys=("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
            shift=self.shift, versions=(self.version,), source="stated by a custom layout",
            evidence="read", loading=_LOADING,
        )  # fmt: skip


def load_custom(path: str | Path) -> CustomLayout:
    """Read a custom layout.

    Raises
    ------
    NothingToOpen
        HS602: there is no such file.
    ForeignFileError
        HS602: not JSON. HS603: a field is missing, unknown or wrong, each by name.
    """
    file = Path(path)
    if not file.is_file():
        fix = "give custom: and the path of a layout (docs/guides/serving.md)"
        raise NothingToOpen(problem("HS602", where=str(file), got="no such file", expected="a custom layout", fix=fix))
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
        return CustomLayout.model_validate_json(json.dumps(data))
    except ValidationError as e:
        raise ForeignFileError(_field_problems(e, file)) from e
    except (OSError, ValueError, RecursionError) as e:
        raise ForeignFileError(problem("HS602", where=str(file), got=e, expected="a custom layout as JSON")) from e


def _field_problems(error: ValidationError, file: Path) -> list[Problem]:
    fix = "docs/guides/serving.md has every field of a custom layout"
    out = []
    for err in error.errors(include_url=False):
        name = ".".join(str(p) for p in err["loc"]) or "layout"
        got = "no such field" if err["type"] == "missing" else repr(err["input"])[:200]
        out.append(problem("HS603", where=f"{file}: {name}", got=got, expected=err["msg"], fix=fix))
    return out
