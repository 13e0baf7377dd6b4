"""Engine numbers round-trip, rise with depth and never name two captures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsformat.engines import ENGINES, capture_of, describe_capture, engine_number

LLAMA_RULE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
targets = st.tuples(st.sampled_from(list(ENGINES)), st.sampled_from(LLAMA_RULE), st.integers(1, 200))


def keys(num_layers: int) -> list[str]:
    return [f"d{d}" for d in range(num_layers + 1)] + [f"d{num_layers}n"]


@given(targets)
def test_every_capture_round_trips_or_has_a_reason(target):
    engine, architecture, n = target
    found = {}
    for key in keys(n):
        number = engine_number(engine, architecture, n, key)
        if number.number is None:
            assert number.text.startswith("none: ")
        else:
            assert capture_of(engine, architecture, n, number.number) == key
            assert str(number.number) in number.text
            assert found.setdefault(number.number, key) == key
    assert sorted(found) == list(range(len(found)))
    assert len(found) >= n - 1


@given(st.integers(1, 200), st.data())
def test_the_other_engine_reads_another_layer(n, data):
    """An id of vLLM given to SGLang never means the same capture: the fault is one layer, at every depth."""
    number = data.draw(st.integers(0, n - 2)) if n > 1 else None
    if number is not None:
        assert capture_of("vllm", LLAMA_RULE[0], n, number) != capture_of("sglang", LLAMA_RULE[0], n, number)


@given(st.integers(1, 200))
def test_descriptions_are_different(n):
    texts = [describe_capture(key, n) for key in keys(n)]
    assert len(set(texts)) == len(texts)
