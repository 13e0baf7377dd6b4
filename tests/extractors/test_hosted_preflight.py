"""What the extractors of vLLM and SGLang refuse before anything is imported, and what they read of a folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))

from toys import GREEDY, TINY_LLAMA, ToyExtractor, request_for

from hsformat.engines import known_versions
from hsformat.engines.profile import load_profile
from hsformat.extraction import available, find_extractor
from hsformat.problems import HsError
from hsformat.record import Generation
from hsformat_extractors._stops import end_of_turn_ids, special_ids
from hsformat_extractors.hosted.options import SHARED, without_secrets
from hsformat_extractors.hosted.staging import MIB
from hsformat_extractors.sglang import SglangExtractor
from hsformat_extractors.vllm import VllmExtractor

PROFILES = Path(__file__).parents[1] / "data" / "profiles"
KNOWN = {"vllm": "0.32.0", "sglang": "0.5.23"}
CLASSES = {"vllm": VllmExtractor, "sglang": SglangExtractor}


def preflight(engine, *keys, version=None, architecture=None, generation=None, **options):
    """Return what is refused where a version of an engine is installed."""

    class Installed(CLASSES[engine]):
        def version(self):
            return version or KNOWN[engine]

    request = request_for(*keys, **({"generation": generation} if generation else {}), **options)
    if architecture is not None:
        target = request.target.model_copy(update={"architecture": architecture})
        request = dataclasses.replace(request, target=target)
    return [p for p in Installed().preflight(request) if p.severity == "error"]


@pytest.mark.parametrize("engine", KNOWN)
def test_a_request_that_can_be_done_is_not_refused(engine):
    assert preflight(engine, "d2", "d4", "d8") == []
    assert preflight(engine, "d4", engine_args='{"kv_cache_dtype": "auto", "quantization": null}') == []
    assert preflight(engine, "d4", server="http://host:1", api_key="KEY") == []
    assert [p.where for p in preflight(engine, "d4", api_key="KEY")] == ["option api_key"]
    assert preflight(engine, "d2", "d8n", generation=GREEDY, tensor_parallel=8, engine_args='{"x": 1}') == []


@pytest.mark.parametrize("engine", KNOWN)
def test_an_engine_that_is_not_installed_is_named_with_the_command_that_brings_it(engine):
    extractor = find_extractor(engine)
    assert set(KNOWN) < set(available())
    extractor.version = lambda: None
    (found,) = extractor.preflight(request_for("d4"))
    assert (found.code, found.got) == ("HS410", f"not installed: {engine}")
    assert f"pip install 'hsformat[{engine}]'" in found.fix


def test_neither_torch_nor_an_engine_is_imported():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from toys import request_for, toy\n"
        "from hsformat.extraction import find_extractor\n"
        "for name in ('vllm', 'sglang'): find_extractor(name).preflight(request_for('d4'))\n"
        "extractor = toy('Honest')()\nextractor.load(request_for('d4'))\nextractor.close()\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.24.0"), ("sglang", "0.5.22")])
def test_an_older_version_is_refused(engine, version):
    (found,) = preflight(engine, "d4", version=version)
    assert (found.code, found.got) == ("HS410", f"{engine} {version}")


@pytest.mark.parametrize("engine", KNOWN)
def test_a_version_that_nobody_has_looked_at_is_refused_unless_a_profile_proves_it(engine, tmp_path):
    (found,) = preflight(engine, "d4", version="99.0")
    assert found.code == "HS410"
    assert "hsformat engines probe" in found.fix
    assert "--option engine_profile=" in found.fix
    offered = found.expected.removeprefix("one of ").split(", ")
    assert offered == [v for v in known_versions(engine) if Version(v) >= Version(CLASSES[engine].minimum)]
    proved = load_profile(PROFILES / f"{engine}-{KNOWN[engine]}-LlamaForCausalLM.json")
    data = json.loads(json.dumps(proved.to_json()).replace(f'"{KNOWN[engine]}"', '"99.0"'))
    profile = type(proved).model_validate_json(json.dumps(data))
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile.to_json(), "digest": profile.digest}))
    assert preflight(engine, "d4", version="99.0", engine_profile=path) == []
    path.write_text("{")
    (found,) = preflight(engine, "d4", version="99.0", engine_profile=path)
    assert (found.code, found.where.startswith(f"option engine_profile: {path}")) == ("HS602", True)


@pytest.mark.parametrize("engine", KNOWN)
def test_an_architecture_without_a_row_is_refused(engine):
    (found,) = preflight(engine, "d4", architecture="MadeUpForCausalLM")
    assert (found.code, found.got) == ("HS410", "MadeUpForCausalLM")


@pytest.mark.parametrize(
    ("engine", "architecture", "keys", "refused"),
    [
        ("vllm", None, ("d0", "d8"), []),
        ("sglang", None, ("d0", "d4", "d8"), ["capture d0"]),
        ("sglang", None, ("d7", "d8", "d8n"), []),
        ("vllm", "DeepseekV32ForCausalLM", ("d0", "d4", "d8", "d8n"), ["capture d0", "capture d8", "capture d8n"]),
        ("sglang", "KimiK25ForConditionalGeneration", ("d1", "d4", "d6"), ["captures"]),  # sglang PR#25454
        ("sglang", "KimiK25ForConditionalGeneration", ("d2", "d4", "d6"), []),
    ],
)
def test_depths_that_the_engine_cannot_capture_are_refused(engine, architecture, keys, refused):
    found = preflight(engine, *keys, architecture=architecture)
    assert [p.where for p in found] == refused
    assert {p.code for p in found} <= {"HS410"}


@pytest.mark.parametrize(
    ("engine", "argument"),
    [
        ("vllm", {"enable_prefix_caching": True}),  # vllm#44485
        ("vllm", {"speculative_config": {"method": "eagle3"}}),
        ("vllm", {"pipeline_parallel_size": 2}),  # vllm PR#45985
        ("vllm", {"dtype": "half"}),
        ("vllm", {"tp_size": 2}),
        ("vllm", {"quantization": "fp8"}),  # states of another model than the contract describes
        ("vllm", {"hf_overrides": {"rope_theta": 20.0}}),
        ("vllm", {"load_format": "dummy"}),
        ("sglang", {"quantization": "fp8"}),
        ("sglang", {"json_model_override_args": "{}"}),
        ("sglang", {"disable_radix_cache": False}),  # sglang#4997, PR#6551
        ("sglang", {"speculative_algorithm": "EAGLE3"}),  # sglang#26163
        ("sglang", {"pp_size": 2}),  # sglang PR#39644
        ("sglang", {"disable_prefill_cuda_graph": False}),
        ("sglang", {"kv-cache-dtype": "fp8_e5m2"}),  # the flag's spelling, which no rule has
        ("vllm", {"--quantization": "fp8"}),
    ],
)
def test_arguments_under_which_states_are_lost_are_refused(engine, argument):
    (found,) = preflight(engine, "d4", engine_args=json.dumps(argument))
    assert found.code == "HS410"
    assert next(iter(argument)) in found.where
    assert found.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_such_option", "1"), ("tensor_parallel", "0"), ("data_parallel", "two"), ("timeout", "-1"),
        ("data_parallel", "²"),
        ("start_timeout", "nan"), ("staging_mib", "0"), ("window", "1.5"), ("engine_args", "[]"), ("server", "host:1"),
        ("engine_args", "{"), ("staging", ""), ("timeout", "1e308"), ("window", "9" * 5000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_options_that_are_none_are_refused(engine, name, value):
    found = preflight(engine, "d4", **{name: value})
    assert [(p.code, p.where) for p in found] == [("HS410", f"option {name}")]


def test_every_problem_is_told_at_once(tmp_path):
    found = preflight("vllm", "d4", data_parallel=2, concurrency=0, engine_args='{"model": "x"}', x=1)
    assert {p.where for p in found} == {
        "option data_parallel", "option concurrency", "option engine_args: model", "option x",
    }  # fmt: skip


def test_a_disk_that_is_too_small_for_staging_is_refused(tmp_path):
    (found,) = preflight("vllm", "d4", staging=tmp_path / "new", staging_mib=2**33)
    assert (found.code, found.severity) == ("HS506", "error")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    (found,) = preflight("vllm", "d4", staging=tmp_path / "file")
    assert found.code == "HS506"


def test_a_full_disk_offers_no_smaller_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=MIB, total=2**40, used=0))
    (found,) = preflight("vllm", "d4", staging=tmp_path)
    assert (found.code, "staging_mib" in found.fix) == ("HS506", False)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"hf_token": "abc", "max_num_batched_tokens": 5}, {"hf_token": "***", "max_num_batched_tokens": 5}),
        (
            {"token": "abc", "aws_secret_access_key": "abc", "secret_key": "abc"},
            dict.fromkeys(("token", "aws_secret_access_key", "secret_key"), "***"),
        ),
        ("serve m --api-key 'a b' --tokenizer t", "serve m --api-key *** --tokenizer t"),
        ({"a": [{"api_key": "abc"}], "api_key": None}, {"a": [{"api_key": "***"}], "api_key": None}),
        ('{"ssl_keyfile_password": "abc"}', '{"ssl_keyfile_password": "***"}'),
        ("serve m --api-key=abc --hf-token abc -x", "serve m --api-key=*** --hf-token *** -x"),
        (["--admin-api-key", "abc", "--port", "1"], ["--admin-api-key", "***", "--port", "1"]),
        (None, None),
    ],
)
def test_no_secret_is_kept_beside_the_data(told, kept):
    assert without_secrets(told) == kept


def test_a_bound_below_the_longest_sample_is_a_warning():
    class Installed(VllmExtractor):
        def version(self):
            return "0.32.0"

    keys = [f"d{i}" for i in range(9)]
    (found,) = Installed().preflight(request_for(*keys, staging_mib=1))
    assert (found.code, found.severity) == ("HS506", "warning")
    assert found.expected.startswith(f"{1024 * (9 * 64 * 4 + 8):,} bytes")


def test_a_quantised_target_is_the_contracts_business():
    request = request_for("d4")
    target = request.target.model_copy(update={"quantization": "fp8"})
    assert ToyExtractor().preflight(dataclasses.replace(request, target=target)) == []


def test_a_server_needs_no_engine_here():
    class NotInstalled(VllmExtractor):
        def version(self):
            return None

    assert NotInstalled().preflight(request_for("d4", server="http://127.0.0.1:1")) == []
    (found,) = NotInstalled().preflight(request_for("d4", server="http://127.0.0.1:1", tensor_parallel=2))
    assert (found.code, found.where) == ("HS410", "option tensor_parallel")
    (found,) = ToyExtractor().preflight(request_for("d4", server="http://127.0.0.1:1"))
    assert (found.code, found.where) == ("HS410", "option server")


def test_sampling_needs_a_seed():
    found = preflight("vllm", "d4", generation=Generation(mode="sampled", max_new_tokens=4, temperature=1.0))
    assert [p.code for p in found] == ["HS410"]


def test_shared_options_are_documented():
    guide = (Path(__file__).parents[2] / "docs/guides/extractors.md").read_text("utf-8")
    for option in (*SHARED, *VllmExtractor.options, *SglangExtractor.options):
        assert f"`{option.name}" in guide, option.name


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, copy)
    return copy


def edit(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**data, **changes}.items() if v is not None}))


def test_tokens_that_end_a_turn_are_read_from_all_files(folder):
    assert end_of_turn_ids(folder) == [2]
    edit(folder / "generation_config.json", eos_token_id=[2, 7])
    edit(folder / "config.json", text_config={"eos_token_id": 9})
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    vocabulary = {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    assert end_of_turn_ids(folder) == sorted({2, 7, 9, vocabulary["<|im_start|>"]})
    assert set(special_ids(folder)) >= set(vocabulary.values())


def test_without_any_the_answer_would_never_end(folder):
    for name in ("generation_config.json", "config.json"):
        edit(folder / name, eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(HsError) as e:
        end_of_turn_ids(folder)
    assert e.value.problems[0].code == "HS410"
    assert [p.code for p in ToyExtractor().preflight(request_for("d4", generation=GREEDY, model=folder))] == ["HS410"]


@pytest.mark.needs("torch")
def test_they_are_those_that_transformers_finds(folder):
    from transformers import AutoModelForCausalLM

    from hsformat_extractors._generate import end_of_turn_ids as by_transformers

    edit(folder / "generation_config.json", eos_token_id=[2, 7])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert end_of_turn_ids(folder) == by_transformers(model, folder)
