"""The golden stores, read by a reader that was written from the specification alone."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import independent_reader as reader

GOLDEN = Path(__file__).parents[1] / "golden" / "1.0"
KNOWN = ("teacher",)
KEYS = ("d0", "d2", "d4", "d4n")


@pytest.fixture(params=["compact", "fast"])
def codec(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def expected(codec: str) -> Any:
    return json.loads((GOLDEN / f"{codec}.expected.json").read_text("utf-8"))


@pytest.fixture
def store(codec: str, tmp_path: Path) -> Path:
    """Copy the golden store, to be damaged."""
    return Path(shutil.copytree(GOLDEN / f"{codec}.hs.zarr", tmp_path / "copy.hs.zarr"))


def segment_names(store: Path) -> list[str]:
    return sorted(path.parent.name for path in (store / "segments").glob("*/zarr.json"))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the attribute hsformat of a zarr.json, and its digest or checksum with it."""
    meta = json.loads(path.read_text("utf-8"))
    attribute = meta["attributes"]["hsformat"]
    change(attribute)
    if "contract" in attribute:
        attribute["contract_digest"] = reader.digest(attribute["contract"])
    else:
        body = {name: value for name, value in attribute.items() if name != "checksum"}
        attribute["checksum"] = reader.checksum(reader.rfc8785.dumps(body))
    path.write_text(json.dumps(meta), "utf-8")


def test_crc32c_known_answers():
    assert reader.crc32c(b"123456789") == 0xE3069283
    assert reader.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


def test_contract_and_digests(codec, expected):
    contract, _ = reader.read_store(GOLDEN / f"{codec}.hs.zarr", KNOWN)
    root = json.loads((GOLDEN / f"{codec}.hs.zarr" / "zarr.json").read_bytes())["attributes"]["hsformat"]
    assert contract == expected["contract"]
    assert reader.digest(contract) == root["contract_digest"] == reader.digest(expected["contract"])
    assert reader.compatibility_digest(contract) == expected["compatibility_digest"]


def test_records(codec, expected):
    contract, records = reader.read_store(GOLDEN / f"{codec}.hs.zarr", KNOWN)
    axes = {field["name"]: field["axis"] for field in contract["fields"]}
    assert [record.id for record in records] == [want["id"] for want in expected["records"]]
    for record, want in zip(records, expected["records"], strict=True):
        tokens = len(want["input_ids"])
        assert record.input_ids.tolist() == want["input_ids"]
        assert record.loss_mask.tolist() == want["loss_mask"]
        positions = list(range(tokens)) if want["position_ids"] is None else want["position_ids"]
        assert record.position_ids.tolist() == positions
        assert record.hidden.keys() == want["hidden"].keys()
        for key, rows in record.hidden.items():
            assert list(rows.shape) == want["hidden"][key]["shape"]
            assert hashlib.sha256(rows.tobytes()).hexdigest() == want["hidden"][key]["sha256"]
        assert record.fields.keys() == want["fields"].keys()
        for name, value in record.fields.items():
            assert value.dtype.name == want["fields"][name]["dtype"].replace("bfloat16", "uint16")
            assert list(value.shape) == want["fields"][name]["shape"]
            assert hashlib.sha256(value.tobytes()).hexdigest() == want["fields"][name]["sha256"]
            assert axes[name] == "record" or len(value) == tokens
        assert record.provenance == want["provenance"]
        assert record.source_digest == want["source_digest"]


def test_both_codecs_hold_the_same_records():
    both = [reader.read_store(GOLDEN / f"{codec}.hs.zarr", KNOWN) for codec in ("compact", "fast")]
    assert reader.compatibility_digest(both[0][0]) == reader.compatibility_digest(both[1][0])
    for compact, fast in zip(both[0][1], both[1][1], strict=True):
        assert {k: v.tobytes() for k, v in compact.hidden.items()} == {k: v.tobytes() for k, v in fast.hidden.items()}


def test_files_are_all_but_the_commit_record(codec):
    for name in segment_names(GOLDEN / f"{codec}.hs.zarr"):
        folder = GOLDEN / f"{codec}.hs.zarr" / "segments" / name
        commit = reader.read_commit(folder, verify_files=True)
        on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert commit["files"].keys() == on_disk - {"zarr.json"}


def test_segments_are_ordered_by_number(codec, store, expected):
    first = segment_names(store)[0]
    shutil.move(store / "segments" / first, store / "segments" / f"{first[:-2]}-10")
    edit(store / "segments" / f"{first[:-2]}-10" / "zarr.json", lambda commit: commit.update(n=10))
    ids = [want["id"] for want in expected["records"]]
    assert [record.id for record in reader.read_store(store, KNOWN)[1]] == ids[2:4] + ids[:2] + ids[4:]


def test_segment_without_commit_record_is_ignored(store, expected):
    (store / "segments" / segment_names(store)[1] / "zarr.json").unlink()
    ids = [want["id"] for want in expected["records"]]
    assert [record.id for record in reader.read_store(store, KNOWN)[1]] == ids[:2] + ids[4:]


def test_unknown_folders_arrays_and_members_are_ignored(store, expected):
    first = segment_names(store)[0]
    for name in ("Other-0", f"{first[:-2]}-00", "no_number"):
        shutil.copytree(store / "segments" / first, store / "segments" / name)
    shutil.copytree(store / "segments" / first / "ids", store / "segments" / first / "more")
    edit(store / "segments" / first / "zarr.json", lambda commit: commit.update(new_member=1))
    assert len(reader.read_store(store, KNOWN)[1]) == len(expected["records"])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("segment", [0, 1])
