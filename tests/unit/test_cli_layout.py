"""``layout``, ``engines`` and ``validate --draft``: what is printed, exit codes, no traceback for any input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from draft_folders import draft_config, draft_weights, target_config, write_draft, write_target
from factories import tiny_contract, tiny_record

from hsformat.engines import ENGINES
from hsformat.engines.document import engines_document
from hsformat.testing import build_store

STATED = {
    "hsformat_custom_layout": "1", "name": "ours", "version": "7", "aux": ["d2", "d15", "d27"],
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "later_layers_norm": "input_layernorm", "attention": "llama", "attention_bias": False, "output_bias": False,
    "mlp_bias": False, "fc_bias": False,
    "embedding": "target", "head": "own", "shift": {"token": 1, "position": 0, "distribution": 1, "target": 2},
}  # fmt: skip
TOP = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def folders(tmp_path):
    return write_draft(tmp_path / "draft"), write_target(tmp_path / "target")


def test_a_layout_in_plain_words(cli, folders):
    draft, target = folders
    code, out, _ = cli("layout", draft, "--engine", "vllm", "--engine-version", "0.32.0", "--target", target)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "1 d2 output of block 1 (0-based), residual after 2 of 30 layers" in lines
    assert "3 d27 output of block 26 (0-based), residual after 27 of 30 layers" in lines
    assert "fc 3 x 16 to 16" in lines
    assert "sglang 0.5.23 would feed it [d2, d15, d27], the same layers" in lines
    assert any(line.startswith("vocabulary 24 of 64 ids, map sha256:") for line in lines)


def test_what_the_other_engine_would_do(cli, folders, tmp_path):
    _, target = folders
    draft = write_draft(tmp_path / "vllm only", draft_config(**{TOP: [3, 16, 28], "eagle_config": ...}))
    words = ("layout", draft, "--engine", "vllm", "--engine-version", "0.32.0", "--target", target)
    code, out, _ = cli(*words)
    assert code == 0
    assert "sglang 0.5.23 would feed it [d2, d15, d27]; errors: HS403" in out
    code, out, _ = cli(*words, "--format", "json")
    report = json.loads(out)
    assert [a["depth"] for a in report["layout"]["aux"]] == [3, 16, 28]
    assert report["others"] == [
        {"engine": "sglang", "version": "0.5.23", "aux": ["d2", "d15", "d27"], "errors": ["HS403"]}
    ]
    assert report["exit_code"] == code == 0


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({TOP: ..., "eagle_config": ...}, {}, 1),
        ({"norm_before_residual": True}, {"--engine": "sglang", "--engine-version": "0.5.23"}, 1),
        ({}, {"--engine-version": "0.31.0"}, 2),
        ({}, {"--engine-version": "new"}, 2),
        ({}, {"--engine": "llama.cpp"}, 2),
        ({}, {"--engine": "custom:absent.json"}, 2),
        ({}, {"--engine": "custom:"}, 2),
        ({}, {"--engine": "custom:."}, 2),
        ({}, {"--engine-profile": "."}, 2),
        ({}, {"--target": "."}, 2),
        ({}, {"--engine-profile": "absent.json"}, 2),
        ({"architectures": ["Unknown"]}, {}, 2),
        ({}, {"--target": "absent"}, 2),
    ],
)
def test_exit_codes(cli, folders, tmp_path, changes, options, expected):
    _, target = folders
    draft = write_draft(tmp_path / "other", draft_config(**changes))
    words = {"--engine": "vllm", "--engine-version": "0.32.0", "--target": target, **options}
    for more in ((), ("--format", "json")):
        code, out, err = cli("layout", draft, *(w for pair in words.items() for w in pair), *more)
        assert code == expected, out + err
        if more:
            assert json.loads(out)["exit_code"] == expected
    (tmp_path / "empty").mkdir()
    for wrong in (draft / "config.json", tmp_path / "empty"):
        code, out, _ = cli("layout", wrong, "--engine", "vllm", "--engine-version", "0.32.0", "--target", target)
        assert code == 2, out
    assert (
        cli("layout", tmp_path / "absent", "--engine", "vllm", "--engine-version", "0.32.0", "--target", target)[0] == 2
    )


@pytest.mark.parametrize("which", ["draft", "target"])
@pytest.mark.parametrize("name", ["\ud800", "A\nerror HS999 x", "A\u202eB", "A\x1b[2J"])
def test_names_that_are_no_text_for_people(cli, folders, tmp_path, which, name):
    """A custom layout takes every architecture; half a character is refused where it is read."""
    draft, target = folders
    if which == "draft":
        write_draft(draft, draft_config(architectures=[name]))
    else:
        write_target(target, target_config(architectures=[name]))
    (tmp_path / "custom.json").write_text(json.dumps(STATED))
    known = ("--engine", "vllm", "--engine-version", "0.32.0")
    for engine in (known, ("--engine", f"custom:{tmp_path / 'custom.json'}")):
        words = ("layout", draft, *engine, "--target", target)
        code, out, _ = cli(*words)
        assert code == (1 if name == "\ud800" else 2 if engine == known else 0), out
        assert not any(line.startswith("error HS999") for line in out.splitlines())
        assert all(c.isprintable() for c in out.replace("\n", ""))
        code, out, _ = cli(*words, "--format", "json")
        assert json.loads(out)["exit_code"] == code


def test_a_path_that_is_no_text(folders, tmp_path):
    """The system's file names are bytes."""
    _, target = folders
    draft = write_draft(tmp_path / "no\udcff text")
    known = ("--engine", "vllm", "--engine-version", "0.32.0", "--target", target)
    for words, code in (((draft,), 0), ((draft / "absent", "--format", "json"), 2)):
        command = [sys.executable, "-m", "hsformat", "layout", *words, *known]
        run = subprocess.run(command, capture_output=True, check=False)
        assert (run.returncode, run.stderr) == (code, b"")
        assert rb"\udcff text" in run.stdout


