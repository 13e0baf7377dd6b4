"""Digests and checksums: the one place that says how bytes and JSON are hashed.

- A *digest* is ``sha256:<64 hex digits>`` and names content: of JSON, over its RFC 8785 form, so that any
  language computes the same; of files, over their bytes.
- A *checksum* is ``xxh3-128:<32 hex digits>`` and finds damage. It is not a CRC-32C: chunks end in one of their own,
  and the CRC of anything followed by its CRC is a constant, so that exchanged files would go unnoticed.

Imports nothing of hsformat.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import rfc8785
import xxhash
from pydantic import Field

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Buffer = bytes | npt.NDArray[np.uint8]

__all__ = ["Checksum", "Digest", "canonical_json", "checksum", "digest_bytes", "digest_json", "is_digest"]

_DIGEST: Final = r"^sha256:[0-9a-f]{64}$"

Digest = Annotated[str, Field(pattern=_DIGEST)]
"""Text in the form of a digest, as a field of a model."""


def canonical_json(value: Any) -> bytes:
    """Return ``value`` as RFC 8785 canonical JSON (sorted keys, no spaces, shortest numbers, UTF-8).

    Raises
    ------
    ValueError
        A number is not finite or is an integer beyond 2**53, which JSON readers do not keep exactly. As one:
        UnicodeEncodeError, where text holds half a character, which UTF-8 has no bytes for.
    """
    if _is_plain(value):  # the C encoder then writes the same bytes, several times faster
        return _PLAIN.encode(value).encode()
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as e:
        if isinstance(e.__cause__, UnicodeError):
            raise e.__cause__ from None
        raise


def _is_plain(value: Any) -> bool:
    """Return whether a value is without floats, keys that are not ASCII, and integers beyond those of RFC 8785."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(-(2**53) < value < 2**53)
    if kind is dict:
        return all(type(k) is str and k.isascii() for k in value) and all(map(_is_plain, value.values()))
    if kind is not list:
        return False
    kinds = set(map(type, value))
    if kinds == {int}:  # the ends alone: a commit record has a column of them for each array
        return _is_plain(min(value)) and _is_plain(max(value))
    return kinds == {str} or all(map(_is_plain, value))


def digest_json(value: Any) -> str:
    """Return the SHA-256 digest of the canonical JSON of ``value``."""
    return digest_bytes((canonical_json(value),))


def digest_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 digest of the concatenation of ``parts``."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return f"sha256:{h.hexdigest()}"


_PLAIN = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"))


class Checksum:
    """The XXH3-128 checksum of bytes that come in parts (canonical form, seed 0); ``str()`` gives its text."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        """Add bytes."""
        self._state.update(cast("bytes", data))

    def __str__(self) -> str:
        return f"xxh3-128:{self._state.hexdigest()}"


def checksum(data: Buffer) -> str:
    """Return the checksum of bytes; a NumPy array is read where it lies."""
    return "xxh3-128:" + xxhash.xxh3_128_hexdigest(cast("bytes", data))


def is_digest(value: object) -> bool:
    """Return whether ``value`` is text in the form of a digest."""
    return isinstance(value, str) and re.fullmatch(_DIGEST, value) is not None