def test_missing_shard_is_an_error(store, segment, key):
    (store / "segments" / segment_names(store)[segment] / "hidden" / key / "c" / "0" / "0").unlink()
    with pytest.raises(reader.FormatError, match=r"HS503"):
        reader.read_store(store, KNOWN, verify_files=False)


@pytest.mark.parametrize("listed", [True, False])
def test_shard_of_a_key_that_is_missing_everywhere(store, listed):
    folder = store / "segments" / segment_names(store)[0]
    (folder / "hidden" / "d2" / "c" / "0" / "0").unlink()
    if not listed:
        edit(folder / "zarr.json", lambda commit: commit["files"].pop("hidden/d2/c/0/0"))
    with pytest.raises(reader.FormatError, match=r"HS503"):
        reader.read_store(store, KNOWN)


def test_inner_chunk_marked_as_missing_is_an_error(store):
    name = segment_names(store)[0]
    path = store / "segments" / name / "hidden" / "d0" / "c" / "0" / "0"
    index = struct.pack("<4Q", *[2**64 - 1] * 4)
    data = path.read_bytes()
    path.write_bytes(data[:-36] + index + struct.pack("<I", reader.crc32c(index)))
    with pytest.raises(reader.FormatError, match=r"HS503.*chunk 0 is missing"):
        reader.read_store(store, KNOWN, verify_files=False)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("segment", "chunks"), [(0, 2), (1, 1)])
def test_every_inner_chunk_and_the_index_have_checksums(store, segment, chunks, key):
    path = store / "segments" / segment_names(store)[segment] / "hidden" / key / "c" / "0" / "0"
    data = path.read_bytes()
    index = data[-16 * chunks - 4 :]
    entries = list(struct.iter_unpack("<QQ", index[:-4]))
    assert struct.unpack("<I", index[-4:])[0] == reader.crc32c(index[:-4])
    places = [(offset + size // 2, f"chunk {number}") for number, (offset, size) in enumerate(entries)]
    for offset, size in entries:
        assert struct.unpack_from("<I", data, offset + size - 4)[0] == reader.crc32c(data[offset : offset + size - 4])
    for place, words in [*places, (len(data) - len(index), "index")]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(reader.FormatError, match=f"HS504.*{words}: bad CRC-32C"):
            reader.read_store(store, KNOWN, verify_files=False)


def test_size_and_checksum_of_every_file(store):
    for name in segment_names(store):
        folder = store / "segments" / name
        for file in reader.read_commit(folder, verify_files=True)["files"]:
            data = (folder / file).read_bytes()
            for changed, code in ((data + b" ", "HS505"), (bytes([data[0] ^ 1]) + data[1:], "HS504")):
                (folder / file).write_bytes(changed)
                with pytest.raises(reader.FormatError, match=code):
                    reader.read_commit(folder, verify_files=True)
            (folder / file).write_bytes(data)


def test_changed_commit_record_is_refused(store):
    path = store / "segments" / segment_names(store)[0] / "zarr.json"
    path.write_text(path.read_text("utf-8").replace('"first"', '"other"'), "utf-8")
    with pytest.raises(reader.FormatError, match=r"HS504.*commit record"):
        reader.read_store(store, KNOWN)


def test_changed_contract_is_refused(store):
    path = store / "zarr.json"
    path.write_text(path.read_text("utf-8").replace('"golden"', '"silver"'), "utf-8")
    with pytest.raises(reader.FormatError, match=r"HS504.*contract_digest"):
        reader.read_store(store, KNOWN)


def set_version(root: Any) -> None:
    root["spec_version"] = root["contract"]["spec_version"] = "9.0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_version, r"unknown spec_version .*'9\.0'"),
        (lambda root: root.update(spec_version="9.0"), r"unknown spec_version .*'9\.0'"),
        (lambda root: root["contract"].update(spec_version="9.0"), r"unknown spec_version .*'9\.0'"),
        (lambda root: root["contract"].update(extra=1), r"unknown member contract\.extra"),
        (lambda root: root["contract"]["target"]["head"].update(extra=1), r"contract\.target\.head\.extra"),
        (lambda root: root["contract"]["captures"][1].update(extra=1), r"contract\.captures\[1\]\.extra"),
        (lambda root: root["contract"].pop("positions"), r"missing member contract\.positions"),
        (lambda root: root["contract"]["target"].pop("rope"), r"missing member contract\.target\.rope"),
    ],
)
def test_contract_that_is_not_known_is_refused_by_name(store, change, words):
    edit(store / "zarr.json", change)
    with pytest.raises(reader.FormatError, match=f"HS502.*{words}"):
        reader.read_store(store, KNOWN)


def test_field_that_must_be_understood(store, expected):
    edit(store / "zarr.json", lambda root: root["contract"]["fields"][1].update(must_understand=True))
    with pytest.raises(reader.FormatError, match=r"HS502.*score"):
        reader.read_store(store, KNOWN)
    contract, _ = reader.read_store(store, known={"score", "teacher"})
    assert reader.compatibility_digest(contract) != expected["compatibility_digest"]
