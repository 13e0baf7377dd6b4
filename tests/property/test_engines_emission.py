"""What is emitted is what an engine does, or it is refused: over inputs, options, engines, versions and targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from draft_folders import INNER, draft_config
from hypothesis import assume, given
from hypothesis import strategies as st

from hsformat.engines import ENGINES, DraftConfig, emit, emit_for, known_versions
from hsformat.engines.drafts import draft_of
from hsformat.engines.inspection import inspect_draft, rules_for
from hsformat.engines.targets import TargetFacts
from hsformat.layout import ServingLayout
from hsformat.problems import Problem, ResolveError, Severity

SERVING = [(e, v) for e in ("vllm", "sglang") for v in known_versions(e)]
ARCHITECTURES = sorted({a for e in ("vllm", "sglang") for row in ENGINES[e].captures for a in row.architectures})
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@st.composite
def drafts(draw: st.DrawFn) -> DraftConfig:
    """Draft configs that contradict themselves nowhere."""
    width = draw(st.sampled_from([8, 16, 24, 2**31]))
    own = draw(st.sampled_from([8, 16, 24, 2**31]))
    vocab = draw(st.integers(8, 64))
    same = width == own
    head = draw(st.sampled_from(["draft", "target"])) if same else "draft"
    return DraftConfig(
        hidden_size=own,
        target_hidden_size=width,
        num_layers=draw(st.one_of(st.integers(1, 3), st.just(1001))),
        vocab_size=vocab,
        draft_vocab_size=vocab if head == "target" else draw(st.integers(1, vocab)),
        **{name: draw(st.booleans()) for name in NORMS},
        embedding=draw(st.sampled_from(["draft", "target"])) if same else "draft",
        head=head,
    )


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of emit: depths mostly ascending, some not."""
    n = draw(st.one_of(st.integers(4, 80), st.just(2000)))
    depths = draw(st.one_of(st.lists(st.integers(0, n), min_size=1, max_size=5), st.just(range(1, min(1002, n)))))
    if draw(st.booleans()):
        depths = sorted(set(depths))
    return {
        "aux": [f"d{d}" for d in depths],
        "config": draw(drafts()),
        "architecture": draw(st.sampled_from(ARCHITECTURES)),
        "num_layers": n,
    }


def shapes_of(config: DraftConfig, captures: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a draft's weights, by the sizes of ``draft_folders``: 4 heads of 4, 2 of them KV."""
    h, wide = config.hidden_size, config.target_hidden_size * captures
    out: dict[str, tuple[int, ...]] = {"fc.weight": (h, wide), "norm.weight": (h,)}
    if config.norm_before_fc:
        out["input_norm.weight"] = (wide,)
    if config.fc_norm:
        out |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(captures)}
    for i in range(config.num_layers):
        p, fed = ("midlayer", 2 * h) if i == 0 else (f"layers.{i}", h)
        out |= {f"{p}.{n}.weight": (h,) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
        out |= {f"{p}.self_attn.{n}_proj.weight": (rows, fed) for n, rows in (("q", 16), ("k", 8), ("v", 8))}
        out |= {f"{p}.self_attn.o_proj.weight": (h, 16), f"{p}.mlp.down_proj.weight": (h, INNER)}
        out |= {f"{p}.mlp.{n}_proj.weight": (INNER, h) for n in ("gate", "up")}
    if config.head == "draft":
        out["lm_head.weight"] = (config.draft_vocab_size, h)
    if config.embedding == "draft":
        out["embed_tokens.weight"] = (config.vocab_size, h)
    if config.draft_vocab_size < config.vocab_size:
        out |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return out


def served(keys: dict[str, Any], question: dict[str, Any], engine: str, version: str) -> tuple[Any, list[Problem]]:
    """Inspect a draft with the emitted keys and with weights as the draft has them."""
    sizes = {"num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta"}
    config = {**{k: v for k, v in draft_config().items() if k in sizes}, **keys}
    problems: list[Problem] = []
    about = question["config"]
    reduced = about.draft_vocab_size < about.vocab_size
    draft = draft_of(
        config,
        where="draft",
        problems=problems,
        shapes=shapes_of(about, len(question["aux"])),
        d2t=np.zeros(about.draft_vocab_size, np.int64) if reduced else None,
        t2d=np.arange(about.vocab_size) < about.draft_vocab_size if reduced else None,
    )
    assert draft is not None
    target = TargetFacts(
        where="target", architecture=question["architecture"], num_layers=question["num_layers"],
        hidden_size=question["config"].target_hidden_size, vocab_size=question["config"].vocab_size,
        max_positions=None, folder=None,
    )  # fmt: skip
    try:
        rules = rules_for(engine, version, draft, target, None)
    except ResolveError as e:
        return None, e.problems
    layout, found = inspect_draft(draft, target, rules)
    return layout, problems + found


def same(layout: ServingLayout, question: dict[str, Any]) -> None:
    config = question["config"]
    assert list(layout.keys) == question["aux"]
    assert {name: getattr(layout, name) for name in NORMS} == {name: getattr(config, name) for name in NORMS}
    assert (layout.embedding, layout.head) == (config.embedding, config.head)
    assert layout.num_draft_layers == config.num_layers
    assert layout.draft_vocab_size == config.draft_vocab_size
    assert layout.hidden_size == config.hidden_size
    assert layout.target_hidden_size == config.target_hidden_size


@given(questions(), st.sampled_from(SERVING))
def test_what_is_emitted_is_what_is_done(question, place):
    engine, version = place
    keys, problems = emit(**question, engine=engine, version=version)
    if keys is None:
        assert problems
        assert all(p.severity is Severity.ERROR for p in problems)
        return
    assert problems == []
    layout, found = served(keys, question, engine, version)
    assert [p for p in found if p.severity is Severity.ERROR] == []
    same(layout, question)


@given(questions(), st.sampled_from(known_versions("vllm")), st.sampled_from(known_versions("sglang")))
def test_one_folder_for_both_engines(question, vllm, sglang):
    keys, problems = emit_for(**question, engines={"vllm": vllm, "sglang": sglang})
    if keys is None:
        assert problems
        return
    for engine, version in (("vllm", vllm), ("sglang", sglang)):
        layout, found = served(keys, question, engine, version)
        assert [p for p in found if p.severity is Severity.ERROR] == []
        same(layout, question)


@given(st.sampled_from(SERVING), st.integers(8, 80), drafts())
def test_the_usual_layers_can_always_be_written(place, n, config):
    """Depths 2, N//2, N-3 of a Llama in every version: only options that the engine lacks are refused."""
    engine, version = place
    question = {"aux": ["d2", f"d{n // 2}", f"d{n - 3}"], "architecture": "LlamaForCausalLM", "num_layers": n}
    assume(len(set(question["aux"])) == 3)
    plain = config.model_copy(
        update=dict.fromkeys(NORMS, False) | {"num_layers": 1, "embedding": "target", "head": "draft"}
    )
    assume(plain.hidden_size == plain.target_hidden_size < 2**31)
    keys, problems = emit(**question, config=plain, engine=engine, version=version)
    assert problems == []
    assert keys is not None
