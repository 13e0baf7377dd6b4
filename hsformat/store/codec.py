"""The bytes of one chunk: the codecs ``compact`` and ``fast``, without zarr-python.

A chunk is its numbers in C order, little-endian; under ``compact`` compressed by Blosc; then four bytes of CRC-32C
(rules G-7, G-13). numcodecs and google-crc32c do the work, both without holding Python's lock for long, so that
chunks are encoded and decoded in threads. Imports ``problems`` alone of hsformat.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, cast

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from hsformat.store.backend import Bytes, Data

__all__ = [
    "CRC_BYTES",
    "MAX_CHUNK_BYTES",
    "Codec",
    "DamagedChunk",
    "check_crc",
    "crc32c",
    "crc32c_frozen",
    "decode_chunk",
    "encode_chunk",
    "index_bytes",
    "longest_chunk",
]

Codec = Literal["compact", "fast"]
MAX_CHUNK_BYTES = 2**31 - 1 - 16
"""Blosc counts bytes in a signed 32-bit integer, its header of 16 bytes included (numcodecs#80)."""

CRC_BYTES = 4
_BLOSC_HEADER = struct.Struct("<BBBBIII")  # version, its own version, flags, typesize, nbytes, blocksize, cbytes


def index_bytes(chunks: int) -> int:
    """Return the length of the index of a shard of so many chunks."""
    return 16 * chunks + CRC_BYTES


def longest_chunk(nbytes: int, codec: Codec) -> int:
    """Return the most bytes that a chunk can take: Blosc stores what it cannot compress behind its header."""
    return nbytes + CRC_BYTES + (_BLOSC_HEADER.size if codec == "compact" else 0)


class DamagedChunk(ValueError):
    """Bytes that are not those of a chunk: another checksum, another length, or no Blosc."""


def crc32c(data: Data, value: int = 0) -> int:
    """Return the CRC-32C of bytes; ``value`` is that of what stands before them.

    google-crc32c takes no buffer that can be written: an array is shown to it through a view that cannot.
    """
    if isinstance(data, np.ndarray):
        data = data.view()
        data.flags.writeable = False
    return crc32c_frozen(data, value)


def crc32c_frozen(data: Data, value: int = 0) -> int:
    """Return the CRC-32C of bytes, or of an array that cannot be written."""
    return int(google_crc32c.extend(value, cast("bytes", data)))


def encode_chunk(rows: npt.NDArray[Any], codec: Codec) -> tuple[Data, bytes]:
    """Encode the numbers of a whole chunk.

    Parameters
    ----------
    rows
        C-contiguous, little-endian.

    Returns
    -------
    The encoded bytes (under ``fast`` the array's own memory, not a copy) and their CRC-32C.
    """
    body: Data = rows.reshape(-1).view(np.uint8)
    if codec == "compact":
        # One block a chunk: with Blosc's own choice of size, splitting costs a tenth of the ratio on real states. Blosc
        # shuffles by the item size of what it is given, and knows no bfloat16.
        items = rows.reshape(-1).view(f"u{rows.dtype.itemsize}") if rows.dtype.itemsize in (1, 2, 4, 8) else body
        body = blosc.compress(items, b"zstd", 1, blosc.SHUFFLE, rows.nbytes)
    return body, struct.pack("<I", crc32c(body))


def decode_chunk(data: Bytes, out: Bytes, *, compressed: bool, verify: bool = True) -> None:
    """Decode a whole chunk into ``out``, which has the length that its shape needs.

    Parameters
    ----------
    data
        The chunk as it is stored, with its CRC-32C.
    verify
        Whether the CRC-32C is compared. What Blosc itself finds is reported either way.

    Raises
    ------
    DamagedChunk
        Of uncompressed chunks nothing is in ``out`` then, of compressed ones anything.
    """
    if len(data) < CRC_BYTES:
        raise DamagedChunk(f"{len(data)} bytes, less than a checksum")
    body = data[:-CRC_BYTES]
    if verify:
        check_crc(crc32c(body), data[-CRC_BYTES:])
    if not compressed:
        if len(body) != len(out):
            raise DamagedChunk(f"{len(body)} bytes, and not {len(out)}")
        out[:] = body
        return
    if len(body) < _BLOSC_HEADER.size:
        raise DamagedChunk(f"{len(body)} bytes, less than a header of Blosc")
    *_, nbytes, _, cbytes = _BLOSC_HEADER.unpack(body[: _BLOSC_HEADER.size].tobytes())
    if (nbytes, cbytes) != (len(out), len(body)):  # before Blosc believes them
        raise DamagedChunk(f"{cbytes} bytes of {nbytes} by its header, and not {len(body)} of {len(out)}")
    try:
        blosc.decompress(body, out)
    except (ValueError, RuntimeError, SystemError) as e:
        raise DamagedChunk(str(e).partition("\n")[0] or "Blosc cannot decode it") from e


def check_crc(actual: int, stored: Data) -> None:
    """Compare a CRC-32C with its four stored bytes.

    Raises
    ------
    DamagedChunk
        They differ.
    """
    expected = int.from_bytes(bytes(stored), "little")
    if actual != expected:
        raise DamagedChunk(f"CRC-32C {actual:08x}, stored {expected:08x}")
