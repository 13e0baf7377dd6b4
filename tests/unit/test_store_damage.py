"""Damage: what was committed and is lost or changed is named, and never read as zeros."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conformance.independent_reader import crc32c
from factories import assert_same_record, tiny_contract, tiny_record
from refusals import refused

import hsformat.store as hs
from hsformat.digests import checksum
from hsformat.problems import ExitCode, Severity, StoreError, exit_code
from hsformat.store.commit import load_commit, seal
from hsformat.store.local import LocalBackend, LocalFile
from hsformat.store.metadata import segment_names
from hsformat.store.native import NativeArray
from hsformat.store.reference import ArrayFiles
from hsformat.store.segment import SegmentReader
from hsformat.store.verify import INDEX_ARRAYS, file_problems, index_problems
from hsformat.validate import validate_store

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=20, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of each codec: one segment, 16 tokens in a chunk of states."""
    folder = tmp_path_factory.mktemp("built")
    for codec in ("compact", "fast"):
        with hs.create(folder / codec, CONTRACT, codec=codec, chunk_tokens=16) as writer:  # type: ignore[arg-type]  # text
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


@each_codec
@pytest.mark.parametrize("name", ["hidden/d2/c/0/0", "loss_mask/c/0", "hidden/d2/zarr.json"])
def test_missing_file_is_never_zeros(path: Path, name: str) -> None:  # zarr-python#486, #587, xarray#9701
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
def test_flipped_byte_names_the_record(path: Path) -> None:  # zarr-python#52, numcodecs#610, zarr-specs PR#237
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
            if key.startswith(("hidden/d", "input_ids", "loss_mask")) and not key.endswith("zarr.json"):
                assert codes(hs.open(path)) == {"HS504"}, (key, at)
            elif key.endswith("zarr.json"):  # what it must say is known from its checksum, unless chunks are unusual
                assert codes(hs.open(path)) <= {"HS504"}, (key, at)
        file.write_bytes(good)
    assert list(file_problems(backend, commit, content=True)) == []


def codes(store: hs.Store) -> set[str]:
    """Return the codes of all problems met in reading every record; what is read is what was written."""
    found: set[str] = set()
    for record in RECORDS:
        try:
            read = store[record.id]
        except StoreError as e:
            found.update(p.code for p in e.problems)
        else:
            assert_same_record(read, record)
    return found


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalFile, start: int, parts: Any) -> int:
        raise OSError(5, "Input/output error")

    store = hs.open(path)
    assert store[0].id == "r0"
    monkeypatch.setattr(LocalFile, "read_into", fail)
    assert refused(lambda: store[1]) == [("HS503", "r1")]


def test_broken_offsets(path: Path) -> None:  # zarr-python#2618
    backend = LocalBackend(str(path))
    commit, _ = load_commit(backend, segment(path).name)
    assert commit is not None
    reader = SegmentReader(backend, CONTRACT, commit)
    arrays = {name: reader.try_read(name)[0] for name in INDEX_ARRAYS}
    assert list(index_problems(commit, arrays, where="s")) == []  # type: ignore[arg-type]  # text
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
        (lambda a: a["files"].update({"a//b": {"size": 1, "checksum": f"xxh3-128:{0:032x}"}}), "HS504"),
        (lambda a: a.update(spec_version="9.0"), "HS507"),
        (lambda a: a.pop("tokens"), "HS504"),
        (lambda a: a.update(states=["x"]), "HS504"),
        (lambda a: a["source_digests"].__setitem__(0, "banana"), "HS504"),
        (lambda a: a["provenance"][0].pop("template_digest"), "HS504"),
        (lambda a: a["provenance"][0]["generation"].pop("seed"), "HS504"),
        (lambda a: a["provenance"].__setitem__(0, "none"), "HS504"),
        (lambda a: a.update(tokens=[2**52] * 4, states=[2**52] * 4), "HS504"),
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


def test_segment_of_another_version_is_one_error_and_the_others_are_read(path: Path) -> None:
    rewrite(path, lambda a: a.update(spec_version="9.0"))
    with hs.create(path.with_name("other"), CONTRACT) as writer:
        writer.append(tiny_record(CONTRACT, "later"))
    later = segment(path.with_name("other"))
    shutil.copytree(later, path / "segments" / later.name)
    problems = validate_store(path, level="full")
    assert [p.code for p in problems if p.severity == "error"] == ["HS507"]
    assert exit_code(problems) == ExitCode.PROBLEMS
    assert hs.open(path, damaged="skip").ids == ["later"]


def test_what_a_later_writer_adds_is_ignored(path: Path) -> None:
    def add(a: dict[str, Any]) -> None:
        a["colour"] = "red"
        a["files"]["notes/a b.txt"] = {"size": 5, "checksum": checksum(b"hello"), "made": 1}
        a["files"]["input_ids/c/0"]["level"] = 3
        a["provenance"][0]["where"] = {"x": 1}
        a["provenance"][0]["generation"]["beams"] = 4

    (segment(path) / "notes").mkdir()
    (segment(path) / "notes/a b.txt").write_bytes(b"hello")
    rewrite(path, add)
    store = hs.open(path)
    for record in RECORDS:
        assert_same_record(store[record.id], record)
    assert validate_store(path, level="full") == []
    (segment(path) / "notes/a b.txt").write_bytes(b"Hello")
    assert [p.code for p in validate_store(path, level="full")] == ["HS504"]


