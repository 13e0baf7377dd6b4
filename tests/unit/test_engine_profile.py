"""Profiles of what a probe proved, and layouts that somebody states."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from draft_folders import draft_config, draft_weights, target_config, write_draft, write_target

from hsformat.digests import digest_json
from hsformat.engines import EngineProfile, inspect, load_profile, resolve, save_profile
from hsformat.engines.custom import CustomLayout, load_custom
from hsformat.engines.table import capture_row, draft_row
from hsformat.problems import ForeignFileError, NothingToOpen, Severity

NEW = "0.99.0"


def profile(*, drafts: bool = True, **changes) -> EngineProfile:
    captures = capture_row("vllm", "0.32.0", "LlamaForCausalLM")
    proved = {"versions": (NEW,), "evidence": "proved", "architectures": ("LlamaForCausalLM",), "source": "probed"}
    draft = draft_row("vllm", "0.32.0", "plain", "LlamaForCausalLMEagle3")
    data = {
        "profile_version": "1", "engine": "vllm", "version": NEW, "architecture": "LlamaForCausalLM",
        "captures": {**dict(captures), **proved, "shift": 1, "lowest": 1},
        "drafts": [{**dict(draft), **proved, "architectures": draft.architectures}] if drafts else [],
        "environment": {"torch": "2.13.0"},
        "measurements": [
            {"asked": "ids [1, 14]", "depths": [2, 15], "relative_error": 1e-6, "runner_up": 0.3, "outcome": None}
        ],
    }  # fmt: skip
    return EngineProfile.model_validate({**data, **changes})


@pytest.fixture
def folders(tmp_path):
    """A draft with ids for vLLM alone, and its target."""
    draft = write_draft(tmp_path / "draft", draft_config(eagle_config=...))
    return {"draft": draft, "target": write_target(tmp_path / "target")}


def test_a_profile_makes_a_new_version_known(tmp_path, folders):
    save_profile(profile(), tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile()
    assert load_profile(tmp_path / "p.json").digest == profile().digest
    layout = resolve("vllm", **folders, version=NEW, profile=tmp_path / "p.json")
    assert layout.keys == ("d3", "d16", "d28")  # by the rule that was proved
    assert layout.evidence == "proved"
    assert resolve("vllm", **folders, profile=profile()) == layout  # the profile's version


def test_a_profile_of_something_else_helps_not(folders, tmp_path):
    for changes in ({"engine": "sglang"}, {"architecture": "Qwen3ForCausalLM"}):
        data = {**dict(profile()), **changes}
        if "architecture" in changes:
            data["captures"] = {**dict(profile().captures), "architectures": ("Qwen3ForCausalLM",)}
        _, problems = inspect("vllm", **folders, version=NEW, profile=EngineProfile.model_validate(data))
        assert [p.code for p in problems] == ["HS410"]
        assert "the profile is of" in problems[0].expected
    _, problems = inspect("vllm", **folders, version=NEW, profile=profile(drafts=False))
    assert [p.code for p in problems] == ["HS410"]  # nothing was proved of drafts
    layout = resolve("vllm", **folders, version="0.32.0", profile=profile())
    assert layout.keys == ("d2", "d15", "d27")  # the tables know this version


def test_a_profile_that_was_edited_is_refused(tmp_path, folders):
    path = tmp_path / "p.json"
    save_profile(profile(), path)
    data = json.loads(path.read_text())
    data["captures"]["shift"] = 0
    path.write_text(json.dumps(data))
    with pytest.raises(ForeignFileError) as e:
        load_profile(path)
    assert [p.code for p in e.value.problems] == ["HS504"]
    _, problems = inspect("vllm", **folders, version=NEW, profile=path)
    assert "HS504" in [p.code for p in problems]
    _, problems = inspect("vllm", **folders, profile=path)
    assert [p.code for p in problems] == ["HS504"]  # and not that a version is missing, which is the profile's


@pytest.mark.parametrize(
    ("change", "code"),
    [({"profile_version": "2"}, "HS603"), ({"captures": None}, "HS603"), ({"surprise": 1}, "HS603"),
     ({"measurements": []}, "HS603"), ({"version": "0.98.0"}, "HS603")],
)  # fmt: skip
def test_a_profile_of_another_form(tmp_path, change, code):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**profile().to_json(), **change}))
    with pytest.raises(ForeignFileError) as e:
        load_profile(path)
    assert {p.code for p in e.value.problems} == {code}


@pytest.mark.parametrize("deepest", ["N+5", "N//2+2", "40", "9" * 5000])
def test_a_profile_of_layers_that_no_target_has(tmp_path, folders, deepest):
    data = profile().to_json()
    data["captures"]["deepest"] = deepest
    digest = digest_json(data)
    (tmp_path / "p.json").write_text(json.dumps({**data, "digest": digest}))
    layout, problems = inspect("vllm", **folders, profile=tmp_path / "p.json")
    assert (layout, {p.code for p in problems}) == (None, {"HS603"})


def test_no_profile(tmp_path):
    with pytest.raises(NothingToOpen):
        load_profile(tmp_path / "absent.json")
    for text in ("{", "[]", '"x"'):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(ForeignFileError):
            load_profile(tmp_path / "p.json")


@pytest.mark.parametrize("change", [{"evidence": "read"}, {"versions": ("1.0",)}])
def test_a_profile_holds_what_was_proved_of_its_version(change):
    with pytest.raises(ValueError, match=r"proved|versions"):
        profile(captures={**dict(profile().captures), **change})


# A layout that somebody states.

STATED = {
    "hsformat_custom_layout": "1", "name": "ours", "version": "7", "aux": ["d2", "d15", "d27"],
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "later_layers_norm": "input_layernorm", "attention": "llama", "attention_bias": False, "output_bias": False,
    "mlp_bias": False, "fc_bias": False,
    "embedding": "target", "head": "own", "shift": {"token": 1, "position": 0, "distribution": 1, "target": 2},
}  # fmt: skip


@pytest.fixture
def custom(tmp_path, folders):
    def run(draft=None, weights=None, target=None, **changes):
        path = tmp_path / "layout.json"
        path.write_text(json.dumps({k: v for k, v in {**STATED, **changes}.items() if v is not ...}))
        if draft is not None or weights is not None:
            write_draft(folders["draft"], draft_config(**(draft or {})), weights)
        if target is not None:
            write_target(folders["target"], target_config(**target))
        layout, problems = inspect(f"custom:{path}", **folders)
        run.problems = problems
        return layout, [p.code for p in problems if p.severity is Severity.ERROR]

    return run


def test_a_stated_layout(custom):
    layout, errors = custom()
    assert errors == []
    assert (layout.engine, layout.version, layout.evidence) == ("custom:ours", "7", "stated")
    assert layout.keys == ("d2", "d15", "d27")
    assert custom(aux=["d27", "d2"], draft={}, weights=draft_weights(captures=2))[0].keys == ("d27", "d2")
    assert custom(aux=["d2", "d30n"], draft={}, weights=draft_weights(captures=2))[0].aux[1].norm == "final"


def test_the_same_checks(custom):
    assert custom(aux=["d2", "d15"])[1] == ["HS402"]
    assert custom(aux=["d2", "d15", "d31"]) == (None, ["HS304"])
    assert custom(aux=["d2", "d15", "d29n"]) == (None, ["HS304"])
    assert custom(norm_before_fc=True)[1] == ["HS411"]
    assert custom(draft={"norm_output": True})[1] == ["HS405"]
    assert custom(draft={"fc_norm": "on"})[1] == ["HS603"]
    assert custom(draft={"draft_vocab_size": 16})[1][:1] == ["HS408"]
    assert custom(draft={}, target={"hidden_size": 32})[1][:1] == ["HS409"]


def test_any_target_and_any_draft(custom):
    target = {"architectures": ["NobodyKnowsThisForCausalLM"], "model_type": "new"}
    assert custom(draft={"architectures": ["OurOwnDraft"]}, target=target)[1] == []


@pytest.mark.parametrize(
    "change",
    [
        {"aux": []},
        {"aux": ["2"]},
        {"aux": ["d2", "d2", "d15"]},
        {"aux": ["d" + "9" * 5000]},
        {"fc_norm": ...},
        {"surprise": 1},
        {"head": "theirs"},
        {"norm_output": "no"},
    ],
)
def test_a_statement_of_another_form(custom, change):
    assert custom(**change) == (None, ["HS603"])


def test_a_name_that_stands_twice(tmp_path, folders):
    """One reader takes the first, another the last."""
    text = json.dumps(STATED)
    (tmp_path / "x.json").write_text(text.replace('"name"', '"name": "theirs", "name"'))
    assert [p.code for p in inspect(f"custom:{tmp_path / 'x.json'}", **folders)[1]] == ["HS602"]
    save_profile(profile(), tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"engine"', '"engine": "sglang", "engine"'))
    with pytest.raises(ForeignFileError) as e:
        load_profile(tmp_path / "p.json")
    assert [p.code for p in e.value.problems] == ["HS602"]


def test_a_version_beside_a_stated_layout(custom, tmp_path, folders):
    """It has to be the file's."""
    assert custom()[1] == []
    for version, codes in (("7", []), ("9", ["HS410"])):
        _, problems = inspect(f"custom:{tmp_path / 'layout.json'}", **folders, version=version)
        assert [p.code for p in problems] == codes


def test_what_a_file_states_is_no_default_of_the_engine(custom):
    layout, errors = custom(norm_before_residual=True)
    assert errors == []
    assert layout.norm_before_residual
    assert custom.problems == []


def test_no_statement(tmp_path, folders):
    assert [p.code for p in inspect(f"custom:{tmp_path / 'absent'}", **folders)[1]] == ["HS602"]
    (tmp_path / "x.json").write_text("{")
    assert [p.code for p in inspect(f"custom:{tmp_path / 'x.json'}", **folders)[1]] == ["HS602"]


def test_the_guide_has_every_field_and_an_example_that_is_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs/guides/serving.md").read_text("utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "layout.json").write_text(example)
    assert load_custom(tmp_path / "layout.json").aux == ("d2", "d15", "d27")
    table = text.split("| field |")[1]
    named = {n for row in re.findall(r"^\| (`[^|]*) \|", table, re.M) for n in re.findall(r"`(\w+)`", row)}
    assert named == set(CustomLayout.model_fields)
