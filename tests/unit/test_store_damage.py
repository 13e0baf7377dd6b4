"""Damage: what was committed and is lost or changed is named, and never read as zeros."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from factories import assert_same_record, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.contract import Contract
from hsformat.digests import canonical_json, checksum
from hsformat.problems import StoreError
from hsformat.store.backend import LocalBackend
from hsformat.store.metadata import load_commit, seal, segment_names
from hsformat.store.segment import SegmentReader
from hsformat.store.verify import INDEX_ARRAYS, file_problems, index_problems

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=20, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of each codec: one segment, 16 tokens in a chunk of states."""
    folder = tmp_path_factory.mktemp("built")
    for codec in ("compact", "fast"):
        with hs.create(folder / codec, CONTRACT, codec=codec, chunk_tokens=16) as writer:  # type: ignore[arg-type]
            for record in RECORDS:
                writer.append(record)
    return folder


@pytest.fixture
def path(built: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy to damage."""
    return shutil.copytree(built / getattr(request, "param", "compact"), tmp_path / "s")


each_codec = pytest.mark.parametrize("path", ["compact", "fast"], indirect=True)


def segment(path: Path) -> Path:
    (name,) = segment_names(LocalBackend(str(path)))
    return path / "segments" / name


def refused(action: Callable[[], Any]) -> list[tuple[str, str | None]]:
    with pytest.raises(StoreError) as e:
        action()
    for p in e.value.problems:
        assert p.got != p.expected
    return [(p.code, p.id) for p in e.value.problems]


@each_codec
@pytest.mark.parametrize("name", ["hidden/d2/c/0/0", "loss_mask/c/0", "hidden/d2/zarr.json"])
def test_missing_file_is_never_zeros(path: Path, name: str) -> None:  # zarr-python#486
    (segment(path) / name).unlink()
    store = hs.open(path)
    assert refused(lambda: store["r1"]) == [("HS503", "r1")]


@each_codec
def test_missing_states_are_nan_and_not_zeros_for_a_plain_reader(path: Path) -> None:  # zarr-python#486
    (segment(path) / "hidden/d2/c/0/0").unlink()
    assert np.isnan(np.asarray(zarr.open_array(segment(path) / "hidden/d2", mode="r")[:]).astype(np.float32)).all()


@each_codec
@pytest.mark.parametrize("keep", [0, 0.1, 0.5, 0.99, 1.5])
def test_cut_or_grown_file(path: Path, keep: float) -> None:  # zarrs-python#185, osaurus PR#2333
    shard = segment(path) / "hidden/d3/c/0/0"
    data = shard.read_bytes()
    shard.write_bytes((data * 2)[: int(len(data) * keep)])
    store = hs.open(path)
    assert refused(lambda: store[2]) == [("HS505", "r2")]
    assert store.read(2, captures=["d1"]).hidden["d1"].tobytes() == RECORDS[2].hidden["d1"].tobytes()


@each_codec
def test_flipped_byte_names_the_record(path: Path) -> None:  # zarr-python#52, numcodecs#610
    shard = segment(path) / "hidden/d3/c/0/0"
    data = bytearray(shard.read_bytes())
    data[3] ^= 0x10  # in the first chunk: tokens 0..15, all of r0
    shard.write_bytes(data)
    store = hs.open(path)
    with pytest.raises(StoreError) as e:
        store["r0"]
    (p,) = e.value.problems
    assert (p.code, p.id) == ("HS504", "r0")
    assert "hidden/d3" in p.where
    assert_same_record(store["r3"], RECORDS[3])


@each_codec
def test_every_flipped_byte_of_every_file_is_found(path: Path) -> None:
    backend = LocalBackend(str(path))
    commit, _ = load_commit(backend, segment(path).name)
    assert commit is not None
    rng = np.random.default_rng(0)
    for key in commit.files:
        file = segment(path) / key
        good = file.read_bytes()
        for at in rng.integers(0, len(good), 3):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            assert [p.code for p in file_problems(backend, commit, content=True)] == ["HS504"]
            if key.startswith(("hidden/d", "input_ids", "loss_mask")):
                assert codes(hs.open(path)) == {"HS504"}, (key, at)
        file.write_bytes(good)
    assert list(file_problems(backend, commit, content=True)) == []


def codes(store: hs.Store) -> set[str]:
    """Return the codes of all problems met in reading every record."""
    found: set[str] = set()
    for record in RECORDS:
        try:
            store[record.id]
        except StoreError as e:
            found.update(p.code for p in e.problems)
    return found


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalBackend, key: str, start: int = 0, length: int | None = None) -> bytes:
        raise OSError(5, "Input/output error")

    store = hs.open(path)
    assert store[0].id == "r0"
    monkeypatch.setattr(LocalBackend, "read", fail)
    assert refused(lambda: store[1]) == [("HS503", "r1")]


def test_broken_offsets(path: Path) -> None:  # zarr-python#2618
    backend = LocalBackend(str(path))
    commit, _ = load_commit(backend, segment(path).name)
    assert commit is not None
    reader = SegmentReader(backend, CONTRACT, commit)
    arrays = {name: reader.try_read(name)[0] for name in INDEX_ARRAYS}
    assert list(index_problems(commit, arrays, where="s")) == []  # type: ignore[arg-type]
    for name, array in arrays.items():
        assert array is not None
        changed = array.copy()
        changed[-1] += 1
        for bad in (changed, array[:-1]):
            assert [p.code for p in index_problems(commit, {name: bad}, where="s")] == ["HS108"]
    (segment(path) / "state_offsets/c/0").write_bytes(b"")
    array, problems = SegmentReader(backend, CONTRACT, commit).try_read("state_offsets")
    assert array is None
    assert [p.code for p in problems] == ["HS505"]


# --- commit records


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], *, sealed: bool = True) -> None:
    file = segment(path) / "zarr.json"
    data = json.loads(file.read_bytes())
    attribute = data["attributes"]["hsformat"]
    change(attribute)
    if sealed:
        attribute.pop("checksum", None)
        data["attributes"]["hsformat"] = seal(attribute)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b'{"zarr_format": 3, "attr', b"[]", b"{}", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_damaged_commit_record_refuses_the_store_or_is_skipped(path: Path, raw: bytes) -> None:
    with hs.append(path) as writer:
        writer.append(tiny_record(CONTRACT, "later"))
    first = segment_names(LocalBackend(str(path)))[0]
    (path / "segments" / first / "zarr.json").write_bytes(raw)
    assert refused(lambda: hs.open(path)) == [("HS504", None)]
    assert refused(lambda: hs.append(path)) == [("HS504", None)]
    store = hs.open(path, damaged="skip")
    assert store.ids == ["later"]
    assert [p.code for p in store.problems] == ["HS504"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda a: a.update(n=7), "HS504"),
        (lambda a: a.update(records=5), "HS504"),
        (lambda a: a["ids"].pop(), "HS504"),
        (lambda a: a["ids"].__setitem__(0, "r1"), "HS504"),
        (lambda a: a["tokens"].__setitem__(0, 19), "HS504"),
        (lambda a: a["provenance_index"].__setitem__(0, 3), "HS504"),
        (lambda a: a["files"].update({"../../zarr.json": {"size": 1, "checksum": f"xxh3-128:{0:032x}"}}), "HS504"),
        (lambda a: a["files"].update({"/etc/passwd": {"size": 1, "checksum": f"xxh3-128:{0:032x}"}}), "HS504"),
        (lambda a: a.update(spec_version="9.0"), "HS502"),
        (lambda a: a.pop("tokens"), "HS502"),
        (lambda a: a.update(states=["x"]), "HS502"),
    ],
)
def test_commit_record_that_contradicts_itself(path: Path, change: Callable[[dict[str, Any]], Any], code: str) -> None:
    rewrite(path, change, sealed=False)
    assert refused(lambda: hs.open(path)) == [("HS504", None)]  # by its checksum
    rewrite(path, lambda a: None)
    assert refused(lambda: hs.open(path))[0][0] == code


def test_commit_record_that_names_no_file_of_an_array(path: Path) -> None:
    rewrite(path, lambda a: [a["files"].pop(k) for k in list(a["files"]) if k.startswith("hidden/d1/")])
    store = hs.open(path)
    assert refused(lambda: store[0]) == [("HS503", "r0")]


def test_commit_record_that_names_no_chunk(path: Path) -> None:
    rewrite(path, lambda a: a["files"].pop("hidden/d1/c/0/0"))
    store = hs.open(path)
    assert refused(lambda: store[0]) == [("HS503", "r0")]


@pytest.mark.parametrize(
    ("shape", "dtype", "code"),
    [((79, 8), "bfloat16", "HS101"), ((80, 9), "bfloat16", "HS507"), ((80, 8), "float16", "HS507")],
)
def test_array_that_is_not_what_the_contract_says(path: Path, shape: Any, dtype: str, code: str) -> None:
    file = segment(path) / "hidden/d1/zarr.json"
    meta = json.loads(file.read_text())
    meta.update(shape=shape, data_type=dtype)
    meta["chunk_grid"]["configuration"]["chunk_shape"][1] = shape[1]
    meta["codecs"][0]["configuration"]["chunk_shape"][1] = shape[1]
    data = json.dumps(meta).encode()
    file.write_bytes(data)
    rewrite(path, lambda a: a["files"].update({"hidden/d1/zarr.json": {"size": len(data), "checksum": checksum(data)}}))
    store = hs.open(path)
    assert refused(lambda: store[0]) == [(code, "r0")]


def test_uncommitted_segment_is_a_note(path: Path) -> None:
    with hs.append(path) as writer:
        writer.append(tiny_record(CONTRACT, "lost"))
    last = segment_names(LocalBackend(str(path)))[-1]
    (path / "segments" / last / "zarr.json").unlink()
    store = hs.open(path)
    assert len(store) == 4
    assert [(p.code, p.severity) for p in store.problems] == [("HS506", "note")]
    with hs.append(path) as writer:
        assert "lost" not in writer.ids


# --- the root


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
        assert refused(lambda name=name: hs.open(tmp_path / name)) == [("HS501", None)], name  # type: ignore[misc]
    assert refused(lambda: hs.open("s3://bucket/data")) == [("HS501", None)]
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
def test_stale_consolidated_metadata_is_ignored(path: Path) -> None:  # Zarr.jl PR#342, arco-era5#81
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
