"""Every Python block of docs/guides that begins with a file name is a test file, and passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(
        m[1],
        m[0],
        id=f"{path.stem}-{m[1]}",
        marks=[pytest.mark.needs("torch")]
        if re.search(r"hsformat_extractors|hsformat_trainer|hsformat\.torch", m[0])
        else [],
    )
    for path in sorted((ROOT / "docs/guides").glob("*.md"))
    for m in re.finditer(r"(?<=^```python\n)# (test_\w+\.py)\n.*?(?=^```)", path.read_text("utf-8"), re.M | re.S)
]


@pytest.mark.parametrize(("guide", "count"), [("testing", 4), ("loading", 1), ("training", 1)])
def test_every_block_of_a_guide_is_run(guide, count):
    text = (ROOT / f"docs/guides/{guide}.md").read_text("utf-8")
    assert text.count("```python") == sum(1 for p in BLOCKS if p.id.startswith(f"{guide}-")) == count


@pytest.mark.parametrize(("name", "code"), BLOCKS)
def test_block(name, code, tmp_path):
    (tmp_path / name).write_text(code, "utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "extractors"), str(ROOT / "trainer")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        str(tmp_path / name),
    ]
    env = {**os.environ, "PYTHONPATH": path, "CI": "true"}  # by which Hypothesis sets no deadline
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)
