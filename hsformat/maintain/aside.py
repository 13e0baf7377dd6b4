"""A commit record that is taken out of use is kept under a name that no reader knows, so that nothing is beyond recall.

Without its commit record a segment does not exist, but its files are there until they are collected; the record is what
says which they are, and whose.
"""

from __future__ import annotations

import contextlib

from hsformat.digests import checksum
from hsformat.maintain.removing import removing
from hsformat.store.backend import Backend, Source
from hsformat.store.metadata import SEGMENTS

__all__ = ["copy_aside"]


def copy_aside(source: Source, backend: Backend, name: str) -> str | None:
    """Copy the commit record of a segment, whatever is in it, to ``zarr.json.<checksum>.aside`` beside it.

    Parameters
    ----------
    source
        The same place, for reading.

    Returns
    -------
    The copy's key; None: there is no commit record, or it cannot be read. After a kill it is given again.

    Raises
    ------
    StoreError
        HS506 (error): the copy cannot be written.
    """
    key = f"{SEGMENTS}/{name}/zarr.json"
    try:
        raw = source.read(key)
    except OSError:
        return None
    aside = f"{key}.{checksum(raw).rpartition(':')[2][:16]}.aside"
    with (
        contextlib.suppress(FileExistsError),
        removing(f"{backend.location}/{key}", "kept"),
    ):  # by its name, the same bytes
        backend.publish(aside, raw)
    return aside
