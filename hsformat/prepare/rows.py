"""From a path to its reader, by what is there and never by a guess; one row in memory at a time.

==============================  =====================================================================================
kind                            told by
==============================  =====================================================================================
Parquet                         the file begins with ``PAR1``
JSON Lines                      its first line begins with ``{``, or its name ends in .jsonl, .ndjson or .json
Hugging Face dataset on disk    a folder with ``state.json`` and ``dataset_info.json`` (``Dataset.save_to_disk``)
==============================  =====================================================================================

Anything else is HS603. This module may import ``problems`` and the readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from hsformat.prepare.arrow import PARQUET_MAGIC, open_dataset_folder, open_parquet
from hsformat.prepare.jsonlines import open_binary, open_json_lines
from hsformat.prepare.row import Row, Source, refuse
from hsformat.problems import NothingToOpen, Problem, problem

__all__ = ["Row", "count_rows", "open_source", "read_rows"]

KNOWN = "JSON Lines (one JSON object a line), Parquet, or the folder of a Hugging Face dataset (Dataset.save_to_disk)"
_JSON_NAMES = (".jsonl", ".ndjson", ".json")
_HF_FILES = ("state.json", "dataset_info.json")
_NAMED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "a zip file", b"ARROW1": "an Arrow file"}
_CONVERT = "convert it, for example with datasets.load_dataset(...).to_json('data.jsonl')"


def open_source(path: str | Path) -> Source:
    """Return the reader of a path.

    Raises
    ------
    ForeignFileError
        HS602: there is no such path (:class:`NothingToOpen`), it cannot be opened, holds nothing or is damaged. HS603:
        it is of no kind that is known.
    HsError
        HS410: its kind needs pyarrow, which is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise NothingToOpen(problem("HS602", where=str(path), got="no such file", expected=KNOWN, fix="check the path"))
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        what = "a pipe" if path.is_fifo() else "a device or socket"
        refuse(path, "HS603", f"{what}, which can be read only once", KNOWN, "write it to a file, and name that")
    with open_binary(path) as file:
        start = file.read(8)
    if start.startswith(PARQUET_MAGIC):
        return open_parquet(path)
    if path.suffix == ".parquet":
        refuse(path, "HS602", f"begins with {start[:4]!r}", "a Parquet file, which begins with b'PAR1'")
    for magic, name in _NAMED.items():
        if start.startswith(magic):
            refuse(path, "HS603", name, KNOWN, "unpack it" if name != "an Arrow file" else _CONVERT)
    source = open_json_lines(path)
    if not source.first.startswith(b"{") and path.suffix.lower() not in _JSON_NAMES:
        refuse(path, "HS603", f"a file that begins with {source.first[:20]!r}", KNOWN, _CONVERT)
    return source


def read_rows(path: str | Path) -> Iterator[Row | Problem]:
    """Return an iterator over the rows of a source; a bad one is a problem in its place.

    Raises
    ------
    HsError
        At once, as :func:`open_source`.
    """
    return open_source(path).rows()


def count_rows(path: str | Path) -> int:
    """Return how many rows :func:`read_rows` will give, bad ones included, for a progress bar.

    Parquet and datasets on disk state it; lines are counted without being parsed.

    Raises
    ------
    HsError
        As :func:`open_source`.
    """
    return open_source(path).count()


def _open_folder(path: Path) -> Source:
    if not all((path / name).is_file() for name in _HF_FILES):
        _refuse_folder(path)
    return open_dataset_folder(path)


def _refuse_folder(path: Path) -> NoReturn:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in path.iterdir() if (p / _HF_FILES[0]).is_file())
        refuse(path, "HS603", f"a dataset of splits: {', '.join(splits) or 'none is here'}", "one split",
               f"name the folder of one, such as {path / (splits or ['train'])[0]}")  # fmt: skip
    refuse(path, "HS603", "a folder without " + " and ".join(_HF_FILES), KNOWN, "name the file, or save the dataset "
           "with Dataset.save_to_disk")  # fmt: skip