def rewrite_index(path: Path, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Change the index of a shard of 80 states, 16 a chunk, and make all its checksums right again."""
    file = segment(path) / "hidden/d2/c/0/0"
    data = file.read_bytes()
    index = np.frombuffer(data[-84:-4], "<u8").reshape(5, 2).copy()
    change(index)
    tail = index.tobytes()
    data = data[:-84] + tail + struct.pack("<I", crc32c(tail))
    file.write_bytes(data)
    entry = {"size": len(data), "checksum": checksum(data)}
    rewrite(path, lambda a: a["files"].update({"hidden/d2/c/0/0": entry}))


@each_codec
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda i: i[1].fill(2**64 - 1), "HS503"),
        (lambda i: i[:, 0].fill(2**64 - 1), "HS503"),
        (lambda i: i[4].fill(2**64 - 1), "HS503"),
        (lambda i: i.fill(0), "HS504"),
        (lambda i: i[0].put(1, 0), "HS504"),
        (lambda i: i[1].put(0, 2**63), "HS504"),
        (lambda i: i[1].put(1, 2**63), "HS504"),
    ],
)
def test_chunk_that_a_shard_leaves_out_is_never_fill_values(path: Path, change: Any, code: str) -> None:
    rewrite_index(path, change)
    store = hs.open(path)
    for record in RECORDS:
        assert refused(lambda record=record: store[record.id]) == [(code, record.id)]  # type: ignore[misc]  # bound now
    assert store.read(0, captures=["d1"]).hidden["d1"].tobytes() == RECORDS[0].hidden["d1"].tobytes()
    assert code in {p.code for p in validate_store(path, level="full")}
    assert code in {p.code for p in validate_store(path, level="sample")}


@pytest.mark.parametrize(
    ("decoder", "changed", "name"), [("zarr", ArrayFiles, "_size"), ("native", NativeArray, "_fill")]
)
def test_defect_of_the_program_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, decoder: Any, changed: type, name: str
) -> None:
    def defect(self: Any, *_: Any) -> int:
        raise AttributeError("a defect")

    store = hs.open(path, decoder=decoder)
    monkeypatch.setattr(changed, name, defect)
    with pytest.raises(AttributeError, match="a defect"):
        store[0]


@pytest.mark.parametrize("name", ["hidden/zarr.json", "stats/zarr.json"])
def test_damaged_group_is_reported(path: Path, name: str) -> None:
    file = segment(path) / name
    file.write_bytes(file.read_bytes().replace(b"group", b"Group"))
    assert [p.code for p in validate_store(path, level="full")] == ["HS504"]


@pytest.mark.parametrize("name", ["", "segments/", "segments/*/"])
def test_every_flipped_bit_of_a_group_is_found_or_harmless(path: Path, name: str) -> None:
    """Of what stands before the attribute, which no checksum covers: zarr reads the arrays, or it is an error."""
    (file,) = path.glob(f"{name}zarr.json")
    good, arrays = file.read_bytes(), 0
    for at in range(good.index(b'"attributes"')):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            file.write_bytes(bad)
            if not [p for p in validate_store(path, level="metadata") if p.severity is Severity.ERROR]:
                group = zarr.open_group(path, mode="r", use_consolidated=False)[f"segments/{segment(path).name}"]
                arrays += np.asarray(group["input_ids"][:]).size  # type: ignore[index, call-overload]  # a group
    assert arrays == 0  # every byte of it counts


def test_any_damage_of_any_file_is_a_problem_and_no_other_exception(path: Path) -> None:
    """Flipped, cut or grown, with and without checksums made right: nothing else comes out, and no fill values do."""
    rng = np.random.default_rng(3)
    record = segment(path) / "zarr.json"
    good_commit = record.read_bytes()
    keys = [k for k in json.loads(good_commit)["attributes"]["hsformat"]["files"] if "stats" not in k]
    found: set[str] = set()
    for i in range(40):
        key = keys[int(rng.integers(len(keys)))]
        file = segment(path) / key
        good = file.read_bytes()
        bad = bytearray(good)
        for _ in range(int(rng.integers(1, 4))):
            bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        bad = [bad, bad[: int(rng.integers(len(bad)))], bad + bytes(3)][i % 3]
        file.write_bytes(bad)
        if i % 4:
            entry = {"size": len(bad), "checksum": checksum(bytes(bad))}
            rewrite(path, lambda a, key=key, entry=entry: a["files"].update({key: entry}))  # type: ignore[misc]  # bound now
        store = hs.open(path)
        for wanted in RECORDS:
            try:
                assert_same_record(store[wanted.id], wanted)
            except StoreError as e:
                found.update(p.code for p in e.problems)
        if i % 5 == 0:
            validate_store(path, level="full")
        file.write_bytes(good)
        record.write_bytes(good_commit)
    assert {"HS504", "HS505"} <= found <= {"HS101", "HS503", "HS504", "HS505", "HS507"}


def test_ids_are_counted_once_where_some_are_duplicates(path: Path) -> None:
    first, second = hs.append(path), hs.append(path)
    for writer in (first, second):
        writer.append(tiny_record(CONTRACT, "twice"))
        writer.close()
    store = hs.open(path)
    assert refused(lambda: store["twice"]) == [("HS107", "twice")]
    store._ids = Uncounted(store._ids)
    assert_same_record(store["r2"], RECORDS[2])
    assert refused(lambda: store["twice"]) == [("HS107", "twice")]


class Uncounted(list[str]):
    """A list that must not be searched."""

    def count(self, _: object) -> int:
        raise AssertionError("searched")
