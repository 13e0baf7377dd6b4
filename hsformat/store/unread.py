"""What is said of a file that cannot be read: one that is gone, and one that nobody knows to be damaged."""

from __future__ import annotations

import errno

from hsformat.problems import Problem, problem

__all__ = ["ABSENT", "unread", "unread_fix"]

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What a place says of an object that is not there: it will say the same tomorrow."""


def unread(e: OSError, *, where: str, expected: str, code: str = "HS503") -> Problem:
    """Return the problem of a file that could not be read, whose fix is never to replace what may be whole."""
    got = f"cannot be read: {e.strerror or e}"
    return problem(code, where=where, got=got, expected=expected, fix=unread_fix(e))


def unread_fix(e: OSError) -> str | None:
    """Return what to do about it; None, the fix of the code, where the place says that the file is not there."""
    if isinstance(e, ABSENT):
        return None
    if e.errno in {errno.EMFILE, errno.ENFILE}:
        return "nothing is damaged: let the process have more files open (ulimit -n), or keep fewer stores open at once"
    if e.errno in {errno.EACCES, errno.EPERM}:
        return "nothing is known to be damaged: let this user read it"
    return (
        "nothing is known to be damaged: read it again when the disk or server answers; if it never will, restore "
        "the file from a copy"
    )
