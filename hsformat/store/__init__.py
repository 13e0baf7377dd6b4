"""The store: immutable segments of records under one contract, as a Zarr v3 hierarchy (docs/spec/1.0.md).

============== =====================================================================
``backend``    where the bytes are; the only module that touches a file system
``arrays``     what each array must be; encoding and decoding through zarr-python
``metadata``   the root's and the segments' JSON: contract and commit record
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
