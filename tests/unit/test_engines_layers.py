"""What a draft's config says of layers, and what each engine feeds the draft. Each case names the thread it is from."""

from __future__ import annotations

import pytest
from draft_folders import draft_config, draft_weights, target_config, write_draft, write_target

from hsformat import engines
from hsformat.engines import inspect, resolve
from hsformat.engines.ids import default_depths, depths_of, ids_of
from hsformat.engines.table import capture_row
from hsformat.problems import ResolveError, Severity

TOP = "eagle_aux_hidden_state_layer_ids"
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "num_hidden_layers": 61}


def nested(*ids: object) -> dict[str, object]:
    return {"eagle_config": {TOP: list(ids)}, TOP: ...}


def top(*ids: object, **more: object) -> dict[str, object]:
    return {TOP: list(ids), "num_aux_hidden_states": len(ids), "eagle_config": ..., **more}


@pytest.fixture
def look(tmp_path):
    """Inspect a draft whose config is changed; return the keys that it is fed and the codes of all errors."""

    def run(engine: str, version: str, changes: dict, target: dict | None = None, **weights):
        draft = write_draft(tmp_path / "draft", draft_config(**changes), draft_weights(**weights))
        model = write_target(tmp_path / "target", target_config(**(target or {})))
        layout, problems = inspect(engine, draft=draft, target=model, version=version)
        run.problems = problems
        errors = [p.code for p in problems if p.severity is Severity.ERROR]
        return (None if layout is None else list(layout.keys)), errors

    return run


@pytest.mark.parametrize(
    ("version", "ids", "fed"),
    [
        ("0.5.23", [1, 14, 26], ["d2", "d15", "d27"]),
        ("0.5.23", [2, 15, 27], ["d2", "d15", "d27"]),
        ("0.5.12", [2, 15, 27], ["d3", "d16", "d28"]),
        ("0.5.12", [1, 14, 26], ["d2", "d15", "d27"]),
    ],
)
def test_one_is_added_if_the_first_id_is_one(look, version, ids, fed):  # sglang PR#25454
    assert look("sglang", version, nested(*ids), KIMI) == (fed, [])


def test_the_same_ids_are_one_layer_off_in_the_other_engine(look):  # vllm PR#43671
    target = {"architectures": ["MiniMaxM2ForCausalLM"], "num_hidden_layers": 62}
    assert look("sglang", "0.5.23", nested(1, 30, 58), target) == (["d2", "d31", "d59"], [])
    assert look("vllm", "0.32.0", top(1, 30, 58), target) == (["d1", "d30", "d58"], [])


def test_ids_nested_alone(look):  # llama.cpp PR#27040
    target = {"num_hidden_layers": 43}
    assert look("sglang", "0.5.23", nested(1, 21, 40), target) == (["d2", "d22", "d41"], [])
    keys, errors = look("vllm", "0.24.0", nested(1, 21, 40), target)
    assert (keys, errors) == (["d1", "d21", "d40"], ["HS404"])  # its other model runner takes the default
    keys, errors = look("vllm", "0.32.0", nested(1, 21, 40), target)
    assert (keys, sorted(errors)) == (["d2", "d21", "d40"], ["HS403", "HS404"])


@pytest.mark.parametrize("engine", ["vllm 0.32.0", "vllm 0.24.0", "sglang 0.5.23"])
def test_two_lists_that_mean_different_layers(look, engine):  # llama.cpp PR#27040
    changes = {TOP: [2, 21, 40], "eagle_config": {TOP: [1, 21, 40]}}
    _, errors = look(*engine.split(), changes, {"num_hidden_layers": 43})
    assert errors == ["HS404"]


@pytest.mark.parametrize("engine", ["vllm 0.32.0", "sglang 0.5.23"])
def test_two_lists_that_mean_the_same_to_each_engine(look, engine):
    assert look(*engine.split(), {TOP: [2, 15, 27], "eagle_config": {TOP: [1, 14, 26]}}) == (["d2", "d15", "d27"], [])


@pytest.mark.parametrize("engine", ["vllm 0.32.0", "sglang 0.5.23"])
def test_one_list_in_two_places_means_other_layers_to_each_engine(look, engine):
    keys, errors = look(*engine.split(), {TOP: [2, 15, 27], "eagle_config": {TOP: [2, 15, 27]}})
    assert (len(keys), errors) == (3, [])
    (p,) = look.problems
    assert (p.code, p.severity) == ("HS404", Severity.WARNING)
    assert "depths [d2, d15, d27] to vLLM 0.32.0" in p.got or "to SGLang 0.5.23" in p.got


