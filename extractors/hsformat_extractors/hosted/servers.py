"""What the drivers of running servers have in common: whose model it is, whether it lives, what dead clients left.

May import ``target`` and ``problems`` of hsformat.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from hsformat.problems import HsError, problem
from hsformat.target import describe

__all__ = [
    "Leftovers", "ServerLost", "authorization", "check_folder", "check_served_model", "how_to_authorize",
    "require_health",
]  # fmt: skip


class ServerLost(HsError):
    """HS410: a server does not answer any more, or not as one that gives states."""

    def __init__(self, url: str, got: str) -> None:
        super().__init__(
            problem("HS410", where=f"server {url}", got=got, expected="a server that answers to the end",
                    fix="look at the server's log and start it again; what is committed stays, and the same command "
                    "goes on from there")
        )  # fmt: skip


def authorization(options: Mapping[str, str]) -> dict[str, str]:
    """Return the header of a server's key, by option ``api_key``: the name of the environment variable that holds it.

    Raises
    ------
    HsError
        HS410: there is no such variable.
    """
    name = options.get("api_key")
    if name is None:
        return {}
    if name not in os.environ:
        raise HsError(
            problem("HS410", where=f"option api_key: {name}", got="no such environment variable",
                    expected="the name of a variable that holds the key", fix=f"export {name}=... and run it again")
        )  # fmt: skip
    return {"Authorization": f"Bearer {os.environ[name]}"}


def how_to_authorize(said: object) -> str | None:
    """Return what to do where a server has said 401 or 403; None: it has said something else."""
    if isinstance(said, urllib.error.HTTPError) and said.code in (401, 403):
        return "give the key that it was started with: export KEY=..., --option api_key=KEY"
    return None


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

    A server writes on when a client is gone, or has given a request up. Files of our requests that are old enough are
    removed once a session, and those of this session's own when it ends.

    Parameters
    ----------
    pattern
        Of their names, as :meth:`pathlib.Path.glob` takes it.
    age
        Seconds after which no live client waits for a file.
    """

    def __init__(self, pattern: str, *, age: float) -> None:
        self._pattern, self._age = pattern, age
        self._lock, self._own = threading.Lock(), set[tuple[Path, str]]()

    def seen(self, folder: Path, request: str) -> None:
        """Note where a request's file will be; remove from a new folder what is old. Called from any thread."""
        with self._lock:
            known = any(folder == f for f, _ in self._own)
            self._own.add((folder, request.rpartition("-")[0]))
            if not known:
                self.remove(folder)

    def remove(self, folder: Path) -> None:
        """Remove from a folder what is old."""
        before = time.time() - self._age
        for path in folder.glob(self._pattern):
            with suppress(OSError):  # another user's, or gone in this moment
                if path.stat().st_mtime < before:
                    path.unlink()

    def close(self) -> None:
        """Remove what this session has asked for and not taken."""
        with self._lock:
            for folder, run in self._own:
                for path in folder.glob(f"*{run}-*"):
                    with suppress(OSError):
                        path.unlink()
            self._own.clear()


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
    if not isinstance(told, str) or not Path(told).is_absolute() or not Path(told).is_dir():
        return
    if Path(told).samefile(model):
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