def test_no_version_is_refused_with_what_is_known(cli, folders):
    draft, target = folders
    code, out, _ = cli("layout", draft, "--engine", "sglang", "--target", target)
    assert code == 2
    assert "0.5.23" in out


def test_engines_are_listed(cli):
    code, out, _ = cli("engines")
    assert code == 0
    for engine in ENGINES.values():
        assert engine.title in out
    assert "depth = id + 1 if the first id is 1, otherwise depth = id" in out
    for engine in ENGINES.values():
        for row in engine.captures:
            for name in row.architectures:  # whether a target is known can be seen
                assert name in out
    code, out, _ = cli("engines", "--engine", "vllm", "--format", "json")
    rows = json.loads(out)["vllm"]
    assert {row["kind"] for row in rows} == {"captures", "draft", "unsupported"}
    assert all(row["source"] and row["versions"] and row["evidence"] in ("ran", "read") for row in rows)
    assert cli("engines", "--engine", "nobody")[0] == 2


def test_the_document_has_every_row():
    text = engines_document()
    for engine in ENGINES.values():
        for row in (*engine.captures, *engine.drafts, *engine.unsupported):
            for name in row.architectures:
                assert name in text
            assert row.source.split("|")[0] in text


@pytest.fixture
def store(tmp_path):
    contract = tiny_contract()
    t = contract.target
    sizes = {"hidden_size": t.hidden_size, "vocab_size": t.vocab_size}
    write_target(tmp_path / "t", target_config(num_hidden_layers=t.num_layers, **sizes))
    config = draft_config(**sizes, draft_vocab_size=t.vocab_size, **{TOP: [1, 2, 3], "eagle_config": {TOP: [0, 1, 2]}})
    weights = draft_weights(width=8, target_width=8, size=t.vocab_size, ids=None)
    write_draft(tmp_path / "d", config, weights)
    return build_store(tmp_path / "x.hs.zarr", contract, [tiny_record(contract)])


def test_a_store_is_validated_for_a_draft(store, tmp_path):
    words = ["--draft", str(tmp_path / "d"), "--engine", "sglang", "--engine-version", "0.5.23"]
    command = [sys.executable, "-m", "hsformat.validate", str(store), *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    config = tmp_path / "d/config.json"
    config.write_text(config.read_text().replace("[0, 1, 2]", "[1, 2]"))
    run = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    report = json.loads(run.stdout)
    assert run.returncode == report["exit_code"] == 1
    assert {p["code"] for p in report["problems"]} == {"HS402", "HS401", "HS404"}


@pytest.mark.parametrize(
    ("engine", "version", "ids", "said"),
    [("vllm", "0.32.0", [0, 1, 2], f"write ids [1, 2, 3] to {TOP}"),
     ("sglang", "0.5.23", [1, 2], None)],  # another number of them: the draft is another one
)  # fmt: skip
def test_ids_that_would_match_the_data(cli, store, tmp_path, engine, version, ids, said):  # vllm PR#43671
    config = json.loads((tmp_path / "d/config.json").read_text())
    if engine == "vllm":
        config |= {TOP: ids, "eagle_config": {}}
    else:
        config["eagle_config"] = {TOP: ids}
    config["num_aux_hidden_states"] = len(ids)
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    words = ("validate", store, "--draft", tmp_path / "d", "--engine", engine, "--engine-version", version)
    problems = json.loads(cli(*words, "--format", "json")[1])["problems"]
    fixes = [p["fix"] for p in problems if p["code"] == "HS401" and "layout.aux" in p["where"]]
    (fix,) = fixes
    assert (said in fix) if said else ("write ids" not in fix)


def test_validation_for_a_draft_by_the_command_line(cli, store, tmp_path):
    draft = ("--draft", tmp_path / "d", "--engine", "vllm")
    assert cli("validate", store, *draft, "--engine-version", "0.32.0")[0] == 0
    assert cli("validate", store, *draft)[0] == 2  # no version
    assert cli("validate", store, *draft, "--engine-version", "0.32.0", "--target", tmp_path / "absent")[0] == 2
    code, out, _ = cli("validate", store, *draft, "--engine-version", "0.32.0", "--target", tmp_path / "t")
    assert code == 1  # the folder has no weights and no tokenizer, and still the draft is looked at
    assert "HS411" in out
    for words in (("--draft", tmp_path / "d"), ("--engine", "vllm"), ("--engine-version", "1")):
        assert cli("validate", store, *words)[0] == 2
    code, out, _ = cli(
        "validate", store, "--draft", tmp_path / "absent", "--engine", "vllm", "--engine-version", "0.32.0"
    )
    assert code == 2
    assert "HS602" in out
