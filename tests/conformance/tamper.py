"""Damage a store in one exact way, and leave everything else consistent: checksums, sizes, seals, digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conformance.independent_reader import crc32c

from hsformat.contract import Contract
from hsformat.digests import canonical_json, checksum, digest_json
from hsformat.dtypes import numpy_dtype
from hsformat.store.array_json import ArraySpec, Axis
from hsformat.store.arrays import encode_array


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def edit_root(store: Path, edit: Callable[[dict[str, Any]], None], *, digest: bool = True) -> None:
    """Edit the root attribute; its contract_digest is made right again unless ``digest`` is False."""
    data = read_json(store / "zarr.json")
    attribute = data["attributes"]["hsformat"]
    edit(attribute)
    if digest and isinstance(attribute.get("contract"), dict):
        attribute["contract_digest"] = digest_json(attribute["contract"])
    write_json(store / "zarr.json", data)


def rewrite_text(path: Path, edit: Callable[[str], str]) -> None:
    path.write_text(edit(path.read_text()))


def segment(store: Path) -> Path:
    return sorted((store / "segments").glob("*-0"))[0]


def edit_commit(store: Path, edit: Callable[[dict[str, Any]], None], *, seal: bool = True) -> None:
    """Edit the first segment's commit record; its checksum is made right again unless ``seal`` is False."""
    path = segment(store) / "zarr.json"
    data = read_json(path)
    attribute = data["attributes"]["hsformat"]
    edit(attribute)
    if seal:
        body = {k: v for k, v in attribute.items() if k != "checksum"}
        attribute["checksum"] = checksum(canonical_json(body))
    write_json(path, data)


def rewrite_array(store: Path, name: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replace an array of the first segment by another one, properly encoded, with its files' entries."""
    import zarr

    import hsformat.zarr_dtype  # noqa: F401 - registers bfloat16

    contract = Contract.model_validate_json(
        json.dumps(read_json(store / "zarr.json")["attributes"]["hsformat"]["contract"])
    )
    folder = segment(store)
    new = edit(np.array(zarr.open_array(folder / name, mode="r")[...]))
    axis: Axis = "record"
    fields = {f.name: f.axis for f in contract.fields}
    if name.startswith("hidden/"):
        axis = "state"
    elif name in ("input_ids", "loss_mask", "position_ids") or fields.get(name.removeprefix("fields/")) == "token":
        axis = "token"
    spec = ArraySpec(name=name, shape=new.shape, dtype=numpy_dtype(new.dtype.name), axis=axis)
    entries = {}
    for key, data in encode_array(new, spec, codec=contract.codec):
        (folder / name / key).write_bytes(data)
        entries[f"{name}/{key}"] = {"size": len(data), "checksum": checksum(data)}
    edit_commit(store, lambda c: c["files"].update(entries))


def edit_array(store: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the zarr.json of an array of the first segment, with its entry."""
    path = segment(store) / name / "zarr.json"
    data = read_json(path)
    edit(data)
    write_json(path, data)
    list_again(store, f"{name}/zarr.json")


def list_again(store: Path, key: str) -> None:
    """Make the entry of a file of the first segment right again."""
    content = (segment(store) / key).read_bytes()
    entry = {"size": len(content), "checksum": checksum(content)}
    edit_commit(store, lambda c: c["files"].update({key: entry}))


def edit_index(store: Path, name: str, edit: Callable[[np.ndarray], None]) -> None:
    """Edit the index of a shard of the first segment, with its CRC-32C and its entry."""
    meta = read_json(segment(store) / name / "zarr.json")
    path = (segment(store) / name).joinpath("c", *"0" * len(meta["shape"]))
    data = path.read_bytes()
    rows = meta["codecs"][0]["configuration"]["chunk_shape"][0]
    length = 16 * -(-meta["shape"][0] // rows)
    index = np.frombuffer(data[-length - 4 : -4], "<u8").reshape(-1, 2).copy()
    edit(index)
    path.write_bytes(data[: -length - 4] + index.tobytes() + crc32c(index.tobytes()).to_bytes(4, "little"))
    list_again(store, path.relative_to(segment(store)).as_posix())


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
