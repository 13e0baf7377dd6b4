"""Data against the model folder that will be served: 3xx, from the folder alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from factories import tiny_record
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import hsformat as hs
from hsformat.cli.commands import app
from hsformat.extraction import make_contract
from hsformat.record import Provenance
from hsformat.target import describe

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.fixture
def store(tmp_path) -> Path:
    described = describe(MODEL, weights_digest=True)
    contract = make_contract(
        described.model, tokenizer_digest=described.tokenizer_digest, aux=(2, 4), last="pre", codec="fast"
    )
    provenance = Provenance(template_digest=described.template_digest)
    with hs.create(tmp_path / "x.hs.zarr", contract) as writer:
        for i in range(3):
            writer.append(tiny_record(contract, id=f"r{i}", seed=i, provenance=provenance))
    return tmp_path / "x.hs.zarr"


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def codes(store: Path, model: Path) -> list[str]:
    return [p.code for p in hs.validate_store(store, level="metadata", target=model)]


def test_the_same_target_under_another_name(store, model):
    assert codes(store, model) == []


def edit_weights(model: Path, name: str) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name] = np.roll(tensors[name], 1, axis=-1)
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"])
def test_rotated_target_and_fine_tune(store, model, name):  # vllm-ascend#5974: states of a rotated target
    edit_weights(model, name)
    problems = hs.validate_store(store, level="metadata", target=model)
    assert {p.code for p in problems} == {"HS301"}
    named = {p.where.rsplit(": ")[-1] for p in problems}
    assert "target.weights_digest" in named
    assert ("target.basis_digest" in named) == name.startswith("model.embed")


def test_other_tokenizer_template_and_config(store, model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:-1]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    edit_json(model / "config.json", rms_norm_eps=1e-4)
    problems = hs.validate_store(store, level="metadata", target=model)
    assert [p.code for p in problems] == ["HS301", "HS301", "HS302", "HS303"]
    (template,) = [p for p in problems if p.code == "HS303"]
    assert (template.severity, "3 record(s)" in template.where) == (hs.Severity.WARNING, True)


def test_quantised_target(store, model):
    edit_json(model / "config.json", quantization_config={"quant_method": "fp8"})
    assert "HS305" in codes(store, model)


def test_command_line_and_formats(store, model, tmp_path):
    def run(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["validate", *map(str, words)])
        return result.exit_code, result.output

    assert run(store, "--target", model)[0] == 0
    code, out = run(store, "--target", tmp_path / "absent")
    assert code == 2
    assert "could not be validated: 1 error" in out
    edit_weights(model, "model.embed_tokens.weight")
    code, out = run(store, "--target", model, "--format", "json")
    assert (code, json.loads(out)["exit_code"]) == (1, 1)
    code, out = run(store, "--target", model, "--format", "github")
    assert code == 1
    assert all(line.startswith("::error title=HS301 target-mismatch::") for line in out.splitlines())
