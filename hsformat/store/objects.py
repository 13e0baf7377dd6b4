"""Object stores as the place of a store, through obstore: ``s3://``, ``gs://``, ``az://``, or any store of obstore's.

Imported when an address is given. Credentials, region and endpoint come from the services' usual environment variables;
nothing of them is kept or shown. Imports ``backend`` alone of hsformat, and its neighbour ``uploads``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from hsformat.store.backend import Bytes, Data, Entry, OpenObject, Part
from hsformat.store.uploads import PART_BYTES, ObjectSink

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["SCHEMES", "ObjectBackend", "parse_address"]

SCHEMES = ("s3", "gs", "az")
"""Of addresses: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""

RETRIES: dict[str, Any] = {}
"""How long obstore tries again, as its ``retry_config``; empty: its default, ten times or three minutes."""

_AHEAD = 8 * 1024 * 1024
"""Bytes that are fetched at most beyond what is asked for, when an object is read from one place on."""

_PID: list[int] = []
"""The process that has used obstore first."""


def parse_address(address: str) -> tuple[str, str, str]:
    """Return scheme, bucket (or container) and prefix of an address.

    Raises
    ------
    ValueError
        It is not SCHEME://BUCKET or SCHEME://BUCKET/PREFIX of a scheme in :data:`SCHEMES`.
    """
    scheme, _, rest = address.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in SCHEMES:
        raise ValueError(f"an address of scheme {scheme!r}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        raise ValueError(f"{bucket[:80]!r} as the bucket")
    prefix = prefix.strip("/")
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise ValueError("a prefix with empty parts, '.' or '..'")
    return scheme, bucket, prefix


class ObjectBackend:
    """A prefix of a bucket.

    Everything but a large object is written by one request that fails if there is one of its name; a large one as
    :class:`hsformat.store.uploads.ObjectSink` says. May be pickled; the client is built in each process when it is
    first needed.

    Parameters
    ----------
    location
        The address, ``s3://bucket/prefix``; with ``store`` only what is shown.
    store
        A store of obstore's, for what the environment cannot say: its prefix is where the data is.

    Raises
    ------
    ValueError
        No ``store``, and an address that is none.
    """

    requests_at_once = 16

    def __init__(self, location: str, *, store: ObjectStore | None = None) -> None:
        self._location, self._given = location.rstrip("/"), store
        self._address = parse_address(location) if store is None else ("", "", "")
        self._built: ObjectStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    @property
    def location(self) -> str:
        """The address as given."""
        return self._location

    @property
    def store(self) -> ObjectStore:
        """The store of obstore's.

        Raises
        ------
        OSError
            This process was forked from one that had used obstore, whose threads are not here: it would wait for ever.
        """
        if not _PID:
            _PID.append(os.getpid())
        if os.getpid() not in _PID:
            why = "a process forked after its parent used an object store: start workers by spawn or forkserver"
            raise OSError(errno.ENOTSUP, why, self._location)
        if self._built is None:
            with self._errors("", "the settings"):
                self._built = _build(*self._address) if self._given is None else self._given
        return self._built

    def state(self) -> Literal["absent", "empty", "file", "folder"]:
        """Return ``folder`` where something is under the prefix, otherwise ``absent``."""
        with self._errors("", "the listing"):
            return "folder" if any(self.store.list(chunk_size=1)) else "absent"

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of an object."""
        if length is None and not start:
            with self._errors(key):
                return bytes(self.store.get(key).bytes())
        if length == 0:
            return b""
        first = start + (_AHEAD if length is None else min(length, _AHEAD))
        try:
            data = self.ranges(key, start, first)  # a service cuts off what is beyond the end
        except FileNotFoundError:
            raise
        except OSError:
            if start < (self.size(key) or 0):
                raise
            return b""  # which a service refuses where nothing of the range is there
        if len(data) < first - start or len(data) == length:
            return data
        size = self._size(key)
        stop = size if length is None else min(size, start + length)
        return data + self.ranges(key, first, stop) if first < stop else data

    def ranges(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes that are there, by several requests at once where they are many."""
        starts = range(start, stop, _AHEAD)
        with self._errors(key):
            if len(starts) == 1:
                return bytes(self.store.get_range(key, start=start, end=stop))
            ends = [min(stop, s + _AHEAD) for s in starts]
            return b"".join(self.store.get_ranges(key, starts=list(starts), ends=ends, coalesce=0))

    def open_object(self, key: str) -> OpenObject:
        """Open an object for reading; one that is read from one place on is read ahead."""
        return ObjectFile(self, key, self._size(key))

    def size(self, key: str) -> int | None:
        """Return the size of an object; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self._size(key)
        return None

    def _size(self, key: str) -> int:
        with self._errors(key):
            return int(self.store.head(key)["size"])

    def folders(self, key: str) -> list[str]:
        """Return the names of what has objects under it."""
        with self._errors(key, "the listing"):
            found = self.store.list_with_delimiter(key)["common_prefixes"]
        return sorted(p.rstrip("/").rpartition("/")[2] for p in found)

    def write(self, key: str, data: Data) -> None:
        """Write a whole object if there is none, by one request."""
        with self._errors(key):
            self.store.put(key, data if isinstance(data, bytes) else data.data, mode="create", use_multipart=False)

    def publish(self, key: str, data: bytes) -> None:
        """As :meth:`write`, which is durable and visible whole or not at all."""
        self.write(key, data)

    def create(self, key: str) -> ObjectSink:
        """Begin a new object."""
        if self.size(key) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._where(key))
        return ObjectSink(self, key)

    def upload(self, key: str, parts: Iterator[bytes]) -> None:
        """Write an object in parts; whatever ``parts`` raises gives up the upload, and is raised."""
        with self._errors(key):
            self.store.put(key, parts, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=2)

    def settle(self, key: str) -> None:
        """Return: what a request has written is durable."""

    def discard(self, key: str) -> None:
        """Remove all objects under a key, the commit record of a published segment excepted."""
        if self.size(f"{key}/zarr.json") is not None:
            raise FileExistsError(errno.EEXIST, "published, and not removed", self._where(key))
        if keys := [e.key for e in self.listing(key)]:
            with self._errors(key), contextlib.suppress(FileNotFoundError):
                self.store.delete(keys)

    def listing(self, key: str) -> list[Entry]:
        """Return all objects under a key."""
        with self._errors(key, "the listing"):
            found = [meta for chunk in self.store.list(key) for meta in chunk]
        return sorted(Entry(m["path"], int(m["size"]), m["last_modified"].timestamp()) for m in found)

    def remove(self, key: str) -> None:
        """Remove an object; a service does not say that there was none, so that it is looked for first."""
        self._size(key)
        with self._errors(key):
            self.store.delete(key)

    def _where(self, key: str) -> str:
        return f"{self._location}/{key}" if key else self._location

    @contextlib.contextmanager
    def _errors(self, key: str, what: str = "the object") -> Iterator[None]:
        """Turn what obstore raises into an OSError that says what the service said."""
        where = self._where(key)
        try:
            yield
        except exceptions.AlreadyExistsError as e:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where) from e
        except FileNotFoundError as e:
            raise FileNotFoundError(errno.ENOENT, _said(e), where) from e
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as e:
            raise PermissionError(errno.EACCES, f"{what} was refused: {_said(e)}", where) from e
        except (exceptions.BaseError, ValueError) as e:
            raise OSError(errno.EIO, f"{what}: {_said(e)}", where) from e


class ObjectFile:
    """An object that is read in many places. Reading on where the last call ended fetches more than is asked for.

    Twice as much each time, up to a bound, so that what a local disk would give in many small reads takes few requests
    here, and a record that is read by itself takes no more than itself.
    """

    def __init__(self, backend: ObjectBackend, key: str, size: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self._window: tuple[int, Bytes] = (0, np.empty(0, np.uint8))  # replaced whole: threads may read at once

    def read_into(self, start: int, parts: Sequence[Part]) -> int:
        """Fill arrays from what was fetched before, or by a request."""
        stop = min(self._size, start + sum(map(len, parts)))
        if start >= stop:
            return 0
        at, data = self._window
        if not at <= start <= stop <= at + len(data):
            kept = data[start - at :] if at <= start <= at + len(data) and len(data) else data[:0]
            first = start + len(kept)
            ahead = min(2 * len(data), _AHEAD) if at < start <= at + len(data) else 0
            end = min(self._size, max(stop, first + ahead))
            fetched = np.frombuffer(self._backend.ranges(self._key, first, end), np.uint8)
            if len(fetched) != end - first:
                raise OSError(errno.EIO, f"{len(fetched)} bytes at {first} in place of {end - first}", self._key)
            at, data = start, np.concatenate([kept, fetched]) if len(kept) else fetched
            self._window = (at, data)
        offset = start - at
        for part in parts:
            piece = data[offset : offset + len(part)].data
            (part.data if isinstance(part, np.ndarray) else part)[: len(piece)] = piece
            offset += len(part)
        return stop - start


def _build(scheme: str, bucket: str, prefix: str) -> ObjectStore:
    env: Mapping[str, str] = os.environ
    options: dict[str, Any] = {"prefix": prefix or None, "retry_config": RETRIES or None}
    if scheme == "s3":
        plain = env.get("AWS_ENDPOINT_URL_S3", env.get("AWS_ENDPOINT_URL", "")).startswith("http://")
        return S3Store(bucket, client_options={"allow_http": True} if plain else None, **options)
    if scheme == "gs":
        return GCSStore(bucket, **options)
    # obstore wants the account's name from its caller, not from the environment.
    account = env.get("AZURE_STORAGE_ACCOUNT_NAME")
    if account is None and env.get("AZURE_STORAGE_USE_EMULATOR", "").lower() not in ("1", "true"):
        raise ValueError("AZURE_STORAGE_ACCOUNT_NAME is not set")
    return AzureStore(bucket, account_name=account or "devstoreaccount1", **options)


def _said(e: Exception) -> str:
    """Return what a service said, in one line: its message if there is one, otherwise obstore's first line."""
    text = str(e)
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message"))
    if message is not None:
        text = f"{message[1].strip()} ({code[1]})" if code is not None else message[1]
    else:
        text = text.partition("\n\nDebug source")[0].strip()
    return " ".join(text.split())[:300]
