"""A chat template: its digest, marks inside its generation tags, and which of a message's keys it reads.

This module may import ``digests`` and ``messages``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from hsformat.digests import digest_bytes
from hsformat.prepare.messages import REASONING_KEYS

__all__ = ["Mismatch", "Template", "after_prompt", "analysed", "split_marks"]

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them for a program's internal use
_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template's text, read.

    Attributes
    ----------
    text, digest
        The text, and the digest of it.
    marked
        The template with marks inside its generation tags; None: it has no tags.
    reasoning
        Of the names that reasoning has in a message, those that the template reads.
    """

    text: str
    digest: str
    marked: str | None
    reasoning: tuple[str, ...]

    def named(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose reasoning stands under a name that the template reads, as servers give it several."""
        if not self.reasoning or all(m.keys().isdisjoint(REASONING_KEYS) for m in messages):
            return messages
        return [self._named(m) for m in messages]

    def _named(self, message: dict[str, Any]) -> dict[str, Any]:
        given = next((message[k] for k in REASONING_KEYS if message.get(k)), None)
        if given is None or not message.keys().isdisjoint(self.reasoning):
            return message
        return message | {self.reasoning[0]: given}


class Mismatch(Exception):
    """The rendering of one conversation cannot be proved; becomes HS303."""

    def __init__(self, where: str, *, got: str, expected: str, fix: str) -> None:
        super().__init__(got)
        self.where, self.got, self.expected, self.fix = where, got, expected, fix


@lru_cache(maxsize=16)
def analysed(text: str) -> Template:
    """Put marks inside generation tags, leaving the white-space control of each tag to work as it did.

    ``{% set %}`` renders nothing, so that a block tag still stands at both ends (``trim_blocks``, ``lstrip_blocks``).
    """
    marked = None
    if _BEGIN.search(_COMMENT.sub("", text)):
        begun = _BEGIN.sub(rf"{{%\1 generation %}}{{{{ '{_OPEN}' }}}}{{% set hs_mark = 0 \2%}}", text)
        marked = _END.sub(rf"{{%\1 set hs_mark = 0 %}}{{{{ '{_CLOSE}' }}}}{{% endgeneration \2%}}", begun)
    known = tuple(k for k in REASONING_KEYS if re.search(rf"[.'\"]{k}\b", text))
    return Template(text=text, digest=digest_bytes((text.encode(),)), marked=marked, reasoning=known)


def split_marks(marked: str) -> tuple[str, list[int]]:
    """Return a text without its marks, and the places of the marks, which must open and close by turns."""
    marks = "".join(re.findall(f"[{_OPEN}{_CLOSE}]", marked))
    if marks != (_OPEN + _CLOSE) * (len(marks) // 2):
        raise Mismatch("generation tags", got="tags that overlap or do not close",
                        expected="pairs, one after the other",
                        fix="let the template close each tag before the next")  # fmt: skip
    parts = re.split(f"[{_OPEN}{_CLOSE}]", marked)
    return "".join(parts), list(accumulate(len(p) for p in parts[:-1]))


def after_prompt(text: str, start: int, prompt: str) -> int:
    """Return ``start`` or, where the generation prompt is written across it, the place where that ends.

    A tag that opens before a ``<think>`` which the generation prompt holds would call it the assistant's.
    """
    for k in range(len(prompt), -1, -1):
        if text.endswith(prompt[:k], 0, start) and text.startswith(prompt[k:], start):
            return start + len(prompt) - k
    return start
