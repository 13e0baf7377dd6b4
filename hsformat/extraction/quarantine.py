"""The quarantine: a JSON Lines file beside the store that names what gave no record, and why.

It stands beside the store, not in it, since foreign files inside a Zarr hierarchy trouble its readers. A run writes it
anew: every quarantined sample is tried again by the next run. May import ``problems``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from hsformat.problems import Problem

__all__ = ["Quarantine"]


class Quarantine:
    """Opened by the first entry; without one, a file of an earlier run is removed on :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def add(self, record_id: str, problems: list[Problem]) -> None:
        """Write one line: ``{"id": ..., "problems": [...]}``."""
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
        line = {"id": record_id, "problems": [p.to_dict() for p in problems]}
        self._file.write(f"{json.dumps(line, ensure_ascii=False)}\n")
        self._file.flush()

    def close(self) -> Path | None:
        """Close the file and return its path, or None if nothing is quarantined."""
        if self._file is None:
            self.path.unlink(missing_ok=True)
            return None
        self._file.close()
        return self.path