def test_two_lists_that_mean_the_same_to_an_older_version_of_the_other_engine(look):
    """What vLLM does is not in doubt: which version of SGLang serves the folder is its user's business."""
    target = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}
    changes = {TOP: [3, 30, 58], "eagle_config": {TOP: [2, 29, 57]}}
    assert look("vllm", "0.32.0", changes, target) == (["d3", "d30", "d58"], [])
    (p,) = look.problems
    assert (p.code, p.severity) == ("HS404", Severity.WARNING)
    assert "[d2, d29, d57] to SGLang 0.5.23, [d3, d30, d58] to 0.5.12" in p.got
    assert look("sglang", "0.5.12", changes, target) == (["d3", "d30", "d58"], [])
    assert look("sglang", "0.5.23", changes, target)[1] == ["HS404"]


def test_ids_at_the_top_level_alone_are_not_read_by_sglang(look):
    keys, errors = look("sglang", "0.5.23", top(3, 16, 28))
    assert (keys, errors) == (["d2", "d15", "d27"], ["HS403"])
    (p,) = [p for p in look.problems if p.code == "HS403"]
    assert TOP in p.got
    assert "eagle_config" in p.fix


@pytest.mark.parametrize("engine", ["vllm 0.32.0", "sglang 0.5.23"])
def test_no_ids_is_an_error_although_a_layout_can_be_told(tmp_path, engine):  # SafeAILab/EAGLE#239, #213, #261
    draft = write_draft(tmp_path / "draft", draft_config(**{TOP: ..., "eagle_config": ...}))
    target = write_target(tmp_path / "target")
    name, version = engine.split()
    layout, problems = inspect(name, draft=draft, target=target, version=version)
    assert layout is not None
    assert layout.keys == ("d2", "d15", "d27")
    assert [p.code for p in problems] == ["HS403"]
    with pytest.raises(ResolveError) as e:
        resolve(name, draft=draft, target=target, version=version)
    assert [p.code for p in e.value.problems] == ["HS403"]


@pytest.mark.parametrize(("n", "depths"), [(27, [2, 13, 24]), (36, [2, 18, 33]), (61, [2, 30, 58])])
def test_the_default_is_one_formula(n, depths):  # SpecForge PR#239: two code paths chose different middle layers
    """Of every target of both engines; of one, SGLang adds one to the default as to ids."""
    odd = {"MiniMaxM3SparseForConditionalGeneration"}
    for engine in ("vllm", "sglang"):
        for row in engines.ENGINES[engine].captures:
            more = int(bool(odd & set(row.architectures)))
            assert default_depths(row, n) == [d + more for d in depths], row.architectures


def test_a_target_too_shallow_for_the_default(look):  # NeMo Automodel PR#2256
    _, errors = look("vllm", "0.32.0", {TOP: ..., "eagle_config": ...}, {"num_hidden_layers": 5})
    assert errors == ["HS403", "HS402", "HS402"]  # 2, 2, 2 arrive once, and fc takes three
    assert look("vllm", "0.32.0", top(1, 2, 3), {"num_hidden_layers": 5}) == (["d1", "d2", "d3"], [])


def test_four_captures_and_the_width_of_fc(look):  # vllm#54526, speculators#1065
    target = {"num_hidden_layers": 94}
    four = top(2, 46, 91, 93)
    assert look("vllm", "0.32.0", four, target, captures=4) == (["d2", "d46", "d91", "d93"], [])
    _, errors = look("vllm", "0.32.0", four, target)  # weights of three captures
    assert errors == ["HS402"]
    (p,) = look.problems
    assert "3 captures" in p.got
    assert "4 captures" in p.expected
    _, errors = look("vllm", "0.32.0", {**four, "num_aux_hidden_states": ...}, target, captures=4)
    assert errors == ["HS402", "HS402"]  # fc is made for three


def test_the_state_after_the_last_layer(look):  # sglang#32226, PR#32334
    target = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 36}
    assert look("sglang", "0.5.23", nested(24, 30, 36), target) == (["d24", "d30", "d36"], [])
    assert look("sglang", "0.5.16", nested(24, 30, 36), target) == (None, ["HS304"])
    assert look("sglang", "0.5.23", nested(24, 30, 35), target) == (["d25", "d31", "d36"], [])


def test_the_last_layer_kills_the_llama_rule(look):
    assert look("sglang", "0.5.23", nested(1, 14, 29)) == (None, ["HS304"])
    assert look("vllm", "0.32.0", top(2, 15, 30)) == (["d2", "d15", "d30"], [])


@pytest.mark.parametrize(("version", "errors"), [("0.24.0", ["HS304"]), ("0.32.0", [])])
def test_deepseek_lacked_the_last_layer(look, version, errors):  # vllm#48124, PR#46973
    target = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}
    assert look("vllm", version, top(2, 30, 61), target)[1] == errors


def test_ids_of_dflash_are_outputs_of_blocks(look):  # vllm PR#40727
    assert look("vllm", "0.32.0", {TOP: ..., "eagle_config": ..., "dflash_config": {"target_layer_ids": [1, 7, 13]}})[
        0
    ] == ["d2", "d8", "d14"]
    assert look("vllm", "0.32.0", top(1, 7, 13))[0] == ["d1", "d7", "d13"]


