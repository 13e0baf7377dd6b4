"""A reader of hsformat 1.0 that was written from the specification alone, to prove that the specification is complete.

It uses ``docs/spec/1.0.md``, the JSON Schema beside it and the public Zarr v3 specifications, and neither ``hsformat``
nor ``zarr``. It favours plain code over speed. A ``bfloat16`` array is returned as the uint16 of its bits.
"""

import functools
import hashlib
import json
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785
import xxhash
from numcodecs import Blosc

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/spec/1.0.schema.json").read_text("utf-8"))
PER_RECORD = ("ids", "tokens", "states", "provenance_index", "source_digests")
COMMIT_MEMBERS = {
    "spec_version",
    "writer",
    "n",
    "records",
    "provenance",
    "producer",
    "replaces",
    "files",
    "checksum",
    *PER_RECORD,
}
CRC_TABLE = [functools.reduce(lambda c, _: (c >> 1) ^ (0x82F63B78 * (c & 1)), range(8), n) for n in range(256)]


class FormatError(Exception):
    """A store breaks a rule; the text begins with the rule's problem code."""


@dataclass(frozen=True)
class Record:
    """One record, as section 4 of the specification describes it."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    hidden: Mapping[str, np.ndarray]
    fields: Mapping[str, np.ndarray]
    provenance: Mapping[str, Any]
    source_digest: str | None


def require(ok: bool, code: str, text: str) -> None:
    """Raise a FormatError with a code and a text unless a condition holds."""
    if not ok:
        raise FormatError(f"{code}: {text}")


def crc32c(data: bytes) -> int:
    """Compute the CRC-32C of bytes: Castagnoli, reflected, initial value and final XOR of all ones."""
    value = 0xFFFFFFFF
    for byte in data:
        value = CRC_TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def checksum(data: bytes) -> str:
    """Write the checksum of bytes as section 1 does."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def digest(value: Any) -> str:
    """Compute the digest of a JSON value over its canonical form."""
    return "sha256:" + hashlib.sha256(rfc8785.dumps(value)).hexdigest()


def compatibility_digest(contract: Mapping[str, Any]) -> str:
    """Compute the compatibility digest of a contract (rule X-2)."""
    kept = {k: v for k, v in contract.items() if k not in ("layout", "codec")}
    kept["target"] = {k: v for k, v in contract["target"].items() if k not in ("name", "revision")}
    kept["target"]["rope"] = sorted(kept["target"]["rope"], key=lambda entry: entry["applies_to"])
    needed = (field for field in contract["fields"] if field["must_understand"])
    kept["fields"] = sorted(needed, key=lambda field: field["name"])
    return digest(kept)


def check_members(value: Any, schema: Mapping[str, Any], at: str) -> None:
    """Refuse unknown and missing members of a contract and of all objects in it, by name (rule C-1)."""
    schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    if schema.get("type") == "array":
        for number, item in enumerate(value):
            check_members(item, schema["items"], f"{at}[{number}]")
    elif "properties" in schema:
        for name in schema["required"]:
            require(name in value, "HS502", f"missing member {at}.{name}")
        for name, item in value.items():
            require(name in schema["properties"], "HS502", f"unknown member {at}.{name}")
            check_members(item, schema["properties"][name], f"{at}.{name}")


def read_group(folder: Path, code: str) -> Any:
    """Read the attribute ``hsformat`` of a Zarr v3 group (rules S-1 and G-1)."""
    data = json.loads((folder / "zarr.json").read_bytes())
    named = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}
    unknown = [v for k, v in data.items() if k not in named]
    group = (data.get("zarr_format"), data.get("node_type")) == (3, "group")
    ignored = all(isinstance(v, dict) and v.get("must_understand") is False for v in unknown)
    require(group and ignored, code, f"{folder}: no Zarr v3 group")
    return data["attributes"]["hsformat"]


