"""From what a user gives to the place that it names. Imports ``backend`` and the places there are."""

from __future__ import annotations

import os

from hsformat.problems import StoreError, problem
from hsformat.store.backend import Backend, Place
from hsformat.store.local import LocalBackend

__all__ = ["backend_for", "free_bytes"]


def backend_for(path: Place) -> Backend:
    """Return the backend of a path; a backend is returned as it is.

    Raises
    ------
    StoreError
        HS501: an address of a scheme that is not supported, or text that is no path.
    TypeError
        It is neither a path nor a backend.
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "location"):
            raise TypeError(f"a store is at a path or in a Backend, not in {type(path).__name__}")
        return path
    text = os.fspath(path)
    if "://" in text or "\0" in text or not text:
        raise StoreError(
            problem(
                "HS501",
                where=repr(text),
                got="an address" if "://" in text else "no path",
                expected="the path of a folder on a local or mounted disk",
                fix="give such a path",
            )
        )
    return LocalBackend(text)


def free_bytes(path: Place) -> int | None:
    """Return the bytes that can be written at a place; None: it is no local folder, or its file system does not say.

    Raises
    ------
    StoreError
        As :func:`backend_for`.
    """
    backend = backend_for(path)
    return backend.free_bytes() if isinstance(backend, LocalBackend) else None
