"""The wheel and the source distribution hold what they should, and install, run and test themselves elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from packaging.metadata import Metadata

import hsformat

ROOT = Path(__file__).parents[2]
CLEAN = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
"""The environment without the one path that could bring another copy of the package."""


def build(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """Return the folder of the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        assert {m.type for m in tar.getmembers()} <= {tarfile.REGTYPE, tarfile.DIRTYPE}
        tar.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


@pytest.fixture(scope="module")
def wheel_of_sdist(unpacked, tmp_path_factory) -> Path:
    return build("wheel", unpacked, tmp_path_factory.mktemp("second"))


def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as z:
        return {name: z.read(name) for name in z.namelist()}


def tree(folder: str) -> set[str]:
    """Return the files of a folder of the working tree that belong into a distribution."""
    base = ROOT / folder
    return {
        p.relative_to(base.parent).as_posix() for p in base.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = set(files(wheel))
    info = wheel.name.rsplit("-", 3)[0] + ".dist-info"
    code = {n for n in names if not n.startswith(f"{info}/")}
    assert code == tree("hsformat") | tree("extractors/hsformat_extractors") | tree("trainer/hsformat_trainer")
    assert {n.removeprefix(f"{info}/") for n in names if n.startswith(f"{info}/")} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    assert {"hsformat/py.typed", "hsformat_extractors/py.typed", "hsformat/testing/strategies.py"} <= names


def test_wheel_is_the_same_from_the_source_distribution(wheel, wheel_of_sdist):
    assert wheel.name == wheel_of_sdist.name
    assert files(wheel) == files(wheel_of_sdist)


def test_source_distribution_holds_what_its_tests_need_and_no_junk(unpacked):
    names = {p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*") if p.is_file()}
    for folder in ("hsformat", "extractors", "trainer", "tests", "docs", "examples", "benchmarks", "scripts"):
        assert tree(folder) == {n for n in names if n.startswith(f"{folder}/")}
    tops = {n for n in names if "/" not in n}
    assert tops == {
        "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "SECURITY.md",
        "constraints.txt", "pyproject.toml", ".gitignore",
    }  # fmt: skip


def test_metadata_is_valid_and_the_readme_renders(wheel):
    (raw,) = (data for name, data in files(wheel).items() if name.endswith("/METADATA"))
    metadata = Metadata.from_email(raw, validate=True)  # raises what an index would refuse
    assert (metadata.name, str(metadata.version)) == ("hsformat", hsformat.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert str(metadata.requires_python) == ">=3.11"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text("utf-8")
    html = MarkdownIt("commonmark").enable("table").render(metadata.description)
    assert html.count("<table>") == metadata.description.count("\n|---") > 0
    assert "|---" not in html
    assert html.count("<h2>") == len(re.findall(r"^## ", metadata.description, re.M))


def test_license_files_are_the_license(wheel):
    (text,) = (data for name, data in files(wheel).items() if name.endswith("licenses/LICENSE"))
    assert text == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in text


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def fresh(request, tmp_path_factory) -> Path:
    """Return the folder of a new environment with the package from one of the two.

    The dependencies are those of this environment (nothing is downloaded); the package comes from its file alone.
    """
    path: Path = request.getfixturevalue(request.param)
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    here = next(p for p in sys.path if p.endswith("site-packages"))
    python = venv / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    purelib = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    (Path(purelib) / "dependencies.pth").write_text(f"{here}\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--ignore-installed", str(path)],
        capture_output=True, text=True, check=False, env=CLEAN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return venv


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_installed_runs(fresh, tmp_path):
    python = fresh / "bin" / "python"
    script = (
        "import hsformat, hsformat.testing, hsformat_extractors, hsformat_trainer, importlib.metadata as m\n"
        "print(hsformat.__file__, hsformat_extractors.__file__, hsformat.__version__, m.version('hsformat'))\n"
        "for group in ('hsformat.extractors', 'zarr.data_type'):\n"
        "    for e in m.entry_points(group=group):\n"
        "        print(group, e.name, e.load())\n"
        "print(hsformat.open, hsformat.Contract)\n"
    )
    told = run(python, "-c", script, cwd=tmp_path).splitlines()
    where, other, version, recorded = told[0].split()
    assert Path(where).is_relative_to(fresh)
    assert Path(other).is_relative_to(fresh)
    assert version == recorded == hsformat.__version__
    assert [line.split()[:2] for line in told[1:-1]] == [
        ["hsformat.extractors", "sglang"],
        ["hsformat.extractors", "transformers"],
        ["hsformat.extractors", "vllm"],
        ["zarr.data_type", "bfloat16"],
    ]
    assert "hidden-state records" in run(fresh / "bin" / "hsformat", "--help", cwd=tmp_path)
    assert "length-mismatch" in run(python, "-m", "hsformat", "explain", "HS101", cwd=tmp_path)
    for store in sorted((ROOT / "tests/golden/1.0").glob("*.hs.zarr")):
        assert ": valid at level full" in run(python, "-m", "hsformat.validate", store, "--level", "full", cwd=tmp_path)


def test_source_distribution_tests_itself(unpacked, pytestconfig):
    """Golden stores, cases, documents and build files are there; the whole suite would take minutes."""
    script = "import hsformat, sys; sys.exit(0 if sys.argv[1] in hsformat.__file__ else hsformat.__file__)"
    run(sys.executable, "-c", script, unpacked, cwd=unpacked)
    tests = ["golden", "conformance/test_cases.py", "conformance/test_no_drift.py", "property/test_align.py"]
    some = ["-k", "not generated and not docstrings and not digest"]  # these compute, and need no more files
    some += [f"--without={package}" for package in pytestconfig.getoption("--without")]
    told = run(sys.executable, "-m", "pytest", "-q", "-n", "0", *some, *(f"tests/{t}" for t in tests), cwd=unpacked)
    assert re.search(r"^\d+ passed", told, re.M)