def read_commit(folder: Path, *, verify_files: bool) -> Any:
    """Read a segment's commit record and check it and its files (rules G-1 to G-4)."""
    commit = read_group(folder, "HS504")
    require(commit.keys() >= COMMIT_MEMBERS, "HS504", f"{folder}: no {COMMIT_MEMBERS - commit.keys()}")
    body = rfc8785.dumps({k: v for k, v in commit.items() if k != "checksum"})
    require(checksum(body) == commit["checksum"], "HS504", f"{folder}: checksum of the commit record (G-1)")
    require(commit["spec_version"] == "1.0", "HS507", f"{folder}: version {commit['spec_version']} (G-15)")
    named = folder.name == f"{commit['writer']}-{commit['n']}"
    counted = all(len(commit[name]) == commit["records"] >= 1 for name in PER_RECORD)
    require(named and counted, "HS504", f"{folder}: the commit record contradicts itself or its folder's name")
    for name, entry in commit["files"].items():
        path = folder / name
        require(path.is_file(), "HS503", f"{path}: G-2")
        require(path.stat().st_size == entry["size"], "HS505", f"{path}: G-3")
        require(not verify_files or checksum(path.read_bytes()) == entry["checksum"], "HS504", f"{path}: G-4")
    return commit


def replaced_by(folder: Path) -> list[str]:
    """Read which segments a committed one replaces (rule S-9); one that is damaged replaces none."""
    try:
        commit = read_commit(folder, verify_files=False)
    except (FormatError, ValueError, KeyError):
        return []
    return commit["replaces"]


def _decode(data: bytes, codecs: list[str], at: str) -> bytes:
    require(len(data) >= 4 and data[-4:] == struct.pack("<I", crc32c(data[:-4])), "HS504", f"{at}: bad CRC-32C")
    return Blosc().decode(data[:-4]) if "blosc" in codecs else data[:-4]


