"""The extractor of a third party: a package that pip installs, found by its entry point, run by the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hsformat as hs
from hsformat.extraction import Extractor

pytestmark = pytest.mark.needs("torch")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plugin"
TARGET = ROOT / "tests" / "data" / "tiny-llama"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the package of examples/plugin into a folder of its own, without a network; return that folder."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
        "--target", str(target), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(installed, *words):
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "from hsformat.cli import main; main()", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert "Traceback" not in done.stderr
    return done


def test_the_package_is_installed_found_and_run(installed, tmp_path, monkeypatch, cli):
    data, out = tmp_path / "data.jsonl", tmp_path / "data.hs.zarr"
    rows = [{"id": f"r{i}", "input_ids": [5, 6, 7, 8 + i], "loss_mask": [0, 0, 1, 1]} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("extract", "--engine", "acme", "--model", TARGET, "--data", data, "--out", out, "--layers", "2,4")
    done = run(installed, *words, "--last", "post")
    assert done.returncode == 0, done.stderr
    store = hs.open(out)
    assert sorted(store.ids) == ["r0", "r1", "r2"]
    assert store.contract.keys == ("d2", "d4", "d8n")
    code, shown, _ = cli("validate", out, "--level", "full", "--target", TARGET)
    assert code == 0, shown
    monkeypatch.syspath_prepend(str(installed))
    code, _, shown = cli(*words[:-1], "2,5", "--last", "pre")
    assert code == 2
    assert "HS410" in shown
    assert "--last post" in shown


def test_it_is_an_extractor(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    from acme_extractor import AcmeExtractor

    assert isinstance(AcmeExtractor(), Extractor)


def test_the_guide_shows_what_is_installed():
    text = (ROOT / "docs/guides/extractors.md").read_text("utf-8")
    for name in ("pyproject.toml", "acme_extractor.py"):
        for line in (PACKAGE / name).read_text("utf-8").strip().splitlines():
            assert line in text, (name, line)
