"""The store: immutable segments of records under one contract, as a Zarr v3 hierarchy (docs/spec/1.0.md).

============== =====================================================================
``backend``    what a place of bytes must do     ``local``  a folder     ``places``  which place a user means
``objects``    a bucket, by obstore              ``uploads``  its large objects
``metadata``   the root's JSON, and the names of segments
``commit``     the commit record of a segment    ``columns``  as it is in memory
``array_json`` what the metadata of each array must be, clause by clause
``arrays``     which arrays a segment has, and how they are cut into chunks
``size``       bytes and files before they are written
``codec``      the bytes of one chunk            ``shards``  the file of one array
``writer``     the writer: validates, and has a thread of its own for all that changes the store
``pending``    rows of the segment being written ``building``  the segment itself  ``encoder``  its threads
``ended``      what a writer says that cannot go on, or that nobody closed
``segment``    reading one segment, compared with its commit record
``native``     decoding by ourselves             ``reference``  decoding by zarr-python
``opened``     which files are kept open         ``unread``  what is said of one that cannot be read
``verify``     comparing files and offsets with the commit record
``create``     create, append                    ``reader``  the store, open
``content``    a digest of all records           ``salvage`` what is left of a damaged segment
``remains``    what a segment still says of itself whose commit record is damaged
============== =====================================================================
"""

from hsformat.store.content import content_digest
from hsformat.store.create import append, check_new, create, exists
from hsformat.store.reader import Store, open
from hsformat.store.writer import Writer

__all__ = ["Store", "Writer", "append", "check_new", "content_digest", "create", "exists", "open"]
