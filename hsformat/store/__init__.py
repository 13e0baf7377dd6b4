"""The store: immutable segments of records under one contract, as a Zarr v3 hierarchy (docs/spec/1.0.md).

============== =====================================================================
``backend``    where the bytes are; the only module that touches a file system
``array_json`` what the metadata of each array must be, clause by clause
``arrays``     which arrays a segment has; encoding and decoding through zarr-python
``metadata``   the root's JSON, and the names of segments
``commit``     the commit record of a segment
``size``       bytes and files before they are written, for the writer and for plans
``pending``    records in memory, and how they become a segment
``segment``    reading one segment, compared with its commit record
``verify``     comparing files and offsets with the commit record
``writer``     the writer            ``create``  create, append
``reader``     the store, open
============== =====================================================================
"""

from hsformat.store.create import append, check_new, create, exists
from hsformat.store.reader import Store, open
from hsformat.store.writer import Writer

__all__ = ["Store", "Writer", "append", "check_new", "create", "exists", "open"]
