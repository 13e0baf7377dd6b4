"""The file of one array: chunks one after another, then the index of where they are (Zarr's ``sharding_indexed``).

:class:`ShardWriter` streams chunks into a sink as they are encoded, in threads; :func:`parse_index` checks an index
before anything goes by it. Imports ``codec`` and ``backend``.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.digests import Checksum
from hsformat.problems import Problem, problem
from hsformat.store.backend import Bytes, Sink
from hsformat.store.codec import CRC_BYTES, Codec, DamagedChunk, check_crc, crc32c, encode_chunk

__all__ = ["ShardWriter", "encode_index", "encode_shard", "padding", "parse_index"]

_ABSENT = 2**64 - 1
"""Offset or length in the index of a chunk that is not stored."""


def parse_index(data: Bytes, *, chunks: int, size: int, where: str) -> tuple[npt.NDArray[np.int64], list[Problem]]:
    """Read the index of a shard, and refuse one that leaves a chunk out: a Zarr reader shows fill values for it.

    Parameters
    ----------
    data
        The last :func:`~hsformat.store.codec.index_bytes` bytes of the shard.
    size
        Of the shard, in bytes.

    Returns
    -------
    int64 [chunks, 2], the offset and the length of each chunk, and no problem; or an empty array and why: HS504 for its
    checksum or a place outside the shard, HS503 for a chunk that is not stored.
    """
    none = np.empty((0, 2), np.int64)
    try:
        check_crc(crc32c(data[:-CRC_BYTES]), data[-CRC_BYTES:])
    except DamagedChunk as e:
        expected = "the index of the shard as it was written"
        return none, [problem("HS504", where=where, got=f"its index: {e}", expected=expected)]
    entries = data[:-CRC_BYTES].view("<u8").reshape(-1, 2)
    if (absent := (entries == _ABSENT).any(axis=1)).any():
        got = f"chunk {int(absent.argmax())} of {chunks} is not stored ({int(absent.sum())} such chunk(s))"
        return none, [problem("HS503", where=where, got=got, expected="every chunk of the array")]
    starts, lengths, end = entries[:, 0], entries[:, 1], size - len(data)
    outside = (starts > end) | (lengths > end - np.minimum(starts, end)) | (lengths == 0)
    if outside.any():
        i = int(outside.argmax())
        got, expected = f"chunk {i} at {starts[i]}, {lengths[i]} bytes", f"a place in the {end} bytes before the index"
        return none, [problem("HS504", where=where, got=got, expected=expected)]
    return entries.astype(np.int64), []


def padding(dtype: np.dtype[Any]) -> float | int:
    """Return what fills the last chunk of a shard beyond the array (any value may, by rule G-8)."""
    return np.nan if dtype.kind in "fV" else 0


def encode_shard(array: npt.NDArray[Any], chunk_rows: int, codec: Codec) -> bytes:
    """Encode a whole array as one shard, in memory."""
    parts: list[Bytes | bytes] = []
    index: list[tuple[int, int]] = []
    at = 0
    for start in range(0, len(array), chunk_rows):
        rows = np.full((chunk_rows, *array.shape[1:]), padding(array.dtype), array.dtype)
        rows[: len(array) - start] = array[start : start + chunk_rows]
        encoded = encode_chunk(rows, codec)
        index.append((at, sum(map(len, encoded))))
        at += index[-1][1]
        parts += encoded
    return b"".join([*map(bytes, parts), encode_index(index)])


def encode_index(index: list[tuple[int, int]]) -> bytes:
    """Return the index of a shard from the offset and the length of each chunk."""
    data = b"".join(struct.pack("<QQ", *entry) for entry in index)
    return data + struct.pack("<I", crc32c(data))


class ShardWriter:
    """Encodes the chunks of one shard in any order and writes them in theirs.

    :meth:`encode` is called from several threads: whoever has encoded the chunk whose turn it is writes it, and those
    that wait behind it. Nobody waits for another thread.

    Attributes
    ----------
    error
        What went wrong first; nothing is written after it.
    """

    def __init__(self, sink: Sink, codec: Codec) -> None:
        self._sink, self._codec = sink, codec
        self._lock = threading.Lock()
        self._ready: dict[int, tuple[tuple[Bytes | bytes, bytes] | None, Callable[[], object]]] = {}
        self._next = 0
        self._index: list[tuple[int, int]] = []
        self._writing = False
        self._checksum = Checksum()
        self.nbytes = 0
        self.error: BaseException | None = None

    def encode(self, n: int, rows: npt.NDArray[Any], release: Callable[[], object]) -> None:
        """Encode chunk ``n`` and write what can be written; ``release`` is called when ``rows`` may be changed.

        Nothing is raised: see :attr:`error`.
        """
        encoded = None
        if self.error is None:
            try:
                encoded = encode_chunk(rows, self._codec)
            except Exception as e:  # whatever it is, the writer hears of it and no buffer is lost
                self.error = self.error or e
        with self._lock:
            self._ready[n] = (encoded, release)
            if self._writing:
                return
            self._writing = True
        self._drain()

    def _drain(self) -> None:
        while True:
            with self._lock:
                turn = self._ready.pop(self._next, None)
                if turn is None:
                    self._writing = False
                    return
            encoded, release = turn
            self._next += 1
            try:
                if encoded is not None and self.error is None:
                    start = self.nbytes
                    for data in encoded:
                        self._put(data)
                    self._index.append((start, self.nbytes - start))
            except BaseException as e:  # what a backend raises, or a test that kills it: raised by finish
                self.error = self.error or e
            finally:
                release()

    def _put(self, data: Bytes | bytes) -> None:
        self._sink.write(data)
        self._checksum.update(data)
        self.nbytes += len(data)

    def finish(self) -> tuple[int, str]:
        """Write the index and make the file durable; all chunks have been encoded.

        Returns
        -------
        The file's size in bytes and its checksum.
        """
        if self.error is not None:
            raise self.error
        self._put(encode_index(self._index))
        self._sink.close()
        return self.nbytes, str(self._checksum)

    def abort(self) -> None:
        """Leave the file as it is, and let it go."""
        self._sink.abort()
