"""``hsformat engines probe``: what is written and said, exit codes, no traceback."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hsformat.cli.commands import app
from hsformat.cli.output import guarded
from hsformat.engines.probing import GROUP
from hsformat.engines.profile import load_profile
from hsformat.engines.table import capture_row
from hsformat.problems import ResolveError

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
PROBES = {
    **PYPROJECT["project"]["entry-points"][GROUP],
    "differs": "fake_engines:SaysVllm",
    "new": "fake_engines:SaysNewVllm",
    "dead": "fake_engines:DeadProbe",
    "none": "fake_engines:NoProbe",
    "broken": "fake_engines:BrokenProbe",
    "absent": "no_such_module:Probe",
}


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command in this process; return (exit code, stdout, stderr)."""
    entries = [EntryPoint(name=k, value=v, group=GROUP) for k, v in PROBES.items()]
    monkeypatch.setattr("hsformat.engines.probing.entry_points", lambda group: entries if group == GROUP else [])

    def run(engine: str, *words: object) -> tuple[int, str, str]:
        out = () if "--out" in words else ("--out", tmp_path / "profile.json")
        argv = ["hsformat", "engines", "probe", "--engine", engine, *map(str, out), *map(str, words)]
        monkeypatch.setattr("sys.argv", argv)
        capsys.readouterr()
        code = guarded(app)
        said, err = capsys.readouterr()
        assert "Traceback (most" not in err
        return code, said, err

    return run


@pytest.mark.needs("torch")
def test_a_profile_makes_a_new_version_known(cli, tmp_path):
    code, out, err = cli("new")
    assert code == 0
    assert "vllm 99.1.0, LlamaForCausalLM: proved" in out
    assert "0 to N" in out
    assert "no ids, 3 slots, 12 layers -> [d2, d6, d9]" in err
    profile = load_profile(tmp_path / "profile.json")
    assert capture_row("vllm", "99.1.0", "LlamaForCausalLM", profile).shift == 0
    with pytest.raises(ResolveError):
        capture_row("vllm", "99.1.0", "LlamaForCausalLM")


@pytest.mark.needs("torch")
def test_json_alone_on_stdout(cli):
    code, out, err = cli("new", "--format", "json")
    told = json.loads(out)
    assert (code, told["exit_code"], told["problems"]) == (0, 0, [])
    assert told["profile"]["captures"]["evidence"] == "proved"
    assert "layers ->" in err


@pytest.mark.needs("torch")
def test_what_differs_from_the_table_is_said_and_the_profile_counts(cli, tmp_path):
    code, out, _ = cli("differs")
    assert code == 0
    for name in ("shift", "lowest", "deepest"):
        assert f"LlamaForCausalLM: {name}" in out
    assert "warning HS410" in out
    profile = load_profile(tmp_path / "profile.json")
    assert capture_row("vllm", "0.32.0", "LlamaForCausalLM", profile).shift == 1


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vllm", "pip install vllm"),
        ("sglang", "pip install sglang"),
        ("dead", "RuntimeError: no device here"),
        ("none", "NoProbe"),
        ("broken", "libfake.so"),
        ("absent", "No module named 'no_such_module'"),
        ("trt", "one of absent, broken"),
    ],
)
def test_a_probe_that_cannot_be_run_ends_with_2_and_says_why(cli, tmp_path, engine, said):
    code, out, err = cli(engine)
    assert (code, out) == (2, "")
    assert "HS410" in err
    assert said in err
    assert list(tmp_path.iterdir()) == []
    code, out, _ = cli(engine, "--format", "json")
    assert code == 2
    assert [p["code"] for p in json.loads(out)["problems"]] == ["HS410"]


def test_a_place_that_cannot_be_written_is_refused_before_the_engine_starts(cli, tmp_path):
    for out in (tmp_path / "no" / "p.json", tmp_path):
        code, _, err = cli("new", "--out", out)
        assert code == 2
        assert "layers ->" not in err


@pytest.mark.needs("torch")
def test_an_architecture_that_is_none(cli, monkeypatch):
    monkeypatch.setattr("hsformat_extractors.probes.vllm.VllmProbe.version", lambda self: "0.32.0")
    code, _, err = cli("vllm", "--architecture", "NoSuchModel")
    assert code == 2
    assert "NoSuchModel" in err


@pytest.mark.parametrize("words", [("--time-limit", "0"), ("--dtype", "int8")])
def test_bad_options(cli, words):
    assert cli("new", *words)[0] == 2
