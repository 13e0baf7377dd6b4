"""Commands of other packages: found by entry points, and a broken one takes nothing with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "from hsformat.cli import main; main()"


@pytest.fixture
def run(tmp_path):
    """Install a package of plugins beside hsformat, and run the command in a process of its own."""
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (tmp_path / "others.py").write_text(
        "import typer\n"
        "def greet(name: str) -> None:\n"
        '    """Greet somebody."""\n'
        "    typer.echo(f'hello {name}')\n"
        "number = 3\n"
    )
    (tmp_path / "others_broken.py").write_text("import a_package_that_is_not_installed\n")
    (info / "entry_points.txt").write_text(
        "[hsformat.commands]\ngreet = others:greet\nbroken = others_broken:x\nnone = others:absent\n"
        "number = others:number\ninfo = others:greet\n"
    )

    def call(*words):
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done

    return call


def test_a_plugin_is_a_command_and_a_broken_one_is_a_message(run):
    shown = run("--help")
    assert shown.returncode == 0
    assert "greet" in shown.stdout
    assert "validate" in shown.stdout
    done = run("greet", "you")
    assert (done.returncode, done.stdout) == (0, "hello you\n")
    for name, reason in (
        ("broken", "a_package_that_is_not_installed"),
        ("none", "absent"),
        ("number", "not a function"),
    ):
        done = run(name, "--any", "option")
        assert done.returncode == 2, name
        assert f"the command {name} of others cannot be loaded" in done.stderr
        assert reason in done.stderr


def test_no_plugin_replaces_a_command(run, tmp_path):
    done = run("info", str(tmp_path / "none"))
    assert "HS501" in done.stderr
    assert "hello" not in done.stdout


def test_help_brings_no_torch():
    code = (
        "import sys\nfrom hsformat.cli.commands import app\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from hsformat.cli.reference import cli_commands\nprint(*cli_commands())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"train", "export-draft", "validate"} <= set(done.stdout.split())