def test_a_number_beyond_the_target_is_refused_not_repeated(look):
    keys, errors = look("vllm", "0.32.0", top(2, 15, 31))
    assert (keys, errors) == (None, ["HS304"])


def test_order_and_duplicates(look):
    keys, errors = look("vllm", "0.32.0", top(27, 15, 2))
    assert (keys, errors) == (["d2", "d15", "d27"], [])
    assert [(p.code, p.severity) for p in look.problems] == [("HS401", Severity.WARNING)]
    keys, errors = look("vllm", "0.32.0", top(2, 15, 15))
    assert (keys, errors) == (["d2", "d15"], ["HS402", "HS402"])


@pytest.mark.parametrize(
    ("ids", "code"),
    [([2, 15, "27"], "HS603"), ([2, 15.0, 27], "HS603"), ([2, 15, True], "HS603"), ([2, 15, None], "HS603"),
     ("2,15,27", "HS603"), ({"2": 1}, "HS603"), ([2, 15, -3], "HS304"), ([2, 15, int("9" * 4299)], "HS304"),
     ([2, 15, int("9" * 4300)], "HS304")],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm 0.32.0", "sglang 0.5.23"])
def test_ids_that_are_no_list_of_integers(look, engine, ids, code):
    keys, errors = look(*engine.split(), {TOP: ids, "eagle_config": {TOP: ids}})
    assert keys is None
    assert set(errors) == {code}
    assert len(errors) == 2
    assert all("format that is listed" not in p.fix and len(str(p)) < 1000 for p in look.problems)


def test_an_empty_list_is_no_list(look):
    assert look("vllm", "0.32.0", top())[1] == ["HS403", "HS603"]  # and 0 is no number of captures
    assert look("sglang", "0.5.23", nested())[1] == ["HS403"]


def test_gemma3_is_captured_without_its_residual(look):
    target = {"architectures": ["Gemma3ForCausalLM"]}
    assert look("sglang", "0.5.16", nested(1, 14, 26), target) == (["d2", "d15", "d27"], [])
    assert look("sglang", "0.5.17", nested(1, 14, 26), target) == (None, ["HS410"])


@pytest.mark.parametrize(
    ("engine", "version"),
    [("vllm", "0.31.0"), ("vllm", "0.32.1"), ("sglang", "0.5.24"), ("sglang", "0.5.7"), ("vllm", "latest"),
     ("vllm", ""), ("vllm", None), ("llama.cpp", "1"), ("transformers", "5.24.0")],
)  # fmt: skip
def test_unknown_engine_or_version_is_never_the_nearest(look, engine, version):
    assert look(engine, version, {}) == (None, ["HS410"])


@pytest.mark.parametrize("version", ["0.32.0+cpu", "v0.32.0", "0.32"])
def test_one_version_is_written_in_many_ways(look, version):
    assert look("vllm", version, {}) == (["d2", "d15", "d27"], [])


def test_unknown_target_and_draft(look):
    assert look("vllm", "0.32.0", {}, {"architectures": ["NewForCausalLM"]}) == (None, ["HS410"])
    assert look("vllm", "0.32.0", {"architectures": ["GptOssForCausalLMEagle3"]}) == (None, ["HS410"])
    assert look("sglang", "0.5.23", {"architectures": ["LlamaForCausalLM"]}) == (None, ["HS410"])
    assert look("vllm", "0.32.0", {"speculators_model_type": "dflash"}) == (None, ["HS410"])


def test_a_target_with_several_streams(look):
    for target in ({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}, {"hc_mult": 4}):
        assert look("vllm", "0.32.0", {}, target) == (None, ["HS410"])


@pytest.mark.parametrize("count", [2.0, "4", True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_count_of_streams_that_is_no_integer(look, count, inside):
    target = {"text_config": target_config(hc_mult=count)} if inside else {"hc_mult": count}
    assert look("vllm", "0.32.0", {}, target) == (None, ["HS603"])
    assert look("vllm", "0.32.0", {}, {"hc_mult": 1})[1] == []


def test_a_draft_that_is_fed_no_aux_captures(look):
    changes = {"eagle_config": {TOP: [1, 14, 26], "use_aux_hidden_state": False}}
    assert look("sglang", "0.5.23", changes)[1] == ["HS410"]


@pytest.mark.parametrize("depths", [[1, 15, 27], [1, 2, 3]])
def test_lists_that_no_ids_stand_for(depths):  # the rule of sglang PR#25454: depth 1 first is not expressible
    row = capture_row("sglang", "0.5.23", "KimiK25ForConditionalGeneration")
    assert ids_of(row, depths, 61) is None
    assert depths_of(row, [1, 15, 27], 61) == [2, 16, 28]


def test_the_public_rows_are_complete():
    for name in ("vllm", "sglang"):
        versions = engines.known_versions(name)
        assert versions == tuple(sorted(versions, key=lambda v: [int(x) for x in v.replace(".post", ".").split(".")]))
        for version in versions:
            assert engines.numbering_row(name, "LlamaForCausalLM", version).source
