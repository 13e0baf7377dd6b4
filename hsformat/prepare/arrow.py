"""Rows from columns: Parquet files, and Hugging Face datasets saved to disk. Needs pyarrow, and no ``datasets``.

A dataset on disk is Arrow IPC streams, listed in ``state.json``; pyarrow maps them into memory. Columns that mean
nothing to preparation are named in each row and not read. In a struct Arrow cannot tell a key that is missing from one
that is null, since all rows share the keys of any: null is missing. Rows are counted from 0, as both libraries do.
This module may import ``problems``, ``row`` and ``target.jsonfiles``; pyarrow is imported on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsformat.prepare.row import ID_KEYS, MEANING_KEYS, Row, Source, refuse
from hsformat.problems import HsError, Problem, problem
from hsformat.target.jsonfiles import read_object

__all__ = ["PARQUET_MAGIC", "open_dataset_folder", "open_parquet"]

PARQUET_MAGIC = b"PAR1"
_BATCH = 256
"""Rows that are Python objects at a time."""


def open_parquet(path: Path) -> Source:
    """Return the reader of a Parquet file.

    Raises
    ------
    ForeignFileError
        HS602: it is damaged, or holds no row.
    HsError
        HS410: pyarrow is not installed.
    """
    pa = _pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            count, names = file.metadata.num_rows, file.schema_arrow.names
    except (pa.ArrowException, OSError) as e:
        refuse(path, "HS602", _first_line(e), "a whole Parquet file", cause=e)
    return _nonempty(_Parquet(path=path, rows_stated=count, names=tuple(names)))


def open_dataset_folder(path: Path) -> Source:
    """Return the reader of a folder that ``Dataset.save_to_disk`` wrote.

    Raises
    ------
    ForeignFileError
        HS602: it is damaged or holds no row. HS603: it selects rows by a list of indices, which is not read.
    HsError
        HS410: pyarrow is not installed.
    """
    pa = _pyarrow()
    state_path = path / "state.json"
    state = read_object(state_path)
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(e, dict) and _is_name(e.get("filename")) for e in listed):
        refuse(state_path, "HS602", f"_data_files: {repr(listed)[:80]}", 'a list of {"filename": ...}, as save_to_disk '
               "writes it")  # fmt: skip
    files = [path / Path(entry["filename"]).name for entry in listed]
    if state.get("_indices_data_files") or state.get("_indices_files"):
        refuse(path, "HS603", "a dataset with a list of indices", "rows in the order in which they are stored",
               "load it, then dataset.flatten_indices().save_to_disk(...)")  # fmt: skip
    count, names = 0, None
    for file in files:
        try:
            with _opened(file) as stream:
                own = tuple(stream.schema.names)
                count += sum(batch.num_rows for batch in stream)
        except (pa.ArrowException, OSError) as e:
            refuse(file, "HS602", _first_line(e), "a whole Arrow stream", cause=e)
        if names is not None and sorted(own) != sorted(names):
            differ = ", ".join(sorted({*own} ^ {*names})) or "one of them twice"
            refuse(file, "HS603", f"columns {', '.join(own)}"[:200], f"the columns of {files[0].name}; they differ in "
                   f"{differ[:200]}", "save the rows again as one dataset")  # fmt: skip
        names = names or own
    return _nonempty(_DatasetFolder(path=path, files=tuple(files), rows_stated=count, names=names or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    path: Path
    rows_stated: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        twice = sorted({n for n in _wanted(self.names) if self.names.count(n) > 1})
        if twice:
            refuse(self.path, "HS603", f"several columns named {', '.join(twice)}", "one column a name",
                   "drop or rename the others")  # fmt: skip

    def count(self) -> int:
        return self.rows_stated

    def rows(self) -> Iterator[Row | Problem]:
        pa = _pyarrow()
        number, others = 0, dict.fromkeys(n for n in self.names if n not in _wanted(self.names))
        try:
            for batch in self._batches(_wanted(self.names)):
                for start in range(0, batch.num_rows, _BATCH):
                    for value in _values(batch.slice(start, _BATCH)):
                        where = f"{self.path}: row {number}"
                        yield Row(where=where, value=others | value) if isinstance(value, dict) else _bad(where, value)
                        number += 1
        except (pa.ArrowException, OSError) as e:
            yield problem("HS602", where=f"{self.path}: row {number}", got=_first_line(e),
                          expected=f"{self.rows_stated} rows, of which none can be read from here on")  # fmt: skip

    def _batches(self, names: list[str]) -> Iterator[Any]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parquet(_Columns):
    def _batches(self, names: list[str]) -> Iterator[Any]:
        with _pyarrow().parquet.ParquetFile(self.path, buffer_size=1 << 20) as file:
            yield from file.iter_batches(batch_size=_BATCH, columns=names, use_threads=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatasetFolder(_Columns):
    files: tuple[Path, ...]

    def _batches(self, names: list[str]) -> Iterator[Any]:
        return (batch.select(names) for file in self.files for batch in _stream(file))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    pa = _pyarrow()
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield reader


def _stream(path: Path) -> Iterator[Any]:
    with _opened(path) as reader:
        yield from reader


def _is_name(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and Path(value).name != ""


def _wanted(names: Iterable[str]) -> list[str]:
    return [n for n in names if n in ID_KEYS or n in MEANING_KEYS]


def _values(batch: Any) -> Iterator[dict[str, Any] | ValueError | OverflowError]:
    """Yield each row as Python objects, or why there are none.

    Arrow does not look whether text is UTF-8, and its times reach further than Python's.
    """
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as e:
        if batch.num_rows == 1:
            yield e
        else:
            for i in range(batch.num_rows):
                yield from _values(batch.slice(i, 1))
    else:
        for row in rows:
            yield {k: _without_nulls(v) for k, v in row.items()}


def _bad(where: str, e: ValueError | OverflowError) -> Problem:
    return problem("HS602", where=where, got=_first_line(e), expected="values as their column's type says",
                   fix="repair the row")  # fmt: skip


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {k: _without_nulls(v) for k, v in value.items() if v is not None}
        case list():
            return value if value and type(value[0]) is int else [_without_nulls(v) for v in value]
        case _:
            return value


def _nonempty(source: _Columns) -> Source:
    if not source.rows_stated:
        refuse(source.path, "HS602", "no rows", "at least one row")
    return source


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as e:
        raise HsError(problem("HS410", where="pyarrow", got="not installed",
                              expected="pyarrow, to read Parquet and datasets on disk",
                              fix="pip install 'hsformat[parquet]'")) from e  # fmt: skip
    return pyarrow