def read_array(folder: Path, dtype: str, shape: tuple[int, ...], *, sharded: bool) -> np.ndarray:
    """Read an array of a segment after checking its metadata against rules G-7 and G-11."""
    meta = json.loads((folder / "zarr.json").read_bytes())
    require(meta["shape"][0] == shape[0], "HS101", f"{folder}: first dimension (G-11)")
    codecs, outer = meta["codecs"], meta["chunk_grid"]["configuration"]["chunk_shape"]
    inner = codecs[0]["configuration"] if sharded else {"codecs": codecs}
    ok = meta["data_type"] == dtype and meta["shape"][1:] == outer[1:] == list(shape[1:])
    names = [c["name"] for c in inner["codecs"]]
    ok = (
        ok
        and names in (["bytes", "blosc", "crc32c"], ["bytes", "crc32c"])
        and (codecs[0]["name"] == "sharding_indexed") == sharded
    )
    require(ok, "HS507", f"{folder}: element type, trailing dimensions or codecs (G-7)")
    step = inner["chunk_shape"][0] if sharded else shape[0]
    count, file = -(-shape[0] // step), folder.joinpath("c", *"0" * len(shape))
    require(outer[0] == count * step, "HS507", f"{folder}: more than one chunk or shard (G-7)")
    require(file.is_file(), "HS503", f"{file}: missing (G-2)")
    data, chunks = file.read_bytes(), []
    index = _decode(data[-16 * count - 4 :], [], f"{folder}: index") if sharded else struct.pack("<QQ", 0, len(data))
    for number, (offset, size) in enumerate(struct.iter_unpack("<QQ", index)):
        require(2**64 - 1 not in (offset, size), "HS503", f"{folder}: chunk {number} is missing (G-12)")
        chunks.append(_decode(data[offset : offset + size], names, f"{folder}: chunk {number}"))
    stored = np.dtype("<u2") if dtype == "bfloat16" else np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(b"".join(chunks), stored).reshape(outer)[: shape[0]]


def read_segment(folder: Path, contract: Mapping[str, Any], *, verify_files: bool) -> list[Record]:
    """Read all records of a committed segment."""
    commit = read_commit(folder, verify_files=verify_files)
    lengths = (commit["tokens"], commit["states"], [len(text.encode()) for text in commit["ids"]])
    ends = {axis: [0, *accumulate(each)] for axis, each in zip(("token", "state", "id"), lengths, strict=True)}
    R, T, S, H = commit["records"], ends["token"][-1], ends["state"][-1], contract["target"]["hidden_size"]
    for axis, end in ends.items():
        stored = read_array(folder / f"{axis}_offsets", "int64", (R + 1,), sharded=False)
        require(stored.tolist() == sorted(set(end)), "HS108", f"{folder}: {axis}_offsets (G-5)")
    text = read_array(folder / "ids", "uint8", (ends["id"][-1],), sharded=False)
    require(text.tobytes() == "".join(commit["ids"]).encode(), "HS108", f"{folder}: ids (G-6)")
    by_token = {"input_ids": "int32", "loss_mask": "uint8"}
    by_token |= {"position_ids": "int64"} if "position_ids/zarr.json" in commit["files"] else {}
    tokens = {name: read_array(folder / name, dtype, (T,), sharded=True) for name, dtype in by_token.items()}
    tokens.setdefault("position_ids", np.concatenate([np.arange(t, dtype="<i8") for t in commit["tokens"]]))
    keys = {f"d{c['depth']}" + "n" * (c["norm"] == "final"): c["dtype"] for c in contract["captures"]}
    hidden = {key: read_array(folder / "hidden" / key, dtype, (S, H), sharded=True) for key, dtype in keys.items()}
    fields, records, axes = {}, [], {field["name"]: field["axis"] for field in contract["fields"]}
    for field in contract["fields"]:
        token = field["axis"] == "token"
        shape = (T if token else R, *field.get("shape", ()))
        fields[field["name"]] = read_array(folder / "fields" / field["name"], field["dtype"], shape, sharded=token)
    for row in range(R):
        at = {"record": row} | {axis: slice(*ends[axis][row : row + 2]) for axis in ("token", "state")}
        records.append(Record(
            id=commit["ids"][row], **{name: values[at["token"]] for name, values in tokens.items()},
            hidden={key: rows[at["state"]] for key, rows in hidden.items()},
            fields={name: values[at[axes[name]]] for name, values in fields.items()},
            provenance=commit["provenance"][commit["provenance_index"][row]],
            source_digest=commit["source_digests"][row],
        ))  # fmt: skip
    return records


def read_store(path: Path, known: Collection[str] = (), *, verify_files: bool = True) -> tuple[Any, list[Record]]:
    """Read a store whole, and refuse it with a FormatError if it is of another version, damaged or incomplete.

    Parameters
    ----------
    path
        The store's folder.
    known
        Names of the fields that the caller understands (rule C-11).
    verify_files
        Whether to check every file's checksum (rule G-4), besides those of the chunks.

    Returns
    -------
    tuple[Any, list[Record]]
        The contract, and the records in the order of rule S-4.
    """
    root = read_group(path, "HS501")
    require(root.keys() >= {"spec_version", "contract", "contract_digest"}, "HS502", f"members are {list(root)} (S-7)")
    contract, versions = root["contract"], (root["spec_version"], root["contract"].get("spec_version"))
    require(versions == ("1.0", "1.0"), "HS502", f"unknown spec_version {versions} (C-2, S-2)")
    check_members(contract, SCHEMA, "contract")
    unknown = {field["name"] for field in contract["fields"] if field["must_understand"]} - set(known)
    require(not unknown, "HS502", f"fields {unknown} must be understood (C-11)")
    require(digest(contract) == root["contract_digest"], "HS504", "contract_digest (X-1)")
    name, folders = re.compile(r"([0-9a-z]{1,32})-(0|[1-9][0-9]*)"), (path / "segments").glob("*-*/zarr.json")
    found = sorted((m[1], int(m[2]), f.parent) for f in folders if (m := name.fullmatch(f.parent.name)))
    replaced = {old for *_, folder in found for old in replaced_by(folder)}
    found = [entry for entry in found if entry[2].name not in replaced]
    records = [r for *_, folder in found for r in read_segment(folder, contract, verify_files=verify_files)]
    require(len({record.id for record in records}) == len(records), "HS107", "an id occurs twice (R-8)")
    return contract, records
