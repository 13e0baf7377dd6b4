"""The SGLang extractor on the real engine: run by ``make test-engines`` in the environment of scripts/engines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

if os.environ.get("HSFORMAT_ENGINE") != "sglang":
    pytest.skip("not the environment of SGLang", allow_module_level=True)

from captured import LAYERS, captured

from hsformat.record import Generation
from hsformat.testing import ExtractorConformance
from hsformat_extractors.sglang import SglangExtractor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
DEMO = Path(os.environ.get("HSFORMAT_DEMO_TARGET", ROOT / "build/demo/target"))
KEPT = json.loads((ROOT / "tests/data/captures/sglang-0.5.23.json").read_text("utf-8"))


class TestSmolLM2(ExtractorConformance):
    """SmolLM2-135M-Instruct: 30 layers, in float32 and bfloat16, given tokens and answers."""

    extractor = SglangExtractor
    model = DEMO
    dtypes = ("float32", "bfloat16")
    depths = (1, 2, 15, 27, 29, 30)
    generation = Generation(mode="greedy", max_new_tokens=8)

    @pytest.fixture(autouse=True, scope="class")
    def there(self):
        if not DEMO.is_dir():
            pytest.skip(f"no {DEMO}: make demo, or name a folder of SmolLM2 by HSFORMAT_DEMO_TARGET")


@pytest.mark.parametrize("kept", KEPT["rows"], ids=lambda row: f"{row['architecture']}-{row['dtype']}")
def test_the_engine_captures_what_the_kept_table_says(kept):
    """Depth by depth against Transformers in float32: chunks, neighbours, answers."""
    keys = (*(f"d{d}" for d in kept["depths"]), *([f"d{LAYERS}n"] if kept["normed"] else []))
    row = captured("sglang", kept["architecture"], keys, options={}, dtype=kept["dtype"])
    errors = ("worst_relative_error", "worst_relative_error_answers")
    assert {k: v for k, v in row.items() if k not in errors} == {k: v for k, v in kept.items() if k not in errors}
    assert max(row[name] for name in errors) < 1e-4
