"""Whatever a draft's config, its vocabulary map or a target's config hold, inspection returns: it never raises."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from draft_folders import draft_config, draft_weights, target_config, write_draft, write_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsformat.engines import inspect
from hsformat.problems import Problem

KEYS = [
    *draft_config(),
    *(
        "speculators_model_type",
        "transformer_layer_config",
        "rope_scaling",
        "rope_parameters",
        "fc_norm",
        "use_aux_norm",
    ),
    *("partial_rotary_factor", "norm_output", "norm_before_fc", "norm_before_residual", "target_hidden_size", "bias"),
    *("dflash_config", "target_layer_ids", "intermediate_size_mlp", "quantization_config", "q_lora_rank"),
]
ENGINES = [("vllm", "0.32.0"), ("vllm", "0.24.0"), ("sglang", "0.5.23"), ("sglang", "0.5.8")]
ODD = [10**400, -(10**400), 1e-320, "\ud800", "eagle3", "yarn", "llama", 2**31, 1001]

scalars = st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False) | st.text(max_size=4)
scalars |= st.sampled_from(ODD)
numbers = st.lists(st.integers(-2, 40) | scalars, max_size=5)
inner = st.sampled_from(
    [
        *("eagle_aux_hidden_state_layer_ids", "layer_ids", "use_aux_hidden_state", "target_layer_ids", "model_type"),
        *("rope_type", "rope_theta", "factor", "partial_rotary_factor", "hidden_size", "norm_before_fc"),
        "num_aux_hidden_states",
    ]
)
values = scalars | numbers | st.dictionaries(inner, scalars | numbers, max_size=4)
architectures = st.sampled_from(["LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "Eagle3DeepseekV2ForCausalLM"])


def check(problems: list[Problem]) -> None:
    for p in problems:
        assert p.where
        assert p.got
        assert p.expected
        assert p.fix


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=6), architectures, st.sampled_from(ENGINES))
def test_any_config(tmp_path, changes: dict[str, Any], architecture: str, engine: tuple[str, str]):
    config = {**draft_config(), "architectures": [architecture], **changes}
    draft, target = write_draft(tmp_path / "d", config), write_target(tmp_path / "t")
    layout, problems = inspect(engine[0], draft=draft, target=target, version=engine[1])
    check(problems)
    if layout is None:
        assert problems
    else:
        json.dumps(layout.to_json())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(target_config())), values, max_size=3), st.sampled_from(ENGINES))
def test_any_target(tmp_path, changes: dict[str, Any], engine: tuple[str, str]):
    draft, target = write_draft(tmp_path / "d"), write_target(tmp_path / "t", {**target_config(), **changes})
    layout, problems = inspect(engine[0], draft=draft, target=target, version=engine[1])
    check(problems)
    assert layout is not None or problems


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.lists(st.booleans(), max_size=70))
def test_any_map(tmp_path, d2t: list[int], t2d: list[bool]):
    weights = draft_weights(d2t=np.array(d2t, np.int64), t2d=np.array(t2d, bool))
    draft, target = write_draft(tmp_path / "d", weights=weights), write_target(tmp_path / "t")
    for engine, version in ENGINES:
        layout, problems = inspect(engine, draft=draft, target=target, version=version)
        check(problems)
        assert layout is not None
        assert {p.code for p in problems} == {"HS408"}
