"""Sizes of a draft as an engine takes them from its config: stated, or filled in by a config class, which is named.

May import ``drafts`` and ``filled``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hsformat.engines.drafts import ABSENT, INNER, MAX_COUNT, Draft, field_problem
from hsformat.engines.filled import attribute, class_of, named
from hsformat.engines.rows import DraftRow
from hsformat.problems import Problem, Severity, problem

__all__ = ["DraftSizes", "LatentSizes", "read_epsilon", "read_sizes"]

_MOST: Final = 2**31 - 1
_SHAPES: Final = ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
"""Keys that some class fills in and that mean something to every draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention; ``query_rank`` None: queries have one projection."""

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """Sizes of a draft.

    Attributes
    ----------
    intermediate_size
        Of the MLP, from the key that the engine takes it from.
    draft_vocab_size
        None: the config says null, or nothing.
    target_hidden_size
        Width of a capture: as stated, otherwise the draft's own.
    latent
        None: another attention, or sizes that are missing, which was reported.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int | None
    target_hidden_size: int
    latent: LatentSizes | None


class _Reader:
    """Reads sizes of one draft and keeps what is wrong with them."""

    def __init__(self, draft: Draft, row: DraftRow | None, problems: list[Problem]) -> None:
        self.draft, self.row, self.problems = draft, row, problems
        self.cls = class_of(draft, row)

    def stated(self, key: str, *, most: int = _MOST, config: Mapping[str, Any] | None = None, at: str = "") -> int:
        """Return a size that the config has to state."""
        value = (self.draft.decoder if config is None else config).get(key)
        return self._checked(value, f"{self.draft.decoder_prefix if config is None else at}{key}", most)

    def optional(self, key: str, otherwise: int) -> int:
        """Return a size that may be absent, or null where the class takes it: filled in, or computed."""
        found = attribute(self.draft, key, self.row)
        if found.owner is not None:
            self.problems.append(named(self.draft, key, found, "HS603"))
        if found.value is ABSENT:
            return otherwise
        if found.value is None and (self.cls is None or key in self.cls.null):
            return otherwise
        shown = "null" if found.value is None else found.value
        return self._checked(shown, f"{self.draft.decoder_prefix}{key}", _MOST)

    def _checked(self, value: Any, place: str, most: int) -> int:
        if type(value) is not int or not 0 < value <= most:
            self.problems.append(field_problem(self.draft.at(place), value, f"an integer from 1 to {most}"))
            return 1
        return value


