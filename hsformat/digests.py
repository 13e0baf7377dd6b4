"""Digests and checksums: the one place that says how bytes and JSON are hashed.

- A *digest* is ``sha256:<64 hex digits>`` and names content: of JSON, over its RFC 8785 form, so that any
  language computes the same; of files, over their bytes.
- A *checksum* is ``crc32c:<8 hex digits>`` and finds damage: cheap enough to be verified on every read.

Imports nothing of hsformat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import google_crc32c
import rfc8785

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["canonical_json", "checksum", "digest_bytes", "digest_json", "is_digest"]


def canonical_json(value: Any) -> bytes:
    """Return ``value`` as RFC 8785 canonical JSON (sorted keys, no spaces, shortest numbers, UTF-8).

    Raises
    ------
    ValueError
        A number is not finite or is an integer beyond 2**53, which JSON readers do not keep exactly.
    """
    return rfc8785.dumps(value)


def digest_json(value: Any) -> str:
    """Return the SHA-256 digest of the canonical JSON of ``value``."""
    return digest_bytes((canonical_json(value),))


def digest_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 digest of the concatenation of ``parts``."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return f"sha256:{h.hexdigest()}"


def checksum(data: bytes | npt.NDArray[np.uint8], *, previous: str | None = None) -> str:
    """Return the CRC32C (Castagnoli) checksum of ``data``, continuing from ``previous`` if given.

    A NumPy array of bytes is read where it lies; google_crc32c refuses a memoryview.
    """
    start = int(previous.removeprefix("crc32c:"), 16) if previous is not None else 0
    return f"crc32c:{google_crc32c.extend(start, data):08x}"


def is_digest(text: str) -> bool:
    """Return whether ``text`` has the form of a digest."""
    name, _, value = text.partition(":")
    return name == "sha256" and len(value) == 64 and all(c in "0123456789abcdef" for c in value)
