"""What the drivers of running servers have in common: whose model it is, whether it lives, what dead clients left.

May import ``target`` and ``problems`` of hsformat.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from hsformat.problems import HsError, problem
from hsformat.target import describe

__all__ = ["Leftovers", "ServerLost", "check_folder", "check_served_model", "require_health"]


class ServerLost(HsError):
    """HS410: a server does not answer any more, or not as one that gives states."""

    def __init__(self, url: str, got: str) -> None:
        super().__init__(
            problem("HS410", where=f"server {url}", got=got, expected="a server that answers to the end",
                    fix="look at the server's log and start it again; what is committed stays, and the same command "
                    "goes on from there")
        )  # fmt: skip


def require_health(url: str, said: str, *, seconds: float, headers: Mapping[str, str] | None = None) -> None:
    """Return if the server lives.

    Parameters
    ----------
    said
        What made one ask.

    Raises
    ------
    ServerLost
        ``/health`` does not answer within ``seconds``, or says that the engine is dead.
    """
    request = urllib.request.Request(f"{url}/health", headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return
    except (OSError, HTTPException) as e:
        raise ServerLost(url, f"it does not answer any more: {e} (after {said})") from e


class Leftovers:
    """Files that clients which were killed have asked for, and nobody has taken.

    A server writes on when a client is gone. Files of our requests that are old enough are removed once a session.

    Parameters
    ----------
    pattern
        Of their names, as :meth:`pathlib.Path.glob` takes it.
    age
        Seconds after which no live client waits for a file.
    """

    def __init__(self, pattern: str, *, age: float) -> None:
        self._pattern, self._age = pattern, age
        self._removing, self._done = threading.Lock(), False

    def remove(self, folder: Path) -> None:
        """Remove them from a folder, in the first call alone; called from any thread."""
        with self._removing:
            if self._done:
                return
            self._done = True
            before = time.time() - self._age
            for path in folder.glob(self._pattern):
                with suppress(OSError):  # another user's, or gone in this moment
                    if path.stat().st_mtime < before:
                        path.unlink()


def check_served_model(told: object, model: str, *, url: str) -> None:
    """Refuse a server that serves another target than the one whose contract is written.

    Compared are the digests of configuration and of embedding, final norm and head. A server that names no folder that
    this machine sees (a name of a hub, a path of another machine) cannot be compared.

    Parameters
    ----------
    told
        What the server says of where its model is.
    model
        The target's folder.

    Raises
    ------
    HsError
        HS410: it is another target.
    """
    if not isinstance(told, str) or not Path(told).is_dir() or Path(told).samefile(model):
        return
    try:
        served, wanted = (describe(folder).model for folder in (told, model))
    except HsError:  # of a family that cannot be described without running it: not compared
        return
    if differing := [n for n in ("config_digest", "basis_digest") if getattr(served, n) != getattr(wanted, n)]:
        raise HsError(
            problem("HS410", where=f"server {url}: model", got=f"{told}, another {' and '.join(differing)}",
                    expected=f"the target {model}", fix="ask the server of this target, or give --model its folder")
        )  # fmt: skip


def check_folder(folder: Path, *, url: str, option: str | None) -> None:
    """Refuse a server whose files come into a folder that is not there.

    Parameters
    ----------
    option
        What names it here; None: the server alone does.

    Raises
    ------
    HsError
        HS410: there is no such folder.
    """
    if folder.is_dir():
        return
    fix = "make the folder, or start the server with one that both see under one name"
    if option is not None:
        fix = f"make the folder, or give --option {option}=FOLDER as it is named here"
    raise HsError(
        problem("HS410", where=f"server {url}: folder of its states", got=f"no folder {folder} on this machine",
                expected="a folder that the server and this machine see", fix=fix)
    )  # fmt: skip
