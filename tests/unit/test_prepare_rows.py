"""Reading rows: what a file or a line can get wrong, each with its code and its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsformat.digests import digest_json
from hsformat.prepare.conversation import Conversation, TokenRow, parse_row
from hsformat.prepare.rows import Row, count_rows, read_rows
from hsformat.problems import ForeignFileError, Problem

GOOD = b'{"messages": [{"role": "user", "content": "hi"}]}'


def rows(tmp_path: Path, *lines: bytes) -> list[Row | Problem]:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert count_rows(path) == sum(1 for line in lines if line.strip())
    return list(read_rows(path))


def parsed(**value: object) -> Conversation | TokenRow | list[Problem]:
    return parse_row(Row(where="data.jsonl: line 1", value=value))


def codes(problems: object) -> list[str]:
    assert isinstance(problems, list), problems
    return [p.code for p in problems]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (GOOD[:31], "HS602"),  # cut in the middle
        (b'{"messages": "\xff\xfe"}', "HS602"),  # not UTF-8
        (b'{"messages": NaN}', "HS602"),
        (b'{"id": "a", "messages": [], "messages": []}', "HS602"),  # which one is meant depends on the reader
        (b'{"messages": "\\ud800"}', "HS602"),  # half a character
        (b'{"n": ' + b"9" * 5000 + b"}", "HS602"),
        (b"[" * 100_000, "HS602"),
        (b"17", "HS603"),
    ],
)
def test_bad_line_is_one_problem_and_the_rest_goes_on(tmp_path, line, code):
    first, bad, last = rows(tmp_path, GOOD, line, GOOD)
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert isinstance(bad, Problem)
    assert bad.code == code
    assert bad.where.endswith("data.jsonl: line 2")


def test_blank_lines_and_byte_order_mark_are_passed_over(tmp_path):
    (row,) = rows(tmp_path, b"\xef\xbb\xbf" + GOOD, b"", b"  \r")
    assert isinstance(row, Row)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[\n{}\n]"])
def test_useless_file_is_refused_at_once(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ForeignFileError) as e:
        read_rows(path)
    assert e.value.problems[0].code == ("HS603" if content.startswith(b"[") else "HS602")
    assert str(path) in e.value.problems[0].where


@pytest.mark.parametrize(("name", "code"), [("nothing.jsonl", "HS602"), (".", "HS603")])
def test_no_such_file_and_folder(tmp_path, name, code):
    for read in (read_rows, count_rows):
        with pytest.raises(ForeignFileError) as e:
            read(tmp_path / name)
        assert e.value.problems[0].code == code


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "value",
    [
        {"text": "hi"},
        {"messages": None},
        {"conversations": [{"from": "narrator", "value": "hi"}]},
        {"conversations": [{"from": "human", "value": ["hi"]}]},
        {"conversations": [{"from": "human", "role": "user", "value": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}], "messages": USER},
        {"messages": USER, "system": 7},
        {"messages": [{"role": "system", "content": "a"}, *USER], "system": "b"},
        {"messages": USER, "tools": "{}"},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": ["f()"]}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]},
        {"messages": USER, "input_ids": [1]},
        {"messages": []},
        {"messages": {"role": "user"}},
        {"messages": ["hi"]},
        {"messages": [{"role": "human", "content": "hi"}]},
        {"messages": [{"role": ["user"], "content": "hi"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user"}]},
        {"messages": USER, "tools": "search"},
        {"input_ids": [1, 2]},
        {"input_ids": "12", "loss_mask": [0]},
    ],
)
def test_unknown_format(value):
    assert codes(parsed(**value)) == ["HS603"]


def test_loss_mask_5147_for_4095_ids():  # the mask that was not cut with the ids
    problems = parsed(input_ids=[1] * 4095, loss_mask=[1] * 5147)
    assert codes(problems) == ["HS101"]
    assert "5147" in problems[0].got
    assert "4095" in problems[0].expected


def test_all_problems_of_a_row_are_returned():
    assert codes(parsed(id="", input_ids=[1, "2", 3], loss_mask=[0, 2])) == ["HS107", "HS101", "HS105", "HS104"]
    assert codes(parsed(input_ids=[], loss_mask=[])) == ["HS102"]
    assert codes(parsed(input_ids=[True], loss_mask=[0.0])) == ["HS105", "HS104"]


@pytest.mark.parametrize(
    ("given", "rid"),
    [
        ({"id": "a", "conversation_id": "b"}, "a"),
        ({"id": None, "conversation_id": 7}, "7"),
        ({}, "c-" + digest_json({"messages": USER})[7:23]),
    ],
)
def test_row_ids(given, rid):
    conversation = parsed(messages=USER, **given)
    assert isinstance(conversation, Conversation)
    assert conversation.id == rid


@pytest.mark.parametrize("bad", ["", "é" * 513, 1.5, True, ["a"]])
def test_bad_id(bad):
    assert codes(parsed(id=bad, messages=USER)) == ["HS107"]


def test_ignored_keys_are_named_and_do_not_change_the_derived_id():
    a, b = parsed(messages=USER), parsed(messages=USER, source="web", score=12345678901234567890)
    assert isinstance(a, Conversation)
    assert isinstance(b, Conversation)
    assert (a.id, b.ignored) == (b.id, ("source", "score"))


def test_number_that_json_does_not_keep():
    assert codes(parsed(messages=[{**USER[0], "n": 2**60}])) == ["HS602"]


def test_demo_prompts_are_what_they_promise():
    path = Path(__file__).parents[2] / "examples" / "data" / "demo_prompts.jsonl"
    conversations = [parse_row(row) for row in read_rows(path) if isinstance(row, Row)]
    assert all(isinstance(c, Conversation) and c.messages[-1]["role"] == "user" for c in conversations)
    assert len({c.id for c in conversations}) == len(conversations) == 48
    assert json.loads(path.read_text("utf-8").splitlines()[0]).keys() == {"id", "messages"}
