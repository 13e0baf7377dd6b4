"""Folders that are no store, and roots that are damaged, edited or of another version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr
from factories import assert_same_record, tiny_contract, tiny_record
from refusals import refused

import hsformat.store as hs
from hsformat.contract import Contract
from hsformat.digests import canonical_json
from hsformat.problems import StoreError

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=20, seed=i) for i in range(4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of four records."""
    with hs.create(tmp_path / "s", CONTRACT) as writer:
        for record in RECORDS:
            writer.append(record)
    return tmp_path / "s"


@pytest.mark.parametrize(
    "raw", [b"", b"[1]", b'{"zarr_format": 3, "no', b"\xff", b'{"zarr_format": 3, "node_type": "group"}']
)
def test_folder_that_is_no_store(path: Path, raw: bytes) -> None:
    (path / "zarr.json").write_bytes(raw)
    assert refused(lambda: hs.open(path)) == [("HS501", None)]
    assert refused(lambda: hs.append(path)) == [("HS501", None)]


def test_json_cut_in_the_middle_says_where(path: Path) -> None:
    text = (path / "zarr.json").read_text()
    (path / "zarr.json").write_text(text[:100])
    with pytest.raises(StoreError, match=r"character .* of 100"):
        hs.open(path)


def test_paths_that_hold_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    (tmp_path / "dir/zarr.json").mkdir(parents=True)
    zarr.create_group(tmp_path / "group")
    for name in ("nothing", "file", "empty", "full", "dir", "group", "x" * 300, "\0", "file/below"):
        assert refused(lambda name=name: hs.open(tmp_path / name)) == [("HS501", None)], name  # type: ignore[misc]  # bound now
    assert refused(lambda: hs.open("ftp://bucket/data")) == [("HS501", None)]
    assert refused(lambda: hs.open("")) == [("HS501", None)]


def root(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((path / "zarr.json").read_text())
    change(data["attributes"]["hsformat"])
    (path / "zarr.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        (lambda a: a.update(spec_version="9.0"), "HS502", "spec_version"),
        (lambda a: a.pop("spec_version"), "HS502", "spec_version"),
        (lambda a: a.pop("contract"), "HS502", "contract"),
        (lambda a: a.pop("contract_digest"), "HS502", "contract_digest"),
        (lambda a: a["contract"].update(spec_version="9.0"), "HS502", "spec_version"),
        (lambda a: a["contract"].update(colour="red"), "HS502", "colour"),
        (lambda a: a["contract"]["target"].pop("vocab_size"), "HS502", "vocab_size"),
        (lambda a: a["contract"]["target"].update(vocab_size=99), "HS504", "contract_digest"),
        (lambda a: a.update(contract_digest=7), "HS504", "contract_digest"),
    ],
)
def test_root_of_another_version_or_edited(path: Path, change: Callable[[Any], Any], code: str, name: str) -> None:
    root(path, change)
    with pytest.raises(StoreError) as e:
        hs.open(path)
    assert e.value.problems[0].code == code
    assert name in e.value.problems[0].where


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_stale_consolidated_metadata_is_ignored(path: Path) -> None:  # Zarr.jl PR#342, arco-era5#81, xarray#5878
    zarr.consolidate_metadata(str(path))
    with hs.append(path) as writer:
        writer.append(tiny_record(CONTRACT, "later"))
    store = hs.open(path)
    assert store.ids[-1] == "later"
    assert_same_record(store["r1"], RECORDS[1])
    assert [(p.code, p.severity) for p in store.problems] == [("HS508", "warning")]


def test_the_contract_on_disk_is_canonical_and_whole(path: Path) -> None:
    data = json.loads((path / "zarr.json").read_text())
    stored = data["attributes"]["hsformat"]["contract"]
    codec = stored["codec"]
    contract = Contract.model_validate_json(json.dumps(stored))
    assert contract == tiny_contract(codec=codec)
    assert canonical_json(contract.to_json()) == canonical_json(stored)
