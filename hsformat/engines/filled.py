"""What a draft's config does not say and an engine takes all the same: the constants of Transformers' config classes.

An engine reads attributes of a config object, and the class that belongs to the config's ``model_type`` gives a value
to those that ``config.json`` leaves out: an absent ``max_position_embeddings`` is 2048 for ``llama``. The table
``config_defaults.json`` holds those values for the keys that hsformat reads, with the keys for which a class takes
null; a value that a class computes from other keys (``head_dim`` of ``llama``) is none of them. It was made with
Transformers 5.24.0 and is the same for 5.19.0, which vLLM 0.32.0 and SGLang 0.5.23 bring; older ones were not tried.
Whatever is filled in is named in a problem. May import ``drafts``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from hsformat.engines.drafts import ABSENT, Draft
from hsformat.engines.rows import DraftRow
from hsformat.problems import Problem, Severity, problem

__all__ = [
    "ALIASES",
    "KEYS",
    "MODEL_TYPES",
    "Attribute",
    "ConfigClass",
    "attribute",
    "class_of",
    "config_class",
    "named",
]

KEYS: Final = (
    "max_position_embeddings", "head_dim", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "tie_word_embeddings", "rms_norm_eps", "attention_bias", "mlp_bias",
    "intermediate_size_mlp",
)  # fmt: skip
"""Keys of a decoder that hsformat reads and some class fills in."""

MODEL_TYPES: Final = (
    "llama", "llama4_text", "mistral", "qwen2", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "deepseek_v2",
    "deepseek_v3", "kimi_k2", "gemma2", "gemma3_text", "gpt_oss", "phi3", "glm4", "glm4_moe", "minimax_m2", "apertus",
)  # fmt: skip
"""Values of ``model_type`` that the table has."""

ALIASES: Final = {"kimi_k2": "deepseek_v3"}
"""Types that both engines read by the class of another one (vLLM transformers_utils/config.py, SGLang
utils/hf_transformers/common.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClass:
    """A config class.

    Attributes
    ----------
    name
        Of the class.
    defaults
        The constants that it fills in, by key.
    null
        Keys for which it takes null.
    rotated_head
        It takes ``qk_rope_head_dim`` for a ``head_dim`` that is absent.
    """

    name: str
    defaults: Mapping[str, Any]
    null: frozenset[str]
    rotated_head: bool


def config_class(model_type: object) -> ConfigClass | None:
    """Return the class that reads configs of a ``model_type``; None: the table has none."""
    return _table().get(model_type) if isinstance(model_type, str) else None


class Attribute(NamedTuple):
    """What an engine sees under a key of the decoder: ``owner`` is the class that filled it in, None: it is stated.

    ``value`` is :data:`~hsformat.engines.drafts.ABSENT` where neither does it.
    """

    value: Any
    owner: str | None


def class_of(draft: Draft, row: DraftRow | None) -> ConfigClass | None:
    """Return the class by which an engine reads a draft's config; None: by none, or by one that is not known.

    ``row`` None: by that of its ``model_type`` in the plain layout, as the engines of the tables do.
    """
    by_class = draft.layout == "plain" and (row is None or row.loads.config_class)
    return config_class(draft.decoder.get("model_type")) if by_class else None


def attribute(draft: Draft, key: str, row: DraftRow | None) -> Attribute:
    """Return what an engine sees under a key of the decoder."""
    if key in draft.decoder:
        return Attribute(draft.decoder[key], None)
    cls = class_of(draft, row)
    if cls is not None and key in cls.defaults:
        return Attribute(cls.defaults[key], cls.name)
    return Attribute(ABSENT, None)


def named(draft: Draft, key: str, found: Attribute, code: str) -> Problem:
    """Return the warning that names what a class fills in."""
    return problem(
        code,
        where=draft.at(f"{draft.decoder_prefix}{key}"),
        got=f"not stated: {found.owner}'s {_shown(found.value)}",
        expected="a stated value",
        fix=f"write {key} as the draft was trained; engines take {_shown(found.value)}",
        severity=Severity.WARNING,
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _table() -> Mapping[str, ConfigClass]:
    classes = json.loads(Path(__file__).with_name("config_defaults.json").read_text("utf-8"))["classes"]
    return {
        name: ConfigClass(
            name=facts["class"],
            defaults=facts["defaults"],
            null=frozenset(facts["null"]),
            rotated_head=facts["rotated_head"],
        )
        for name, facts in classes.items()
    }
