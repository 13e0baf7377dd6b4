"""From what a user gives to the place that it names. Imports ``backend`` and the places there are."""

from __future__ import annotations

import os

from hsformat.problems import StoreError, problem
from hsformat.store.backend import Backend, Place
from hsformat.store.local import LocalBackend

__all__ = ["backend_for", "free_bytes"]


def backend_for(path: Place) -> Backend:
    """Return the backend of a path or an address (``s3://bucket/prefix``); a backend is returned as it is.

    Raises
    ------
    StoreError
        HS501: an address that is not supported, or for which obstore is missing, or text that is no path.
    TypeError
        It is neither a path nor a backend.
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "location"):
            raise TypeError(f"a store is at a path or in a Backend, not in {type(path).__name__}")
        return path
    text = os.fspath(path)
    if "://" in text:
        return _object_backend(text)
    if "\0" in text or not text:
        expected, fix = "the path of a folder, or an address", "give such a path"
        raise StoreError(problem("HS501", where=repr(text), got="no path", expected=expected, fix=fix))
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


def _object_backend(address: str) -> Backend:
    try:
        from hsformat.store.objects import SCHEMES, ObjectBackend
    except ModuleNotFoundError as e:
        if e.name is None or not e.name.startswith("obstore"):
            raise
        got, expected = "an address, and obstore is not installed", "obstore, which reads and writes object stores"
        fix = "pip install 'hsformat[objectstore]'"
        raise StoreError(problem("HS501", where=address, got=got, expected=expected, fix=fix)) from e
    try:
        return ObjectBackend(address)
    except ValueError as e:
        schemes = ", ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)
        expected, fix = f"{schemes}, or the path of a folder", "give such an address or path"
        raise StoreError(problem("HS501", where=repr(address), got=str(e), expected=expected, fix=fix)) from e
