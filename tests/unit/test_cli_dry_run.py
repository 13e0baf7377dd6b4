"""``extract --dry-run``: numbers, drops, two samples with what is supervised marked; nothing loaded or written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from hsformat.cli.commands import app
from hsformat.cli.output import guarded

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"


@pytest.fixture
def dry(monkeypatch, capsys, tmp_path):
    """Dry-run rows; return (exit code, stdout, stderr). Nothing is written beside them."""

    def run(rows: list[dict], *words: str) -> tuple[int, str, str]:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
        argv = ["hsformat", "extract", "--dry-run", "--model", str(MODEL), "--data", str(data), *words]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr("hsformat.extraction.find_extractor", None)  # no engine is so much as looked for
        capsys.readouterr()
        code = guarded(app)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]
        return code, out, err

    return run


def chat(*contents: str, **more: object) -> dict:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)], **more}


ROWS = [chat("hi", "yes"), chat("hi", "word " * 40), chat("hi", "yes"), chat("hi"), chat("a", "b", "c", "d")]


def test_text(dry):
    code, out, _ = dry(ROWS)
    assert code == 0
    assert "3 samples of 5 rows" in out
    assert "duplicate 1" in out
    assert "no-assistant-turn 1" in out
    assert "min " in out
    assert "p95 " in out
    assert out.count("\nsample 'c-") == 2
    assert "[[yes<|im_end|>]]" in out
    assert "\x1b" not in out


def test_colour_on_a_terminal_and_not_with_no_color(dry, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = dry(ROWS)
    assert "\x1b[1;32myes<|im_end|>" in out
    assert "[[yes" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = dry(ROWS)
    assert "[[yes<|im_end|>]]" in out


def test_json(dry):
    code, out, _ = dry([*ROWS, {"text": "x"}], "--format", "json", "--max-length", "64")
    facts = json.loads(out)
    assert (code, facts["exit_code"], facts["dry_run"]) == (1, 1, True)
    assert facts["preparation"]["dropped"] == {"duplicate": 1, "no-assistant-turn": 1, "unknown-format": 1}
    assert facts["preparation"]["truncated"] == 1
    assert [p["code"] for p in facts["problems"]] == ["HS603"]
    lengths = facts["lengths"]
    assert lengths["max"] == 64
    assert sum(lengths["histogram"]["counts"]) == 3
    assert lengths["min"] <= lengths["median"] <= lengths["p95"] <= 64
    assert 0 < facts["supervised_share"] < 1
    first = facts["samples"][0]
    assert [r["text"] for r in first["runs"] if r["supervised"]] == ["yes<|im_end|>"]
    assert len(facts["samples"]) == 2


def test_exit_codes_are_those_of_the_run(dry, monkeypatch):
    assert dry([chat("hi")])[0] == 1  # nothing to train on
    code, _, err = dry(ROWS, "--layers", "2,99")
    assert (code, "HS304" in err) == (1, True)
    monkeypatch.setattr(sys, "argv", ["hsformat", "extract", "--dry-run", "--model", str(MODEL), "--data", "none"])
    assert guarded(app) == 2


def test_control_characters_of_the_data_do_not_reach_the_terminal(dry):
    _, out, _ = dry([chat("hi", "\x1b[2Jred")])
    assert "\x1b" not in out
    assert "\\x1b[2Jred" in out


def test_generation_and_turns(dry):
    _, out, _ = dry(ROWS, "--generate", "4")
    assert "tokens of prompts" in out
    _, out, _ = dry(ROWS, "--explode-turns")
    assert "4 samples of 5 rows with 1 turns beyond one a row" in out


def test_without_a_dry_run_a_store_and_layers_are_needed(monkeypatch, capsys, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps(ROWS[0]))
    base = ["hsformat", "extract", "--model", str(MODEL), "--data", str(tmp_path / "d.jsonl")]
    for words in ([], ["--out", str(tmp_path / "o")], ["--layers", "1,2,3"]):
        monkeypatch.setattr(sys, "argv", [*base, *words])
        assert guarded(app) == 2
        assert "required" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["9007199254740993", '"\\ud800"', "NaN", "1e400", "-Infinity", '{"b": 1, "b": 2}', "[" * 100_000]
)
def test_template_arguments_that_no_record_can_hold_are_refused_before_anything_is_read(dry, cli, value):
    kwargs = f'{{"a": {value}}}' if not value.startswith("[[") else value
    code, _, err = dry(ROWS, "--template-kwargs", kwargs)
    assert (code, "--template-kwargs" in err) == (2, True)
    for command in ("extract", "estimate"):
        words = ("--model", "none", "--data", "none", "--layers", "eagle3", "--out", "none")
        code, _, err = cli(command, *words, "--template-kwargs", kwargs)
        assert (code, "--template-kwargs" in err) == (2, True)


def test_a_pipe_as_data(cli, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        words = ("--model", MODEL, "--data", tmp_path / "pipe", "--layers", "eagle3", "--out", tmp_path / "out")
        for command in (("extract",), ("extract", "--dry-run"), ("estimate",)):
            code, _, err = cli(*command, *words)
            assert (code, "a pipe" in err) == (1, True), command
    finally:
        os.close(writer)


def test_a_broken_template_is_said_once(dry, tmp_path):
    folder = tmp_path.with_name(tmp_path.name + "-model")
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    code, _, err = dry(ROWS, "--model", str(folder))
    assert (code, err.count("error HS602"), "change the conversation" in err) == (1, 1, False)


def test_text_that_turns_its_direction_round_is_escaped(dry):
    _, out, _ = dry([chat("hi", "\u202eevil\u2066x\u200f")])
    assert not set("\u202e\u2066\u200f") & set(out)
    assert "\\u202eevil\\u2066x\\u200f" in out
