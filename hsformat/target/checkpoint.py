"""The weights of a model folder, read from safetensors headers alone: names, dtypes, shapes and where the bytes are.

A safetensors file is 8 bytes of little-endian header length, a JSON header, then one buffer that the header's
offsets cover without gap or overlap (https://github.com/huggingface/safetensors). Nothing is mapped or loaded:
:func:`read_tensor` and :func:`digest_tensor` read the bytes of one tensor.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsformat.digests import digest_json
from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.strict_json import parse_json
from hsformat.target.jsonfiles import corrupt, read_object

__all__ = [
    "Checkpoint", "TensorInfo", "digest_tensor", "opened", "read_checkpoint", "read_header", "read_integers",
    "read_rows", "read_tensor", "weights_digest",
]  # fmt: skip

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER = 100_000_000  # as the reference implementation
_CHUNK = 4 << 20

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
_INTEGERS = {"BOOL": np.dtype("?"), "U8": np.dtype("u1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_NUMPY = {
    "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a checkpoint: ``dtype`` as safetensors names it, ``start`` counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        """The NumPy type of a float tensor of 16 bits or more; None: another type."""
        return _NUMPY.get(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All tensors of a model folder; ``files`` are the weight files' names, sorted."""

    folder: Path
    files: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]


def read_checkpoint(folder: Path, *, every_file: bool = False) -> Checkpoint:
    """Read the headers of all weight files: ``model.safetensors.index.json`` and its shards, or ``model.safetensors``.

    Parameters
    ----------
    every_file
        As engines load a draft: of a folder without an index every ``*.safetensors``, whatever its name, and beside an
        index nothing that it does not name (vLLM 0.32.0 model_executor/model_loader/default_loader.py, SGLang 0.5.23
        model_loader/loader.py, both by ``filter_duplicate_safetensors_files``).

    Raises
    ------
    ForeignFileError
        HS411: no weights, or files that the index names are missing. HS601: pickled weights alone. HS602: a broken
        file, with the count of missing bytes. HS603: weights under names that no loader of a folder looks for.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if index.exists() and single.exists() and not every_file:
        raise ForeignFileError(
            problem(
                "HS603", where=str(folder), got=f"both {_INDEX} and {_SINGLE}", expected="one of them",
                fix="remove the one that is not meant: loaders differ in which they take",
            )
        )  # fmt: skip
    weight_map = _weight_map(index) if index.exists() else None
    alone = sorted(p.name for p in folder.glob("*.safetensors")) if every_file else [_SINGLE] * single.exists()
    names = sorted(set(weight_map.values())) if weight_map is not None else alone
    if not names:
        raise ForeignFileError(_no_weights(folder))
    problems: list[Problem] = []
    tensors: dict[str, TensorInfo] = {}
    found: dict[str, list[str]] = {}
    for name in names:
        if (folder / name).is_dir():
            fix = "put the file there"
            wrong = problem("HS602", where=str(folder / name), got="a folder", expected="a safetensors file", fix=fix)
            problems.append(wrong)
            continue
        if not (folder / name).is_file():
            lost = sum(file == name for file in (weight_map or {}).values())
            problems.append(
                problem(
                    "HS411", where=str(folder / name), got="no such file", expected=f"a file with {lost} tensors",
                    fix=f"get it again: {_INDEX} names it",
                )
            )  # fmt: skip
            continue
        try:
            infos = read_header(folder / name)
        except ForeignFileError as e:
            problems += e.problems
            continue
        found[name] = [info.name for info in infos]
        tensors |= {info.name: info for info in infos}
    problems += _index_problems(index if weight_map is not None else folder, weight_map or {}, found)
    if problems:
        raise ForeignFileError(problems)
    return Checkpoint(folder=folder, files=tuple(names), tensors=tensors)


def read_header(path: Path) -> list[TensorInfo]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Raises
    ------
    ForeignFileError
        HS602: truncated, no safetensors header, or offsets that do not cover the buffer.
    """
    with opened(path) as file:
        size = path.stat().st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        raw = file.read(length) if 0 <= length <= min(_MAX_HEADER, size - 8) else b""
    if length < 0:
        raise corrupt(str(path), f"{size} bytes", "at least 8 bytes of safetensors header length")
    if length > _MAX_HEADER:
        raise corrupt(str(path), f"a header of {length} bytes", f"at most {_MAX_HEADER}: not a safetensors file?")
    if len(raw) != length:
        missing = f"{size} bytes: {8 + length - size} bytes of the header are missing"
        raise corrupt(str(path), missing, f"a header of {length} bytes")
    try:
        header = parse_json(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise corrupt(f"{path}: header", e, "JSON") from e
    if not isinstance(header, dict):
        raise corrupt(f"{path}: header", type(header).__name__, "a JSON object")
    problems: list[Problem] = []
    infos = []
    for name, entry in header.items():
        if name != "__metadata__":
            info = _tensor(path, name, entry, 8 + length)
            if isinstance(info, TensorInfo):
                infos.append(info)
            else:
                problems.append(info)
    infos.sort(key=lambda info: (info.start, info.nbytes))
    problems = problems or list(_coverage_problems(path, infos, 8 + length, size))
    if problems:
        raise ForeignFileError(problems)
    return infos


def read_tensor(info: TensorInfo) -> npt.NDArray[Any]:
    """Return a float tensor as a NumPy array of its shape, reading its bytes alone.

    Raises
    ------
    ForeignFileError
        HS411: the dtype is not a float of 16 bits or more. HS602: the file is shorter than its header says.
    """
    if info.numpy_dtype is None:
        raise ForeignFileError(not_float(info))
    return _read(info, info.numpy_dtype)


def read_rows(info: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
    """Return rows of a float matrix as a NumPy array, reading their bytes alone.

    Raises
    ------
    ForeignFileError
        HS411: the dtype is not a float of 16 bits or more. HS602: the file is shorter than its header says.
    """
    rows, width = info.shape
    step = info.nbytes // rows
    place, nbytes = info.start + start * step, (stop - start) * step
    return read_tensor(replace(info, shape=(stop - start, width), start=place, nbytes=nbytes))


def read_integers(info: TensorInfo) -> npt.NDArray[Any] | None:
    """Return a tensor of integers or booleans as a NumPy array of its shape; None: it is of another type.

    Raises
    ------
    ForeignFileError
        HS602: the file is shorter than its header says.
    """
    dtype = _INTEGERS.get(info.dtype)
    return None if dtype is None else _read(info, dtype)


def _read(info: TensorInfo, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    out = np.empty(info.shape, dtype=dtype)
    buffer = out.reshape(-1).view(np.uint8).data
    done = 0
    with opened(info.file) as file:
        file.seek(info.start)
        while done < info.nbytes:
            count = file.readinto(buffer[done:])
            if not count:
                left = info.nbytes - done
                raise corrupt(f"{info.file}: {info.name}", f"{left} bytes are missing", f"{info.nbytes} bytes")
            done += count
    return out


def digest_tensor(info: TensorInfo) -> str:
    """Return the SHA-256 digest of a tensor's bytes, in bounded memory."""
    h = hashlib.sha256()
    for chunk in _chunks(info):
        h.update(chunk)
    return f"sha256:{h.hexdigest()}"


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return the digest of all weight files: of the canonical JSON of sorted ``[[name, digest of bytes], ...]``."""
    pairs = []
    for name in checkpoint.files:
        with opened(checkpoint.folder / name) as file:
            pairs.append([name, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"])
    return digest_json(pairs)


def not_float(info: TensorInfo) -> Problem:
    """Return the problem of a key tensor that is packed or quantised."""
    return problem(
        "HS411", where=f"{info.file}: {info.name}", got=f"dtype {info.dtype}", expected=f"one of {', '.join(_NUMPY)}",
        fix="use a checkpoint that keeps embedding, final norm and lm_head unquantised",
    )  # fmt: skip


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading; what the system says against it, then or later, is HS602."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as e:
        raise corrupt(str(path), e.strerror or type(e).__name__, "a readable file") from e


def _chunks(info: TensorInfo) -> Iterator[bytes]:
    with opened(info.file) as file:
        file.seek(info.start)
        left = info.nbytes
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise corrupt(f"{info.file}: {info.name}", f"{left} bytes are missing", f"{info.nbytes} bytes")
            left -= len(chunk)
            yield chunk


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo | Problem:
    """Check one entry of a header; ``base`` is where the buffer starts."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            all(type(n) is int and n >= 0 for n in shape) and 0 <= begin <= end
        ):
            bits = _BITS.get(dtype)
            if bits is None or math.prod(shape) * bits == (end - begin) * 8:
                return TensorInfo(
                    name=name, dtype=dtype, shape=tuple(shape), file=path, start=base + begin, nbytes=end - begin
                )
            got = f"{end - begin} bytes for {dtype} {shape}"
            expected = f"{math.prod(shape) * bits // 8} bytes"
        case _:
            got, expected = repr(entry)[:200], "dtype, shape and two rising data_offsets"
    return problem("HS602", where=f"{path}: header: {name}", got=got, expected=expected)


def _coverage_problems(path: Path, infos: list[TensorInfo], base: int, size: int) -> Iterator[Problem]:
    end = base
    for info in infos:
        if info.start != end:
            kind = "overlaps the tensor before it" if info.start < end else "leaves a gap before it"
            got, expected = f"starts at byte {info.start} and {kind}", f"starts at byte {end}"
            yield problem("HS602", where=f"{path}: header: {info.name}", got=got, expected=expected)
        end = max(end, info.start + info.nbytes)
    if size != end:
        word = f"{end - size} bytes are missing" if size < end else f"{size - end} bytes too many"
        yield problem("HS602", where=str(path), got=f"{size} bytes: {word}", expected=f"{end} bytes")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt(f"{index}: weight_map", type(weight_map).__name__, "an object of tensor names and files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise corrupt(f"{index}: weight_map: {name}", repr(file), "the name of a .safetensors file in the folder")
    return weight_map


def _index_problems(index: Path, weight_map: Mapping[str, str], found: Mapping[str, list[str]]) -> Iterator[Problem]:
    """Yield where the index and the headers of its shards disagree (a name in two shards is one tensor too many)."""
    there = {(file, name) for file, names in found.items() for name in names}
    for name, file in weight_map.items():
        if file in found and (file, name) not in there:
            where = f"{index}: weight_map: {name}"
            yield problem("HS602", where=where, got=f"no such tensor in {file}", expected=f"the tensor in {file}")
    for name, count in Counter(name for _, name in there).items():
        if count > 1:
            files = sorted(file for file, tensor in there if tensor == name)
            yield problem("HS602", where=f"{index}: {name}", got=f"in {', '.join(files)}", expected="in one file")


def _no_weights(folder: Path) -> Problem:
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    where, expected = str(folder), f"{_SINGLE}, or {_INDEX} and its shards"
    if others := [n for n in names if n.endswith((".safetensors", ".gguf"))]:
        fix = "convert or rename it to a folder that Transformers loads"
        return problem("HS603", where=where, got=", ".join(others), expected=expected, fix=fix)
    if pickles := [n for n in names if n.endswith(_PICKLES)]:
        fix = "convert the model to safetensors (save_pretrained does it) where its origin is trusted"
        return problem("HS601", where=where, got=", ".join(pickles), expected=expected, fix=fix)
    fix = "give the folder that holds the model's weights"
    return problem("HS411", where=where, got="no weights in the folder", expected=expected, fix=fix)
