"""Text of files in problems and in output: nothing in it looks like a line of hsformat's own."""

from __future__ import annotations

import io
import sys

import pytest
from factories import tiny_contract, tiny_record

from hsformat.printable import accept_all_text
from hsformat.problems import problem
from hsformat.testing import build_store


@pytest.mark.parametrize("field", ["where", "got", "expected", "fix"])
@pytest.mark.parametrize("evil", ["A\nerror HS999 x", "A\r\n  fix  x", "\x1b[2J", "\u202e", "\ud800", "\u2028x", "\0"])
def test_control_characters_are_escaped(field, evil):
    texts = {"where": "w", "got": "g", "expected": "e", "fix": "f", field: evil}
    p = problem("HS603", **texts)
    assert getattr(p, field).isprintable()
    assert len(str(p).splitlines()) == 5
    assert str(p).encode("utf-8")
    assert p.at(evil).where.isprintable()


def test_other_text_stays_as_it_is():
    for text in ("", "d2, d15", "Zürich ≥ 日本語 🤗", "C:\\new", "last lines:\n    RuntimeError: x\n    at y"):
        assert problem("HS602", where="w", got=text, expected="e").got == text
    assert problem("HS602", where="w", got="x:\n    a\nerror HS999", expected="e").got == "x:\n    a\\nerror HS999"


def test_long_values_are_cut():
    got = problem("HS602", where="w", got=f"id {'9' * 4299}, a depth", expected="e").got
    assert len(got) < 300
    assert got.startswith("id 999")
    assert got.endswith("9, a depth")
    long = "word " * 10_000
    assert len(problem("HS602", where=long, got=long, expected=long, fix=long).fix) < 4100
    path = "/" + "x" * 1000
    assert problem("HS602", where=path, got="g", expected="e").where == path


def test_a_stream_takes_what_its_encoding_lacks(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    accept_all_text()
    print("\ud800 é", file=out, flush=True)
    assert out.buffer.getvalue() == b"\\ud800 \\xe9\n"


def test_a_name_in_a_store_makes_no_line_of_its_own(cli, tmp_path):
    contract = tiny_contract(target={"name": "A\n    B\nerror HS999 x"})
    build_store(tmp_path / "x.hs.zarr", contract, [tiny_record(contract)])
    code, out, _ = cli("info", tmp_path / "x.hs.zarr")
    assert code == 0
    assert "A\\n    B\\nerror HS999 x" in out