def read_sizes(draft: Draft, problems: list[Problem], row: DraftRow | None = None) -> DraftSizes | None:
    """Return a draft's sizes; None, with HS603 in ``problems``: one is missing or no number above 0.

    What a config class fills in is named by a warning (HS603).

    Parameters
    ----------
    row
        Of the engine that reads the config; None: of none, and what engines do differently is left out.
    """
    new: list[Problem] = []
    read = _Reader(draft, row, new)
    _check_class(draft, row, new)
    hidden, heads = read.stated("hidden_size"), read.stated("num_attention_heads")
    per_head = max(1, hidden // heads)
    if read.cls is not None and read.cls.rotated_head and "head_dim" not in draft.decoder:
        per_head = read.optional("qk_rope_head_dim", per_head)
    reduced = draft.config.get("draft_vocab_size")
    sizes = DraftSizes(
        hidden_size=hidden,
        num_layers=read.stated("num_hidden_layers", most=MAX_COUNT),
        num_heads=heads,
        num_kv_heads=read.optional("num_key_value_heads", heads),
        head_dim=read.optional("head_dim", per_head),
        intermediate_size=_mlp_width(read),
        vocab_size=read.stated("vocab_size"),
        draft_vocab_size=None if reduced is None else read.stated("draft_vocab_size", config=draft.config),
        target_hidden_size=_target_width(read, hidden),
        latent=_latent(read) if row is not None and row.attention == "mla" else None,
    )
    problems += new
    return None if any(p.severity is Severity.ERROR for p in new) else sizes


def read_epsilon(draft: Draft, row: DraftRow, problems: list[Problem]) -> float | None:
    """Return ``rms_norm_eps`` of all norms of a draft; None: it is not known.

    HS405 (warning) names one that a class fills in, HS603 one that is no number above 0.
    """
    found = attribute(draft, "rms_norm_eps", row)
    if found.owner is not None:
        problems.append(named(draft, "rms_norm_eps", found, "HS405"))
    if found.value is ABSENT:
        return None
    if type(found.value) is not float or not found.value > 0:
        where, expected = draft.at(f"{draft.decoder_prefix}rms_norm_eps"), "a number above 0, with its point: 1e-05"
        shown = "null" if found.value is None else found.value
        problems.append(field_problem(where, shown, expected))
        return None
    return found.value


def _check_class(draft: Draft, row: DraftRow | None, problems: list[Problem]) -> None:
    """Add HS603 where it cannot be told by which class a config is read, or what fails without a class."""
    if row is None:
        return
    prefix = draft.decoder_prefix
    for key in row.loads.needed:
        if draft.decoder.get(key) is None:
            got, expected = "no such field, which nothing fills in in this layout", "a stated value"
            fix = f"write {key}: the engine fails to load the draft without it"
            problems.append(problem("HS603", where=draft.at(f"{prefix}{key}"), got=got, expected=expected, fix=fix))
    if not row.loads.config_class or class_of(draft, row) is not None:
        return
    name = draft.decoder.get("model_type")
    where = draft.at(f"{prefix}model_type")
    if not isinstance(name, str) or not name:
        problems.append(field_problem(where, name, "the type of the config, by which engines find its class"))
    elif absent := [key for key in _SHAPES if key not in draft.decoder]:
        got = f"{name}, of whose config class hsformat does not know what it fills in for {', '.join(absent)}"
        fix = f"write {', '.join(absent)}"
        severity = Severity.WARNING
        problems.append(problem("HS603", where=where, got=got, expected="stated values", fix=fix, severity=severity))


def _mlp_width(read: _Reader) -> int:
    """Return the width of the MLP: of ``llama4_text`` engines take different keys."""
    row, decoder = read.row, read.draft.decoder
    if row is not None and row.loads.mlp_width == "llama4" and decoder.get("model_type") == "llama4_text":
        return read.optional("intermediate_size_mlp", 1)
    return read.stated("intermediate_size")


def _target_width(read: _Reader, hidden: int) -> int:
    draft, row = read.draft, read.row
    config, at = draft.config, ""
    if draft.layout == "speculators" and config.get("target_hidden_size") is None:
        config, at = draft.decoder, f"{INNER}."
    if "target_hidden_size" not in config:
        return hidden
    if config["target_hidden_size"] is None:
        if row is not None and (row.loads.null_target_width == "fails" or at):
            fix = "leave it out, or write the target's width: engines multiply by what stands here"
            where, expected = draft.at(f"{at}target_hidden_size"), "a number, or no such field"
            read.problems.append(problem("HS603", where=where, got="null", expected=expected, fix=fix))
        return hidden
    return read.stated("target_hidden_size", config=config, at=at)


def _latent(read: _Reader) -> LatentSizes | None:
    """Return the sizes of latent attention; HS603 for each that is missing."""
    row, draft = read.row, read.draft
    before = len(read.problems)
    rank = attribute(draft, "q_lora_rank", row)
    query: int | None = None
    if rank.value is not ABSENT and rank.value is not None:
        query = read.optional("q_lora_rank", 0)
    elif row is not None and row.loads.query_rank == "needed":
        where = draft.at(f"{draft.decoder_prefix}q_lora_rank")
        shown = "null" if rank.value is None else None
        fix = "the engine refuses a draft without it: serve with another one, or train with a rank"
        problem_ = problem("HS410", where=where, got=shown or "no such field", expected="an integer above 0", fix=fix)
        read.problems.append(problem_)
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = []
    for key in keys:
        found = attribute(draft, key, row)
        if found.owner is None:
            sizes.append(read.stated(key))
        else:
            sizes.append(read.optional(key, 1))
    if any(p.severity is Severity.ERROR for p in read.problems[before:]):
        return None
    return LatentSizes(query_rank=query, kv_rank=sizes[0], nope=sizes[1], rope=sizes[2], value=sizes[3])
