"""The refusal, through the command: what is not the same in data, draft and engines is never trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from draft_folders import draft_config
from runs import AUX, BOTH, contract_of, make_config, make_run, make_store, make_target

import hsformat as hs
from hsformat.problems import ContractMismatch, Severity
from hsformat_trainer.gate import admit

PROGRAM = """
import sys
from hsformat.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def refused(config, **arguments):
    """Return the errors of a run that is refused."""
    with pytest.raises(ContractMismatch) as e:
        admit(config, **arguments)
    return [p for p in e.value.problems if p.severity is Severity.ERROR]


def codes(problems):
    return {p.code for p in problems}


def draft_file(tmp: Path, name: str = "config.json", **changes) -> Path:
    """Write the config of a draft of the tiny target."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
             "intermediate_size": 16, "vocab_size": 100, "draft_vocab_size": 100, "rope_theta": 10000.0,
             "max_position_embeddings": 128}  # fmt: skip
    (tmp / "draft").mkdir(exist_ok=True)
    (tmp / "draft" / name).write_text(json.dumps(draft_config(**{**sizes, **changes})))
    return tmp / "draft" / name


@pytest.fixture
def seed_fault(tmp_path):
    """A target of 61 layers, and states of [embedding, 3, 31] as input and 59 for the rest."""
    target = make_target(tmp_path / "target", num_hidden_layers=61)
    contract = contract_of(target, captures=("d0", "d3", "d31", "d59"), aux=("d0", "d3", "d31"), last=None)
    make_store(tmp_path / "data.hs.zarr", contract)
    return tmp_path


NUMBERS = {
    "vllm@0.32.0": {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]},
    "sglang@0.5.23": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
}
"""Layers 3, 31 and 59 as each engine numbers them for Llama: id k is depth k, and depth k + 1."""


def seed_fault_words(folder, serve):
    ids = {"eagle_aux_hidden_state_layer_ids": ..., "eagle_config": ...}
    for engine in serve:
        ids |= NUMBERS[engine]
    words = ("train", folder / "data.hs.zarr", "--target", folder / "target", "--serve", ",".join(serve))
    return [*words, "--out", folder / "out", "--draft-config", draft_file(folder, **ids)]


def check_seed_fault(folder, serve, code, err):
    assert code == 1, err
    assert "error HS401 layer-mismatch" in err
    assert "[d0, d3, d31]" in err
    assert "[d3, d31, d59]" in err
    assert "d61" in err.split("error HS109 missing-capture")[1]
    for engine in serve:
        assert engine.replace("@", " ") in err
    assert "no weight was loaded" in err
    assert not (folder / "out").exists()


# The user story that this project began with: a head of 74.7% accuracy drafted almost nothing.
@pytest.mark.parametrize("serve", [["vllm@0.32.0"], ["sglang@0.5.23"]])
def test_the_seed_fault_is_refused(seed_fault, cli, serve):
    code, _, err = cli(*seed_fault_words(seed_fault, serve))
    check_seed_fault(seed_fault, serve, code, err)


def test_the_seed_fault_is_refused_before_torch_is_imported(seed_fault):
    words = [sys.executable, "-c", PROGRAM, *map(str, seed_fault_words(seed_fault, BOTH))]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "Traceback" not in run.stderr
    assert run.stderr.rstrip().endswith("False"), "torch was imported before the refusal"
    check_seed_fault(seed_fault, BOTH, run.returncode, run.stderr)


def test_the_seed_fault_is_refused_for_a_new_draft_too(seed_fault):
    # Served as [d0, d3, d31] it would be trained on what is stored, and still there is nothing to learn from.
    (p,) = refused(make_config(seed_fault, serve=["vllm@0.32.0"]))
    assert p.code == "HS109"
    assert "d61" in p.expected
    found = refused(make_config(seed_fault, serve=["vllm@0.32.0"], last="d59"))
    assert codes(found) == {"HS109", "HS401"}
    assert any("d61" in p.expected for p in found if p.code == "HS401")


def test_ids_as_sglang_reads_them_given_to_vllm(seed_fault):  # ids [3, 31, 59] mean depths 4, 32, 60 to SGLang
    ids = {
        "eagle_aux_hidden_state_layer_ids": [3, 31, 59],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]},
    }
    found = refused(make_config(seed_fault, draft_config=str(draft_file(seed_fault, **ids))))
    text = "\n".join(map(str, found))
    assert "[d4, d32, d60]" in text
    assert "[d3, d31, d59]" in text
    between = [p for p in found if p.where.startswith("sglang 0.5.23 and vllm 0.32.0")]
    assert "HS401" in codes(between)  # the engines do not agree with each other either


def test_what_the_fix_names_is_taken(tmp_path):
    target = make_target(tmp_path / "target", num_hidden_layers=61)
    keys = ("d0", "d3", "d31", "d59", "d61")
    make_store(tmp_path / "data.hs.zarr", contract_of(target, captures=keys, aux=("d0", "d3", "d31"), last="d61"))
    file = draft_file(tmp_path, eagle_aux_hidden_state_layer_ids=[3, 31, 59],
                      eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 30, 58]})  # fmt: skip
    found = refused(make_config(tmp_path, draft_config=str(file)))
    assert codes(found) == {"HS401"}
    assert all("--aux d3,d31,d59 --last d61" in p.fix for p in found)
    admitted = admit(make_config(tmp_path, draft_config=str(file), aux=["d3", "d31", "d59"], last="d61"))
    assert admitted.layout == hs.Layout(aux=("d3", "d31", "d59"), last="d61")
    assert [s.keys for s in admitted.servings] == [("d3", "d31", "d59")] * 2


def test_a_run_that_fits_is_admitted(tmp_path):
    admitted = admit(make_run(tmp_path))
    assert admitted.layout == hs.Layout(aux=AUX, last="d4")
    assert [(s.engine, s.version, s.keys) for s in admitted.servings] == [
        ("sglang", "0.5.23", AUX),
        ("vllm", "0.32.0", AUX),
    ]
    assert (admitted.spec.hidden_size, admitted.spec.intermediate_size, admitted.spec.head_dim) == (8, 16, 4)
    assert admitted.spec.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert admitted.notes == ()


@pytest.mark.parametrize(("out", "code"), [("file", "HS501"), ("file/deeper", "HS501"), ("/proc/nope", "HS506")])
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, cli, out, code):
    (tmp_path / "file").write_text("mine")
    place = tmp_path / out
    none = tmp_path / "none"  # neither is there, and it is not asked
    exit_code, _, err = cli("train", none, "--target", none, "--serve", BOTH[0], "--out", place)
    assert exit_code == 2
    assert code in err
    assert f"--out {place}" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
