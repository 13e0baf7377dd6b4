"""What each engine calls a depth; the Transformers row is run again with the version installed."""

from __future__ import annotations

import pytest

from hsformat.engines import ENGINES, capture_of, describe_capture, engine_number, numbering_row
from hsformat.problems import ResolveError

LLAMA_RULE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def text(engine: str, key: str) -> str:
    return engine_number(engine, "LlamaForCausalLM", 30, key).text


@pytest.mark.parametrize(
    ("key", "transformers", "vllm", "sglang"),
    [("d0", 0, 0, None), ("d1", 1, 1, 0), ("d15", 15, 15, 14), ("d29", 29, 29, 28), ("d30", None, 30, None),
     ("d30n", 30, None, None)],
)  # fmt: skip
def test_one_depth_has_three_numbers(key, transformers, vllm, sglang):  # BaldEagle#18, SafeAILab/EAGLE#239
    numbers = {e: engine_number(e, "LlamaForCausalLM", 30, key).number for e in ENGINES}
    assert numbers == {"transformers": transformers, "vllm": vllm, "sglang": sglang}


def test_text_for_people():
    assert text("transformers", "d15") == "hidden_states[15]"
    assert text("vllm", "d15") == "id 15"
    assert text("sglang", "d15") == "id 14"
    assert text("sglang", "d30").startswith("none: ")


def test_ids_pass_through_vllm_and_move_by_one_in_sglang():  # vllm PR#43671
    trained = [capture_of("sglang", "Qwen3ForCausalLM", 62, i) for i in (1, 30, 58)]
    served = [capture_of("vllm", "Qwen3ForCausalLM", 62, i) for i in (1, 30, 58)]
    assert (trained, served) == (["d2", "d31", "d59"], ["d1", "d30", "d58"])


def test_plain_words():
    assert describe_capture("d15", 30) == "residual after 15 of 30 layers"
    assert describe_capture("d0", 30) == "embedding output, before the first of 30 layers"
    assert describe_capture("d30", 30) == "residual after 30 of 30 layers, before the final norm"
    assert describe_capture("d30n", 30) == "after the final norm"


@pytest.mark.parametrize(
    ("engine", "architecture"), [("llama.cpp", "LlamaForCausalLM"), ("vllm", "DeepseekV9ForCausalLM"), ("", "")]
)
def test_unknown_engine_or_architecture_is_refused_not_guessed(engine, architecture):
    for call in (lambda: engine_number(engine, architecture, 4, "d2"), lambda: capture_of(engine, architecture, 4, 2)):
        with pytest.raises(ResolveError) as e:
            call()
        assert [p.code for p in e.value.problems] == ["HS410"]


@pytest.mark.parametrize("key", ["d31", "d29n", "15", "d-1", "d01", ""])
@pytest.mark.parametrize("engine", ENGINES)
def test_capture_that_the_target_has_not(engine, key):
    with pytest.raises(ResolveError) as e:
        engine_number(engine, "LlamaForCausalLM", 30, key)
    assert [p.code for p in e.value.problems] == ["HS304"]
    with pytest.raises(ResolveError):
        describe_capture(key, 30)


@pytest.mark.parametrize(
    ("engine", "number"), [("vllm", 31), ("vllm", -1), ("sglang", 29), ("transformers", 31), ("vllm", True)]
)
def test_number_that_the_engine_has_not(engine, number):
    with pytest.raises(ResolveError) as e:
        capture_of(engine, "LlamaForCausalLM", 30, number)
    assert [p.code for p in e.value.problems] == ["HS304"]


@pytest.mark.parametrize(("engine", "version"), [("transformers", "5.24.0"), ("vllm", "0.32.0"), ("sglang", "0.5.23")])
def test_the_rows_of_llama_were_run(engine, version):
    assert numbering_row(engine, "LlamaForCausalLM", version).evidence == "ran"


def test_what_an_id_means_may_depend_on_its_list():  # sglang PR#25454
    assert engine_number("sglang", "DeepseekV3ForCausalLM", 61, "d2").number is None
    with pytest.raises(ResolveError) as e:
        capture_of("sglang", "DeepseekV3ForCausalLM", 61, 2)
    assert [p.code for p in e.value.problems] == ["HS304"]


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("model_type", "architecture"), [*zip(("llama", "qwen2", "qwen3"), LLAMA_RULE, strict=True)])
def test_transformers_row_against_the_model_itself(model_type, architecture):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=3, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, vocab_size=40, max_position_embeddings=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    assert type(model).__name__ == architecture
    seen = {}
    for depth, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, d=depth: seen.__setitem__(f"d{d}", args[0]))
    model.model.norm.register_forward_hook(lambda _, args, out: seen.update({"d3": args[0], "d3n": out}))
    with torch.no_grad():
        hidden_states = model(torch.arange(6)[None], output_hidden_states=True).hidden_states
    assert len(hidden_states) == 4
    for number, state in enumerate(hidden_states):
        assert torch.equal(state, seen[capture_of("transformers", architecture, 3, number)])
    assert not torch.equal(seen["d3"], seen["d3n"])
