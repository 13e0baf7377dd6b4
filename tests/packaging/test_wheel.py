"""The wheel holds what it should, and installs and runs in a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
"""The environment without the one path that could bring another copy of the package."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"hsformat", "hsformat_extractors", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    assert {"hsformat/py.typed", "hsformat/testing/__init__.py", "hsformat/testing/strategies.py"} <= set(names)
    assert not [n for n in names if "test" in n.lower() and not n.startswith("hsformat/testing")]


def test_wheel_runs_in_a_fresh_environment(wheel, tmp_path):
    # The dependencies are those of this environment (nothing is downloaded); the package comes from the wheel alone.
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", purelib, str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    here = next(p for p in sys.path if p.endswith("site-packages"))
    (Path(purelib) / "dependencies.pth").write_text(f"{here}\n")
    script = (
        "import hsformat, zarr, importlib.metadata as m;"
        "print(hsformat.__file__);"
        "print(sorted(e.name for e in m.entry_points(group='hsformat.extractors')));"
        "print(hsformat.open, hsformat.Contract)"
    )
    run = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=CLEAN)
    assert run.stdout.startswith(str(venv.resolve())) or str(venv) in run.stdout
    assert "transformers" in run.stdout
    explained = subprocess.run(
        [python, "-m", "hsformat", "explain", "HS101"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "length-mismatch" in explained.stdout
