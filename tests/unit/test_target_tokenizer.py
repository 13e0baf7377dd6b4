"""Digests of tokenizer and chat template."""

from __future__ import annotations

import json

import pytest

from hsformat.problems import ForeignFileError
from hsformat.target.tokenizer import chat_template, tokenizer_digest

TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "Ġ日本": 1, "\U0001f600": 2}, "merges": ["a b", "Ġ 日本"]},
}  # fmt: skip


def digest(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return tokenizer_digest(folder)


def test_what_a_caller_sets_does_not_matter(tmp_path):
    base = digest(tmp_path / "a", tokenizer__json=TOKENIZER)
    noise = {"truncation": {"max_length": 9}, "padding": {"pad_id": 1}, "version": "2.0"}
    assert digest(tmp_path / "b", tokenizer__json={**TOKENIZER, **noise}) == base
    assert digest(tmp_path / "c", tokenizer__json=json.dumps(TOKENIZER, indent=3, ensure_ascii=False)) == base
    pairs = {**TOKENIZER["model"], "merges": [["a", "b"], ["Ġ", "日本"]], "ignore_merges": False, "dropout": None}
    assert digest(tmp_path / "d", tokenizer__json={**TOKENIZER, "model": pairs}) == base


@pytest.mark.parametrize(
    "model",
    [{"vocab": {"a": 1}}, {"merges": ["Ġ 日本", "a b"]}, {"ignore_merges": True}, {"unk_token": "a"}],
)
def test_what_changes_ids_changes_the_digest(tmp_path, model):
    base = digest(tmp_path / "a", tokenizer__json=TOKENIZER)
    assert digest(tmp_path / "b", tokenizer__json={**TOKENIZER, "model": {**TOKENIZER["model"], **model}}) != base
    assert digest(tmp_path / "c", tokenizer__json={**TOKENIZER, "added_tokens": [{"id": 3}]}) != base


def test_other_forms_of_a_tokenizer(tmp_path):
    first = digest(tmp_path / "a", vocab__json={"a": 0}, merges__txt="a b\n")
    assert digest(tmp_path / "b", vocab__json={"a": 0}, merges__txt="a c\n") != first
    assert digest(tmp_path / "c", tokenizer__model="\x00x") != first
    # tokenizer.json comes first
    assert digest(tmp_path / "a", tokenizer__json=TOKENIZER) == digest(tmp_path / "d", tokenizer__json=TOKENIZER)


@pytest.mark.parametrize(
    "files",
    [{}, {"vocab__json": {}}, {"tokenizer__json": '{"a": "\\ud800"}'}, {"tokenizer__json": '{"\\ud800": 1}'},
     {"tokenizer__json": '{"a": 123456789012345678901}'}, {"tokenizer__json": "{"}, {"tokenizer__json": "[]"}],
)  # fmt: skip
def test_no_or_broken_tokenizer(tmp_path, files):
    with pytest.raises(ForeignFileError) as e:
        digest(tmp_path / "a", **files)
    assert [p.code for p in e.value.problems] == ["HS602"]


def test_template_is_looked_for_as_transformers_does(tmp_path):
    assert chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "third"}')
    assert chat_template(tmp_path) == "third"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template(tmp_path) == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert chat_template(tmp_path) == "first"


@pytest.mark.parametrize(
    ("value", "code"),
    [([{"name": "rag", "template": "x"}], "HS603"), ([], "HS603"), (3, "HS602"), (["x"], "HS602"), ("\ud800", "HS602")],
)
def test_template_that_cannot_be_told(tmp_path, value, code):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ForeignFileError) as e:
        chat_template(tmp_path)
    assert [p.code for p in e.value.problems] == [code]
