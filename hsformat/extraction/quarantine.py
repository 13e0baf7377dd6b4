"""The quarantine: a JSON Lines file beside the store that names what gave no record, and why.

It stands beside the store, not in it, since foreign files inside a Zarr hierarchy trouble its readers. Each run writes
a file of its own, so that several may extract into one store at once; the next run tries every quarantined sample
again. Objects cannot grow line by line: beside a store in an object store means in the working directory. May import
``problems``.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from hsformat.problems import Problem

__all__ = ["Quarantine"]


class Quarantine:
    """Opened by the first entry, as ``<store>.quarantine-<time>-<pid>.jsonl``."""

    def __init__(self, store: str) -> None:
        address = "://" in store
        path = os.path.abspath(store.rstrip("/").rpartition("/")[2] if address else store)  # it may be given as "."
        self._prefix = f"{path}.quarantine"
        self._path: Path | None = None
        self._file: IO[str] | None = None

    def add(self, record_id: str, problems: list[Problem]) -> None:
        """Write one line: ``{"id": ..., "problems": [...]}``."""
        if self._file is None:
            self._path = Path(f"{self._prefix}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{os.getpid()}.jsonl")
            self._file = self._path.open("x", encoding="utf-8")
        line = {"id": record_id, "problems": [p.to_dict() for p in problems]}
        self._file.write(f"{json.dumps(line, ensure_ascii=True)}\n")
        self._file.flush()

    def close(self) -> Path | None:
        """Close the file and return its path, or None if nothing is quarantined."""
        if self._file is not None:
            self._file.close()
        return self._path
