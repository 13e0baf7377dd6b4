"""Probes on a real engine: run by ``make test-engines`` in the environments of scripts/engines, never by ``make test``.

``HSFORMAT_ENGINE`` names the engine of the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsformat.engines.profile import load_profile
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.engines.table import capture_row, draft_row

ENGINE = os.environ.get("HSFORMAT_ENGINE", "none")
KEPT = Path(__file__).parents[1] / "data" / "profiles"
FREE = {"source", "evidence", "versions", "architectures"}
READ = {"loading", "readers"}
"""Of a draft's row: what is read in an engine's source and not probed; and what is compared by itself."""
# One is proved with draft folders as well, which are the same for every target.
WITH_DRAFTS = "LlamaForCausalLM"
ARCHITECTURES = {"vllm": (WITH_DRAFTS, "Qwen3ForCausalLM"), "sglang": (WITH_DRAFTS, "Qwen3ForCausalLM")}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(ENGINE not in ARCHITECTURES, reason="an engine that serves no drafts"),
]


def probe(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hsformat", "engines", "probe", "--engine", ENGINE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES.get(ENGINE, ()))
def test_the_engine_does_what_the_table_and_the_kept_profile_say(architecture, tmp_path):
    drafts = ("--drafts",) if architecture == WITH_DRAFTS else ()
    run = probe("--architecture", architecture, "--out", str(tmp_path / "p.json"), "--format", "json", *drafts)
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    assert told["problems"] == []  # no difference to the table
    profile = load_profile(tmp_path / "p.json")
    kept = load_profile(KEPT / f"{ENGINE}-{profile.version}-{architecture}.json")
    known = capture_row(ENGINE, profile.version, architecture)
    for name in set(CaptureRow.model_fields) - FREE:
        assert getattr(profile.captures, name) == getattr(kept.captures, name) == getattr(known, name), name
    assert len(profile.drafts) == len(kept.drafts) == len(drafts)
    for proved, before in zip(profile.drafts, kept.drafts, strict=True):
        row = draft_row(ENGINE, profile.version, proved.layout, proved.architectures[0])
        for name in set(DraftRow.model_fields) - FREE - READ:
            assert getattr(proved, name) == getattr(before, name) == getattr(row, name), name
        assert proved.readers == before.readers
        assert set(proved.readers) <= set(row.readers)
    now, then = ({m.asked: m.depths for m in p.measurements} for p in (profile, kept))
    assert now == then
    errors = [m.relative_error for m in profile.measurements if m.relative_error is not None]
    assert max(errors) < 1e-4 if drafts else max(errors) < 1e-5


def test_an_architecture_that_the_engine_cannot_draft_for_is_refused_with_its_words(tmp_path):
    run = probe("--architecture", "BloomForCausalLM", "--out", str(tmp_path / "p.json"))
    assert run.returncode == 2, run.stdout + run.stderr
    assert "HS410" in run.stderr
    assert not (tmp_path / "p.json").exists()
