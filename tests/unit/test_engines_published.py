"""Drafts in the shapes in which projects publish them: ids nested, at the top level, absent and both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsformat import engines
from hsformat.problems import Severity

DRAFTS = json.loads((Path(__file__).parents[1] / "data/published_drafts.json").read_text())["drafts"]
CASES = [(name, key, *case[key]) for name, case in DRAFTS.items() for key in case if key not in ("target", "draft")]


@pytest.mark.parametrize(("name", "engine", "keys", "codes"), CASES, ids=[f"{c[0]} - {c[1]}" for c in CASES])
def test_layers_and_errors(tmp_path, name, engine, keys, codes):
    for folder in ("draft", "target"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(DRAFTS[name][folder]))
    engine, version = engine.split()
    layout, problems = engines.inspect(engine, draft=tmp_path / "draft", target=tmp_path / "target", version=version)
    errors = [p.code for p in problems if p.severity is Severity.ERROR and p.code != "HS411"]  # there are no weights
    assert sorted(errors) == sorted(codes), "\n".join(map(str, problems))
    assert (None if layout is None else list(layout.keys)) == keys


@pytest.mark.parametrize("name", [n for n in DRAFTS if "speculators" not in n])
def test_both_config_layouts_of_transformers_give_one_result(tmp_path, name):  # sfllm PR#32, Model-Optimizer PR#917
    """Transformers 4 writes rope_theta and rope_scaling, Transformers 5 rope_parameters."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(DRAFTS[name]["target"]))
    older = {"rope_theta": 500000.0, "rope_scaling": None, **DRAFTS[name]["draft"]}
    newer = {k: v for k, v in older.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {
        **(older["rope_scaling"] or {"rope_type": "default"}),
        "rope_theta": older["rope_theta"],
    }
    found = []
    for layout, config in (("older", older), ("newer", newer)):
        (tmp_path / layout).mkdir()
        (tmp_path / layout / "config.json").write_text(json.dumps(config))
        served, _ = engines.inspect("vllm", draft=tmp_path / layout, target=tmp_path / "target", version="0.32.0")
        assert served is not None
        found.append(served)
    assert found[0] == found[1]
    assert found[0].rope[0].theta == older["rope_theta"]
