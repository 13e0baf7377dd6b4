"""What the drivers of running servers have in common: whose model it is, and how it is said that one is lost.

May import ``target`` and ``problems`` of hsformat.
"""

from __future__ import annotations

from pathlib import Path

from hsformat.problems import HsError, problem
from hsformat.target import describe

__all__ = ["ServerLost", "check_folder", "check_served_model"]


class ServerLost(HsError):
    """HS410: a server does not answer any more, or not as one that gives states."""

    def __init__(self, url: str, got: str) -> None:
        super().__init__(
            problem("HS410", where=f"server {url}", got=got, expected="a server that answers to the end",
                    fix="look at the server's log and start it again; what is committed stays, and the same command "
                    "goes on from there")
        )  # fmt: skip


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
