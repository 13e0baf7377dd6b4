"""Text of files and of the system that is shown to people: nothing in it may look like output of hsformat's own.

Imports nothing of hsformat.
"""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from typing import Final

__all__ = ["accept_all_text", "printable", "shortened"]

_CONTROLS: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_QUOTED: Final = "\n    "
"""How a problem begins a line that it quotes: no line of hsformat's own begins so."""

_LONG_WORD: Final = re.compile(r"\S{301,}")
_WORD_ENDS: Final = (150, 50)
_TEXT_ENDS: Final = (3000, 1000)


def printable(text: str, *, quoting: bool = False) -> str:
    r"""Return a text with control characters, marks of direction and halves of characters escaped.

    Parameters
    ----------
    quoting
        A line end stays where four spaces follow it: a line that is quoted, of an engine's log.

    Examples
    --------
    >>> printable("A\nerror")
    'A\\nerror'
    """
    if text.isprintable():
        return text
    lines = text.split(_QUOTED) if quoting else [text]
    return _QUOTED.join("".join(map(_escaped, line)) for line in lines)


def shortened(text: str, *, words: bool) -> str:
    """Return a text of at most some 4,000 characters: the middle of a longer one is left out.

    Parameters
    ----------
    words
        Whether a run without a space, such as a number of thousands of digits, is cut as well.
    """
    if words and len(text) > sum(_WORD_ENDS):
        text = _LONG_WORD.sub(lambda m: _cut(m[0], *_WORD_ENDS), text)
    return _cut(text, *_TEXT_ENDS)


def accept_all_text() -> None:
    """Let standard output and standard error take every text: what their encoding lacks is escaped, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _escaped(character: str) -> str:
    control = unicodedata.category(character) in _CONTROLS
    return character.encode("unicode_escape").decode("ascii") if control else character


def _cut(text: str, head: int, tail: int) -> str:
    if len(text) <= head + tail + 40:
        return text
    return f"{text[:head]}... {len(text) - head - tail:,} characters ...{text[-tail:]}"
