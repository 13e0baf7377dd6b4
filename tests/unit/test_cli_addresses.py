"""The command line on a bucket: extract, go on, quarantine, validate, info; on a server of S3's protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hsformat as hs
from hsformat.cli.commands import app
from hsformat.cli.output import guarded

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
ROWS = [
    {"id": "a", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
    {"id": "b", "input_ids": [9, 10, 11, 12, 13], "loss_mask": [0, 0, 1, 1, 1]},
]
CHANGED = {**ROWS[0], "input_ids": [5, 6, 7, 9]}


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command in this process, in an empty folder; return (exit code, stdout, stderr)."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hsformat", *map(str, words)])
        capsys.readouterr()
        code = guarded(app)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def test_extract_to_a_bucket_and_go_on(cli, s3, tmp_path):
    data, address = tmp_path / "data.jsonl", f"s3://{s3}/runs/data.hs.zarr"
    command = ("extract", "--model", MODEL, "--data", data, "--out", address, "--layers", "2,4,5")
    data.write_text("".join(json.dumps(r) + "\n" for r in ROWS[:1]))
    code, out, _ = cli(*command)
    assert (code, "1 records written" in out, address in out) == (0, True, True)
    data.write_text("".join(json.dumps(r) + "\n" for r in (CHANGED, ROWS[1])))
    code, out, _ = cli(*command, "--format", "json")
    report = json.loads(out)
    assert (code, report["written"], report["skipped"]) == (1, 1, 0)
    quarantine = Path(report["quarantine_file"])
    assert quarantine.parent == tmp_path / "work"  # a bucket takes no lines that are added one by one
    assert quarantine.name.startswith("data.hs.zarr.quarantine-")
    assert [json.loads(line)["id"] for line in quarantine.read_text().splitlines()] == ["a"]
    for level in ("metadata", "full"):
        code, out, _ = cli("validate", address, "--level", level)
        assert (code, "valid at level" in out) == (0, True)
    code, out, _ = cli("info", address, "--format", "json")
    assert (code, json.loads(out)["records"]) == (0, 2)
    assert sorted(hs.open(address).ids) == ["a", "b"]


def test_addresses_at_which_nothing_can_be_done(cli, s3, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(ROWS[0]) + "\n")
    for command in (("validate",), ("info",), ("extract", "--model", MODEL, "--data", data, "--layers", "2", "--out")):
        code, *printed = cli(*command, "s3://no-such-bucket/x")
        assert (code, "HS501" in "".join(printed), "NoSuchBucket" in "".join(printed)) == (2, True, True), command
    code, *printed = cli("validate", f"s3://{s3}/nothing")
    assert (code, "HS501" in "".join(printed)) == (2, True)
    assert list((tmp_path / "work").iterdir()) == []
