"""The command line on a bucket: extract, go on, quarantine, validate, info; on a server of S3's protocol."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.cli.commands import app
from hsformat.cli.output import guarded
from hsformat.store.objects import ObjectBackend

pytestmark = pytest.mark.needs("torch")

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


def test_repair_gc_and_merge_in_a_bucket(cli, s3, tmp_path):
    contract, address = tiny_contract(), f"s3://{s3}/data.hs.zarr"
    with hs.create(address, contract) as writer:
        for i in range(4):
            writer.append(tiny_record(contract, id=f"r{i}", seed=i))
            if i % 2:
                writer.flush()
    backend, name = ObjectBackend(address), hs.open(address).segments[0].name
    backend.remove(f"segments/{name}/hidden/d2/c/0/0")
    assert cli("validate", address)[0] == 1
    code, *printed = cli("repair", address)
    assert "r0" in "".join(printed), (code, printed)
    assert hs.open(address).ids == ["r2", "r3"]
    time.sleep(2.1)  # what a service says of ages is whole seconds
    code, *printed = cli("gc", address, "--older-than", "1s")
    assert (code, len(backend.folders("segments"))) == (0, 1), printed
    code, *printed = cli("merge", address, "--out", tmp_path / "local.hs.zarr")
    assert (code, hs.open(tmp_path / "local.hs.zarr").ids) == (0, ["r2", "r3"]), printed
    code, *printed = cli("merge", tmp_path / "local.hs.zarr", "--out", f"s3://{s3}/back.hs.zarr")
    assert (code, hs.validate_store(f"s3://{s3}/back.hs.zarr", level="full")) == (0, []), printed
