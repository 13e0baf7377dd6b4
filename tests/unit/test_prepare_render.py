"""Rendering and its mask: templates of every kind met in the field, over one real tokenizer of 472 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BatchEncoding

from hsformat.digests import digest_bytes
from hsformat.prepare.conversation import Conversation
from hsformat.prepare.render import Rendered, Renderer
from hsformat.prepare.tokenizer import EndOfTurn, flat_ids, load_tokenizer
from hsformat.problems import ForeignFileError, HsError, Problem, Severity

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
BOS, START, END = 0, 1, 2

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (  # SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS_THINKING = CHATML.replace(
    "m['content'] +", "(m['content'].split('</think>')[-1] if not loop.last else m['content']) +"
)
THINK_PROMPT = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


def tagged(body: str) -> str:
    """Return ChatML whose assistant turns are rendered by ``body``."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        + body
        + "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def tokenizer(template: str | None = None, **changes: Any) -> Any:
    tok = load_tokenizer(TINY)
    if template is not None:
        tok.chat_template = template
    for name, value in changes.items():
        setattr(tok, name, value)
    return tok


def talk(*contents: str, first: str = "user") -> Conversation:
    """Return a conversation whose turns alternate, from ``first``."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return Conversation(id="c", where="f: line 1", content=b"", ignored=(), messages=messages, tools=None)


def spans(tok: Any, conversation: Conversation, **kwargs: Any) -> list[str]:
    """Return the text of each supervised run."""
    made = Renderer(tok, template_kwargs=kwargs).conversation(conversation)
    assert isinstance(made, Rendered), made
    mask = np.array([0, *made.loss_mask, 0])
    edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2)
    return [tok.decode(made.input_ids[a:b]) for a, b in edges]


def refused(tok: Any, conversation: Conversation) -> Problem:
    found = Renderer(tok, template_kwargs={}).conversation(conversation)
    assert isinstance(found, Problem), found
    assert (found.code, found.severity, found.record) == ("HS303", Severity.ERROR, "c")
    return found


# -- turn by turn


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
def test_mask_all_zeros_for_stock_templates(template):  # transformers#34172, marin#7237
    assert spans(tokenizer(template), talk("hi", "yes \n", "and", "no")) == ["yes \n<|im_end|>", "no<|im_end|>"]


def test_end_of_turn_is_in_the_mask_and_the_newline_after_it_is_not():  # SpecForge adds it
    made = Renderer(tokenizer(CHATML), template_kwargs={}).conversation(talk("a", "b"))
    assert isinstance(made, Rendered)
    assert made.input_ids[-2] == END
    assert made.loss_mask[-3:] == [1, 1, 0]
    assert made.template_digest == digest_bytes((CHATML.encode(),))


def test_empty_answer_supervises_its_end_alone():
    assert spans(tokenizer(CHATML), talk("a", "", "b", "c")) == ["<|im_end|>", "c<|im_end|>"]


def test_template_that_strips_earlier_thinking_is_refused():  # slime PR#330, trl#6361
    conversation = talk("a", "<think>x</think>b", "c", "<think>y</think>d")
    problem = refused(tokenizer(STRIPS_THINKING), conversation)
    assert "line 1: messages[1]: token " in problem.where
    assert "'<'" in problem.expected
    assert spans(tokenizer(STRIPS_THINKING), talk("a", "<think>x</think>b")) == ["<think>x</think>b<|im_end|>"]


def test_generation_prompt_with_think_is_not_supervised():
    assert spans(tokenizer(THINK_PROMPT), talk("a", "<think>\nx</think>b")) == ["x</think>b<|im_end|>"]
    assert "messages[1]: token" in refused(tokenizer(THINK_PROMPT), talk("a", "b")).where


def test_assistant_turn_first_is_refused_where_no_tag_shows_it():
    for template in (CHATML, DEFAULT_SYSTEM):
        assert refused(tokenizer(template), talk("a", "b", first="assistant")).where.endswith("messages[0]")


PLAIN = "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"


def test_template_without_end_of_turn_supervises_the_content():
    plain = PLAIN + "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    assert spans(tokenizer(plain), talk("a", "b", "c", "d\n\n")) == ["b", "d"]


def test_template_that_closes_a_turn_only_when_another_follows():
    closes = CHATML.replace(
        "+ '<|im_end|>\n' }}", "}}{% if not loop.last or m['role'] == 'user' %}{{ '<|im_end|>\n' }}{% endif %}"
    )
    assert spans(tokenizer(closes), talk("a", "b", "c", "d")) == ["b<|im_end|>", "d"]


def test_closing_token_that_no_configuration_names_is_learned():
    tok = tokenizer(CHATML, eos_token="<pad>", name_or_path="")
    assert spans(tok, talk("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]


def test_special_token_after_the_end_of_turn_is_not_supervised():  # Llama-2: </s><s>
    tok = tokenizer(CHATML.replace("<|im_end|>\n", "<|im_end|><|endoftext|>"))
    assert spans(tok, talk("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]


def test_template_without_a_generation_prompt():
    with_header = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    )
    for template in (with_header, PLAIN):
        assert refused(tokenizer(template), talk("a", "b")).where.endswith("messages[1]")
    llama2 = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] + '<pad>' }}"
        "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    assert spans(tokenizer(llama2), talk("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]


def test_token_across_the_generation_prompt_is_refused():
    glued = CHATML.replace("+ '\n' + m['content']", "+ ' ' + m['content']").replace("assistant\n'", "assistant '")
    assert "token" in refused(tokenizer(glued), talk("a", "the")).where


def test_conversation_that_the_template_rejects():
    strict = "{% if messages | length > 2 %}{{ raise_exception('two turns') }}{% endif %}" + CHATML
    assert "two turns" in refused(tokenizer(strict), talk("a", "b", "c", "d")).got
    assert spans(tokenizer(strict), talk("a", "b")) == ["b<|im_end|>"]
    assert "TypeError" in refused(tokenizer(CHATML.replace("m['content']", "m['content'] + 1")), talk("a", "b")).got


@pytest.mark.parametrize(
    ("bomb", "name"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{{ messages[0].content * 99999999999999 }}", "MemoryError"),
    ],
)
def test_template_that_dies_of_anything_is_refused(bomb, name):
    assert name in refused(tokenizer(bomb + CHATML), talk("a", "b")).got


def test_no_double_bos():
    tok = tokenizer("{{ '<|endoftext|>' }}" + CHATML)
    made = Renderer(tok, template_kwargs={}).conversation(talk("a", "b"))
    assert isinstance(made, Rendered)
    assert made.input_ids[:2] == [BOS, START]
    assert made.input_ids.count(BOS) == 1


# -- generation tags

ANSWER = "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"


@pytest.mark.parametrize(
    "body",
    [
        ANSWER,
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",  # speculators 0.3
        "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}",  # SpecForge
        "{%- generation -%}\n  {{ m['content'] + '<|im_end|>\n' }}\n  {%- endgeneration -%}\n",
        "\n  {% generation %}\n{{ m['content'] }}{{ '<|im_end|>' }}{% endgeneration %}\n{{ '\n' }}",
    ],
)
def test_tags_then_the_end_rule(body):
    assert spans(tokenizer(tagged(body)), talk("a", " b ", "c", "d\n")) == [" b <|im_end|>", "d\n<|im_end|>"]


def test_mask_runs_to_the_end_when_a_span_ends_at_token_0():  # transformers#47325
    first = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ '<pad>' + m['content'] }}{% endif %}{% endfor %}"
    )
    made = Renderer(tokenizer(first), template_kwargs={}).conversation(talk("A", "user", first="assistant"))
    assert isinstance(made, Rendered)
    assert made.loss_mask[0] == 1
    assert not any(made.loss_mask[1:])


def test_mask_runs_to_the_end_when_a_span_ends_in_white_space():  # transformers#47325
    body = "{% generation %}{{ m['content'] + ' \n' }}{% endgeneration %}{{ '<|im_end|>' }}"
    assert spans(tokenizer(tagged(body)), talk("a", "b", "c")) == ["b \n<|im_end|>"]


STRIPPED_ANSWER = ANSWER.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])")


def test_tags_of_a_template_that_strips_earlier_thinking():  # the target never wrote "b" right after its prompt
    conversation = talk("a", "<think>x</think>b", "c", "<think>y</think>d")
    problem = refused(tokenizer(tagged(STRIPPED_ANSWER)), conversation)
    assert "line 1: messages[1]: token " in problem.where
    assert "--explode-turns" in problem.fix
    assert "tags" not in problem.fix
    assert spans(tokenizer(tagged(STRIPPED_ANSWER)), talk("a", "b", "c", "<think>y</think>d")) == [
        "b<|im_end|>", "<think>y</think>d<|im_end|>"
    ]  # fmt: skip


def test_tags_of_a_template_that_strips_what_a_later_question_makes_history():
    since = "messages | rejectattr('role', 'ne', 'user') | list | length"  # thinking stays up to the next question
    body = ANSWER.replace("m['content']", f"(m['content'] if {since} == 1 else m['content'].split('</think>')[-1])")
    conversation = talk("a", "<think>x</think>b")
    conversation.messages.append({"role": "tool", "content": "t"})
    conversation.messages.append({"role": "assistant", "content": "<think>y</think>d"})
    assert len(spans(tokenizer(tagged(body)), conversation)) == 2
    conversation.messages.extend(talk("c", "e").messages)
    assert "--explode-turns" in refused(tokenizer(tagged(body)), conversation).fix


def test_tags_of_the_last_turn_alone_leave_stripped_history_unsupervised():
    strips = (
        "{% if loop.last %}" + ANSWER + "{% else %}{{ m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endif %}"
    )
    conversation = talk("a", "<think>x, and long</think>b", "c", "<think>y</think>d")
    assert spans(tokenizer(tagged(strips)), conversation) == ["<think>y</think>d<|im_end|>"]


def test_tags_around_a_turn_that_its_generation_prompt_does_not_begin():
    thinks = tagged(ANSWER).replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    assert spans(tokenizer(thinks), talk("a", "<think>\nx</think>b")) == ["x</think>b<|im_end|>"]
    problem = refused(tokenizer(thinks), talk("a", "b"))
    assert "messages[1]: token" in problem.where
    assert "--template-kwargs" in problem.fix


def test_tags_closing_token_comes_from_the_template():
    body = "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    assert spans(tokenizer(tagged(body), eos_token="<pad>", name_or_path=""), talk("a", "b")) == ["b<|im_end|>"]


def test_tag_in_a_comment_is_no_tag():
    assert spans(tokenizer("{#- {% generation %} -#}" + CHATML), talk("a", "b")) == ["b<|im_end|>"]


@pytest.mark.parametrize(
    "body",
    [
        "{% set x %}{% generation %} {{ m['content'] }} {% endgeneration %}{% endset %}{{ x | trim }}",
        "{{ 'Wri' }}{% generation %}{{ 'te' + m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    ],
)
def test_tags_that_cannot_be_placed_are_refused(body):
    refused(tokenizer(tagged(body)), talk("a", "the"))


def test_content_with_marks_is_refused():
    refused(tokenizer(tagged(ANSWER)), talk("a", "b\ufdd0c"))


def test_slow_tokenizer_is_rendered_turn_by_turn():
    class Slow:
        is_fast = False

        def __init__(self) -> None:
            self.tok = tokenizer(tagged(ANSWER))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tok, name)

    assert spans(Slow(), talk("a", "b")) == ["b<|im_end|>"]


# -- tokenizers


def tensor(ids: list[Any]) -> Any:
    import torch

    return torch.tensor(ids)


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        lambda ids: [ids],
        lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
        lambda ids: BatchEncoding({"input_ids": [ids], "attention_mask": [[1] * len(ids)]}),
        pytest.param(lambda ids: tensor([ids]), marks=pytest.mark.needs("torch")),
        pytest.param(lambda ids: BatchEncoding({"input_ids": tensor([ids])}), marks=pytest.mark.needs("torch")),
        np.array,
    ],
)
def test_dump_skips_every_conversation_on_newer_transformers(wrap):  # Model-Optimizer PR#2172
    class Wrapping:
        def __init__(self) -> None:
            self.tok = tokenizer(CHATML)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tok, name)

        def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
            return wrap(self.tok.apply_chat_template(messages, **{**kwargs, "return_dict": True})["input_ids"])

    same = [Renderer(t, template_kwargs={}).conversation(talk("a", "b")) for t in (Wrapping(), tokenizer(CHATML))]
    assert same[0] == same[1]


@pytest.mark.parametrize("value", ["text", [[1], [2]], [1.5], {"ids": [1]}, None])
def test_flat_ids_refuses_what_is_not_one_sequence(value):
    with pytest.raises(HsError) as e:
        flat_ids(value)
    assert e.value.problems[0].code == "HS603"


def test_no_chat_template_and_reserved_arguments():
    tok = tokenizer()
    tok.chat_template = None
    with pytest.raises(HsError) as e:
        Renderer(tok, template_kwargs={}).conversation(talk("a", "b"))
    assert e.value.problems[0].code == "HS303"
    with pytest.raises(HsError):
        Renderer(tok, template_kwargs={"tokenize": False})


def test_template_arguments_reach_the_template():
    tok = tokenizer("{% if mood is defined %}{{ mood }}{% endif %}" + CHATML)
    made = Renderer(tok, template_kwargs={"mood": "cold"}).prompt(talk("a"))
    assert isinstance(made, Rendered)
    assert tok.decode(made.input_ids).startswith("cold<|im_start|>user")
    assert not any(made.loss_mask)


def test_turn_closed_by_the_next_header_of_the_generation_config(tmp_path):  # GLM: eos includes <|user|>
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    tok = tokenizer(name_or_path=str(tmp_path))
    end = EndOfTurn(tok, example=[])
    assert end.closing == {1, 2}
    assert end.find([50, 51, START, 52], 0, 2) == 3
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ForeignFileError):
        EndOfTurn(tok, example=[])


@pytest.mark.parametrize("files", [None, {}, {"tokenizer.json": "{", "tokenizer_config.json": "{}"}])
def test_load_tokenizer_refuses_a_folder_without_one(tmp_path, files):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ForeignFileError) as e:
        load_tokenizer(folder)
    assert e.value.problems[0].code == "HS602"


def test_load_tokenizer_runs_no_code_of_the_folder(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    with pytest.raises(ForeignFileError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_transformers_missing_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(HsError) as e:
        load_tokenizer(TINY)
    assert "pip install 'hsformat[transformers]'" in e.value.problems[0].fix


def test_a_chat_template_that_is_no_text(tmp_path):
    for given in ("5", '{"default": 5}'):
        for file in TINY.glob("tokenizer*.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = (TINY / "tokenizer_config.json").read_text("utf-8").rstrip().removesuffix("}")
        (tmp_path / "tokenizer_config.json").write_text(f'{config}, "chat_template": {given}}}')
        with pytest.raises(ForeignFileError) as e:
            load_tokenizer(tmp_path)
        assert e.value.problems[0].code == "HS602"
        assert "chat_template" in e.value.problems[0].where or "5" in e.value.problems[0].got


@pytest.mark.parametrize(("text", "got"), [("[" * 100_000, "recursion"), ("[]", "a JSON list")])
def test_a_generation_config_that_is_none_says_what_was_found(tmp_path, text, got):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ForeignFileError) as e:
        EndOfTurn(tokenizer(name_or_path=str(tmp_path)), example=[])
    (problem,) = e.value.problems
    assert (problem.code, got in problem.got) == ("HS602", True)


@pytest.mark.parametrize("broken", ["{% if %}", "{{ 1 | no_such_filter }}", "{% endfor %}"])
def test_a_template_that_is_no_program_is_one_error_for_all_rows(broken):
    renderer = Renderer(tokenizer("line\n" + broken + CHATML), template_kwargs={})
    for render in (renderer.conversation, renderer.turn, renderer.prompt):
        with pytest.raises(ForeignFileError) as e:
            render(talk("a", "b"))
        (problem,) = e.value.problems
        assert (problem.code, problem.record, "line 2" in problem.where) == ("HS602", None, True)
        assert "conversation" not in problem.fix


@pytest.mark.parametrize(
    "value", [2**53 + 1, [{"a": -(2**60)}], "\ud800", {"\ud800": 1}, float("nan"), float("inf"), {1}, b"a"], ids=repr
)
def test_template_arguments_that_no_record_can_hold(value):
    with pytest.raises(HsError) as e:
        Renderer(tokenizer(CHATML), template_kwargs={"mood": value})
    assert (e.value.problems[0].code, e.value.problems[0].where) == ("HS303", "template arguments")
