"""Conversations as they are served: forms of rows, system prompts, tools, reasoning, and one record a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hsformat.prepare import Preparation, load_tokenizer, prepare
from hsformat.prepare.conversation import Conversation, parse_row
from hsformat.prepare.row import Row
from hsformat.record import TokenSample

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS = CHATML.replace("m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +")
REASONS = CHATML.replace(
    "+ m['content'] +",
    "+ ('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content and loop.last else '') "
    "+ m['content'] +",
)
THINK_PROMPT = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments | tojson }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TAGGED_REASONS = TAGGED.replace("<think>\n' }}", "' }}").replace(
    "{{ m['content'] + '<|im_end|>' }}",
    "{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}",
)


def tokenizer(template: str) -> Any:
    tok = load_tokenizer(TINY)
    tok.chat_template = template
    return tok


def turns(*contents: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, "id": "c", **more}


@pytest.fixture
def run(tmp_path):
    def run(tok: Any, *rows: dict[str, Any], **changes: Any) -> tuple[Preparation, list[TokenSample]]:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
        options = {"vocab_size": 512, "max_length": None, "for_generation": False, **changes}
        preparation = prepare(path, tok, **options)
        samples = list(preparation)
        s = preparation.summary
        assert s.rows + s.more_turns == s.samples + s.dropped.total()
        assert s.rows == len(rows) == s.samples + s.rows_dropped
        return preparation, samples

    return run


def shown(tok: Any, sample: TokenSample) -> tuple[str, str]:
    """Return the text before the only supervised run, and the run; nothing supervised stands elsewhere."""
    on = sample.loss_mask.nonzero()[0]
    assert (sample.loss_mask[on[0] : on[-1] + 1] == 1).all()
    return tok.decode(sample.input_ids[: on[0]]), tok.decode(sample.input_ids[on[0] : on[-1] + 1])


def parsed(**value: Any) -> Conversation:
    found = parse_row(Row(where="f: line 1", value=value))
    assert isinstance(found, Conversation), found
    return found


# -- forms of rows


def test_sharegpt_means_what_messages_mean():
    spoken = [("system", "s"), ("human", "a"), ("gpt", "b"), ("tool", "c"), ("assistant", "d"), ("user", "e")]
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    share = parsed(conversations=[{"from": f, "value": v} for f, v in spoken])
    plain = parsed(messages=[{"role": r, "content": v} for r, (_, v) in zip(roles, spoken, strict=True)])
    also = parsed(conversations=plain.messages)
    assert share.messages == plain.messages == also.messages
    assert share.id == plain.id == also.id


def test_system_prompt_beside_the_turns_comes_first():
    a = parsed(conversations=[{"from": "human", "value": "a"}], system="s")
    b = parsed(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}])
    assert (a.messages, a.id, a.ignored) == (b.messages, b.id, ())
    assert parsed(messages=[{"role": "user", "content": "a"}], system="").messages[0]["role"] == "user"


def test_tools_as_text_are_the_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    user = [{"role": "user", "content": "a"}]
    assert parsed(messages=user, tools=json.dumps(tools)) == parsed(messages=user, tools=tools)
    assert parsed(messages=user, tools=" ").tools is None


def test_arguments_as_text_are_the_object_that_engines_render(run):  # vLLM, SGLang: json.loads before the template
    tok = tokenizer(TOOLS)
    rows = [
        {"id": i, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": arguments}}]}]}
        for i, arguments in enumerate(['{"a":1}', {"a": 1}, ""])
    ]  # fmt: skip
    _, samples = run(tok, *rows)
    assert [shown(tok, s)[1] for s in samples] == ['f{"a": 1}<|im_end|>', 'f{"a": 1}<|im_end|>', "f{}<|im_end|>"]


def test_null_keys_are_left_out():
    a = parsed(messages=[{"role": "user", "content": "a", "tool_calls": None, "name": None}])
    assert a.messages == [{"role": "user", "content": "a"}]


# -- system, tools


def test_tools_and_tool_turns_are_rendered_and_not_supervised(run):
    tok = tokenizer(TOOLS)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"id": "c", "tools": tools, "messages": [*messages, {"role": "assistant", "content": "a"}]}
    _, (first, second) = run(tok, row, explode_turns=True)
    assert shown(tok, first)[1] == "f{}<|im_end|>"
    served = tok.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert shown(tok, second) == (served, "a<|im_end|>")
    _, (whole,) = run(tok, row)
    assert whole.input_ids.tolist() == second.input_ids.tolist()
    assert whole.loss_mask.sum() == first.loss_mask.sum() + second.loss_mask.sum()


# -- reasoning


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_text_lost(run, key):  # slime PR#330: reasoning_content ignored
    row = turns("a", "b")
    row["messages"][1][key] = "x"
    _, (sample,) = run(tokenizer(REASONS), row)
    assert shown(tokenizer(REASONS), sample)[1] == "<think>\nx\n</think>\n\nb<|im_end|>"
    preparation, samples = run(tokenizer(CHATML), row)
    assert (samples, [p.code for p in preparation.summary.problems]) == ([], ["HS303"])
    assert preparation.summary.problems[0].where.endswith(f"messages[1]: {key}")


def test_reasoning_of_history_is_the_templates_business(run):
    row = turns("a", "b", "c")
    row["messages"][1]["reasoning_content"] = "x"
    _, (sample,) = run(tokenizer(CHATML), row, for_generation=True)
    assert "x" not in tokenizer(CHATML).decode(sample.input_ids)


def test_thinking_removed_from_earlier_turns(run):  # trl#6361, gem#44: stored ids are the engine's prompt ids
    row = turns("a", "<think>x</think>b", "c", "<think>y</think>d")
    tok = tokenizer(STRIPS)
    preparation, samples = run(tok, row)
    assert samples == []
    (problem,) = preparation.summary.problems
    assert (problem.code, "--explode-turns" in problem.fix) == ("HS303", True)
    _, (first, second) = run(tok, row, explode_turns=True)
    assert (first.id, second.id) == ("c#0", "c#1")
    for sample, n in ((first, 1), (second, 3)):
        served = tok.apply_chat_template(row["messages"][:n], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert sample.input_ids[: len(served)].tolist() == served
        assert not sample.loss_mask[: len(served)].any()
        assert sample.loss_mask[len(served)] == 1
    assert shown(tok, first)[1] == "<think>x</think>b<|im_end|>"
    assert shown(tok, second)[1] == "<think>y</think>d<|im_end|>"
    assert "x" not in tok.decode(second.input_ids)


def test_reasoning_that_tags_would_lose_from_earlier_turns(run):
    row = turns("a", "b", "c", "d")
    row["messages"][1]["reasoning_content"], row["messages"][3]["reasoning_content"] = "x", "y"
    tok = tokenizer(TAGGED_REASONS)
    preparation, samples = run(tok, row)
    assert samples == []
    (problem,) = preparation.summary.problems
    assert (problem.code, "--explode-turns" in problem.fix) == ("HS303", True)
    _, exploded = run(tok, row, explode_turns=True)
    assert [shown(tok, s)[1] for s in exploded] == [f"<think>{t}</think>{a}<|im_end|>" for t, a in ("xb", "yd")]


def test_think_of_the_generation_prompt_inside_a_tag_is_not_supervised(run):
    tok = tokenizer(TAGGED)
    for explode in (False, True):
        _, (sample,) = run(tok, turns("a", "<think>\nx</think>b"), explode_turns=explode)
        prompt, answer = shown(tok, sample)
        assert prompt.endswith("assistant\n<think>\n")
        assert answer == "x</think>b<|im_end|>"


# -- one record a turn


@pytest.mark.parametrize("template", [CHATML, (TINY / "chat_template.jinja").read_text("utf-8")])
def test_one_turn_is_unchanged_but_for_the_id(run, template):
    _, (one,) = run(tokenizer(template), turns("a", "b"))
    _, (exploded,) = run(tokenizer(template), turns("a", "b"), explode_turns=True)
    assert (one.id, exploded.id) == ("c", "c#0")
    assert one.source_digest == exploded.source_digest
    assert one.provenance == exploded.provenance


@pytest.mark.parametrize("template", [CHATML, (TINY / "chat_template.jinja").read_text("utf-8")])
def test_each_turn_alone_is_supervised(run, template):
    tok = tokenizer(template)
    preparation, samples = run(tok, turns("a", "b", "c", "d", "e"), explode_turns=True)
    assert [(s.id, shown(tok, s)[1]) for s in samples] == [("c#0", "b<|im_end|>"), ("c#1", "d<|im_end|>")]
    assert preparation.summary.more_turns == 1
    assert "e" not in tok.decode(samples[1].input_ids).replace("user", "").replace("<|im_end|>", "")


def test_a_turn_that_cannot_be_proved_is_one_problem_and_the_others_stay(run):
    tok = tokenizer(THINK_PROMPT)
    preparation, samples = run(tok, turns("a", "b", "c", "<think>\nd"), explode_turns=True)
    assert [s.id for s in samples] == ["c#1"]
    assert preparation.summary.dropped == {"template-mismatch": 1}
    assert preparation.summary.problems[0].record == "c#0"
    assert "explode" not in preparation.summary.problems[0].fix


def test_turns_of_copies_and_of_ids_that_collide(run):
    tok = tokenizer(CHATML)
    taken = {"id": "c#0", "input_ids": [1, 2], "loss_mask": [0, 1]}
    preparation, samples = run(tok, turns("a", "b"), turns("a", "b"), turns("a", "z") | {"id": "c#0"}, taken,
                               explode_turns=True)  # fmt: skip
    assert [s.id for s in samples] == ["c#0", "c#0#0"]
    assert preparation.summary.dropped["duplicate"] == 1
    assert [p.code for p in preparation.summary.problems] == ["HS107"]


def test_token_rows_stay_as_they_are(run):
    row = {"id": "t", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
    _, (sample,) = run(tokenizer(CHATML), row, explode_turns=True)
    assert (sample.id, sample.loss_mask.tolist()) == ("t", [0, 1, 0, 1])


def test_every_prompt_is_one_for_generation(run):
    tok = tokenizer(CHATML)
    preparation, samples = run(tok, turns("a", "b", "c", "d", "e"), explode_turns=True, for_generation=True)
    assert [s.id for s in samples] == ["c#0", "c#1", "c#2"]
    assert not any(s.loss_mask.any() for s in samples)
    assert preparation.summary.answers_replaced == 2
    assert tok.decode(samples[1].input_ids).count("<|im_start|>user") == 2


def test_truncation_inside_the_only_assistant_turn(run):
    tok = tokenizer(CHATML)
    _, (whole,) = run(tok, turns("a", "one two three four"))
    n = int(whole.loss_mask.argmax()) + 2
    preparation, (cut,) = run(tok, turns("a", "one two three four"), max_length=n)
    assert cut.input_ids.tolist() == whole.input_ids[:n].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:n].tolist()
    assert (cut.loss_mask.sum(), preparation.summary.truncated) == (2, 1)
    preparation, samples = run(tok, turns("a", "one two three four"), max_length=n - 2)
    assert (samples, dict(preparation.summary.dropped)) == ([], {"no-supervision-after-truncation": 1})


def test_an_id_that_its_turn_makes_too_long_is_said_by_the_preparation(run):
    tok = tokenizer(CHATML)
    preparation, samples = run(tok, turns("a", "b") | {"id": "x" * 1022}, turns("a", "b") | {"id": "y" * 1024},
                               explode_turns=True)  # fmt: skip
    assert [len(s.id) for s in samples] == [1024]
    (problem,) = preparation.summary.problems
    assert (problem.code, "1,026 bytes" in problem.got) == ("HS107", True)
    _, samples = run(tok, turns("a", "b") | {"id": "y" * 1024})
    assert len(samples) == 1


@pytest.mark.parametrize("more", ["", ', "n": 1'])
def test_half_a_character_in_the_text_of_arguments_is_called_by_its_name(more):
    call = {"function": {"name": "f", "arguments": f'{{"a": "\\ud800"{more}}}'}}
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}
    found = parse_row(Row(where="f: line 1", value=row))
    assert isinstance(found, list)
    assert [(p.code, "surrogate" in p.got) for p in found] == [("HS602", True)]
