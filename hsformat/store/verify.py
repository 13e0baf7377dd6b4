"""Comparing a committed segment with what it says of itself, without reading its states as numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.digests import Checksum
from hsformat.problems import Problem, problem
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord
from hsformat.store.unread import unread

__all__ = ["INDEX_ARRAYS", "file_problems", "index_problems"]

INDEX_ARRAYS = ("token_offsets", "state_offsets", "id_offsets", "ids")

_BLOCK = 8 * 1024 * 1024


def file_problems(
    source: Source, commit: CommitRecord, *, keys: Collection[str] | None = None, content: bool = False
) -> Iterator[Problem]:
    """Compare files of a segment with its commit record: presence and size, and with ``content`` every byte.

    Parameters
    ----------
    keys
        Of ``commit.files``; None: all.

    Yields
    ------
    HS503 for a missing or unreadable file, HS505 for another size, HS504 for another checksum.
    """
    for key in commit.files if keys is None else keys:
        entry, path = commit.files[key], f"{commit.prefix}/{key}"
        where, expected = f"{source.location}/{path}", f"a file of {entry.size} bytes"
        try:
            size = source.size(path)
            actual = _stream_checksum(source, path, entry.size) if content and size == entry.size else None
        except OSError as e:
            yield unread(e, where=where, expected=expected)
            continue
        if size is None:
            yield problem("HS503", where=where, got="no file", expected=expected)
        elif size != entry.size:
            yield problem("HS505", where=where, got=f"{size} bytes", expected=expected)
        elif actual is not None and actual != entry.checksum:
            yield problem("HS504", where=where, got=actual, expected=entry.checksum)


def _stream_checksum(source: Source, key: str, size: int) -> str:
    total = Checksum()
    for start in range(0, size, _BLOCK):
        total.update(source.read(key, start, _BLOCK))
    return str(total)


def index_problems(commit: CommitRecord, arrays: Mapping[str, npt.NDArray[Any]], *, where: str) -> Iterator[Problem]:
    """Compare offsets and ids, which other readers go by, with the commit record.

    Parameters
    ----------
    arrays
        Those of :data:`INDEX_ARRAYS` that could be read, by name.
    where
        The segment's place.

    Yields
    ------
    HS108, with the first entry that differs.
    """
    encoded = [i.encode() for i in commit.ids]
    expected: dict[str, npt.NDArray[Any]] = {
        "token_offsets": np.cumsum([0, *commit.tokens], dtype=np.int64),
        "state_offsets": np.cumsum([0, *commit.states], dtype=np.int64),
        "id_offsets": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        "ids": np.frombuffer(b"".join(encoded), np.uint8),
    }
    for name, array in arrays.items():
        wanted = expected[name]
        if len(array) != len(wanted):
            yield problem("HS108", where=f"{where}/{name}", got=f"{len(array)} entries", expected=str(len(wanted)))
        elif (differs := np.flatnonzero(array != wanted)).size:
            i = int(differs[0])
            yield problem("HS108", where=f"{where}/{name}[{i}]", got=str(array[i]), expected=str(wanted[i]))
