"""What config classes fill in for keys that a draft's config leaves out, against the classes themselves.

The table is made by ``python tests/unit/test_engines_filled.py > hsformat/engines/config_defaults.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from hsformat.engines.filled import ALIASES, KEYS, MODEL_TYPES, config_class

pytestmark = pytest.mark.needs("torch")

TINY = {
    "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip


def class_facts(model_type: str) -> dict[str, Any]:
    """Return a class's name, the constants it fills in, the keys for which it takes null, and what a head is.

    DeepSeek's classes take ``qk_rope_head_dim`` for a ``head_dim`` that a config leaves out.
    """
    cls = CONFIG_MAPPING[ALIASES.get(model_type, model_type)]
    fields = {f.name: f.default for f in dataclasses.fields(cls)}
    defaults, null = {}, []
    for key in KEYS:
        if fields.get(key, dataclasses.MISSING) not in (dataclasses.MISSING, None):
            assert getattr(cls(**TINY), key) == fields[key]
            defaults[key] = fields[key]
        try:
            cls(**TINY, **{key: None})
        except Exception:  # whatever the class raises, it does not take null
            continue
        null.append(key)
    rotated = getattr(cls(**TINY, qk_rope_head_dim=6), "head_dim", None) == 6
    return {"class": cls.__name__, "defaults": defaults, "null": sorted(null), "rotated_head": rotated}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_table_is_what_the_class_does(model_type):
    known = config_class(model_type)
    assert known is not None
    facts = {"class": known.name, "defaults": dict(known.defaults), "null": sorted(known.null)}
    assert {**facts, "rotated_head": known.rotated_head} == class_facts(model_type)


if __name__ == "__main__":
    made_by = f"{Path(__file__).name}, Transformers {transformers.__version__}"
    json.dump({"made_by": made_by, "classes": {m: class_facts(m) for m in MODEL_TYPES}}, sys.stdout, indent=1)
    print()
