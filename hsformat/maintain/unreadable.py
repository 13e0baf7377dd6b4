"""What cannot be read now, told from what is lost: a disk that does not answer has lost nothing.

Readers say HS503 of a file that is missing and of one that could not be read. Repair replaces what is lost, and must
leave alone what a server, a permission or a limit keeps from it for now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hsformat.problems import Problem, problem
from hsformat.store.backend import OpenObject, Part, Source, open_object
from hsformat.store.unread import ABSENT

__all__ = ["WatchedSource", "unreadable"]


class WatchedSource:
    """Another source, and what could not be read of it.

    Attributes
    ----------
    failed
        By key, what the place said; an object that is not there is no failure. Cleared by whoever looks.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.location, self.state = source.location, source.state
        self.failed: dict[str, OSError] = {}

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of an object."""
        with self.watch(key):
            return self._source.read(key, start, length)

    def size(self, key: str) -> int | None:
        """Return the size of an object; None if there is none."""
        with self.watch(key):
            return self._source.size(key)

    def folders(self, key: str) -> list[str]:
        """Return the names of the folders under a key."""
        with self.watch(key):
            return self._source.folders(key)

    def open_object(self, key: str) -> OpenObject:
        """Open an object that is watched as well."""
        with self.watch(key):
            return _Watched(open_object(self._source, key), self, key)

    @contextmanager
    def watch(self, key: str) -> Iterator[None]:
        """Remember what is raised, and let it pass."""
        try:
            yield
        except OSError as e:
            if not isinstance(e, ABSENT):
                self.failed.setdefault(key, e)
            raise

    def problems(self) -> list[Problem]:
        """Return one problem (HS503) for each object that could not be read."""
        return [unreadable(f"{self.location}/{key}", e) for key, e in self.failed.items()]


class _Watched:
    def __init__(self, opened: OpenObject, source: WatchedSource, key: str) -> None:
        self._opened, self._source, self._key = opened, source, key

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        with self._source.watch(self._key):
            return self._opened.read_into(start, parts)


def unreadable(where: str, e: OSError) -> Problem:
    """Return HS503 for what is no damage, as far as anybody can tell: its segment is left as it is."""
    return problem(
        "HS503",
        where=where,
        got=f"cannot be read now: {e.strerror or e}; its segment was left as it is",
        expected="a place that gives its bytes, or says that there are none",
        fix="restore access and give the command again; if the disk has lost the file for good, restore it from a "
        "copy, or remove it: repair then keeps what is whole without it",
    )
