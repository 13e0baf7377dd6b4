"""Tokenizing in pieces: each distinct piece once, and a cut between two tokens that is proved without a second pass.

A fast tokenizer looks for its added tokens in the raw text first, leftmost and longest, and tokenizes what lies between
them piece by piece (``tokenizers``, ``AddedVocabulary::extract_and_normalize``). So a text may be cut before each of
them: the ids of the pieces, joined, are the ids of the text. And if the ids of a piece begin with those of its first
characters, then the ids of the whole text begin with those of all the text up to there. Where this does not hold by
construction (tokens that strip white space or match whole words, a tokenizer that overrides the methods of
Transformers' own, or none of Rust) there are no pieces, and the caller tokenizes every text as a whole.

This module may import ``tokenizer``; Transformers is imported on demand.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate
from typing import Any

__all__ = ["Encoded", "Pieces"]

_KEPT_CHARACTERS = 200
"""Pieces up to this length are kept: headers, default system prompts, ends of turn; contents hardly ever return."""
_KEPT_PIECES = 20_000


class Encoded:
    """Ids of a text, and where a cut of the text falls between two of them.

    Attributes
    ----------
    ids
        [T].
    """

    def __init__(self, pieces: Pieces, texts: list[str], ids: list[list[int]], heads: list[int]) -> None:
        self.ids = [i for piece in ids for i in piece]
        self._pieces, self._texts, self._ids, self._heads = pieces, texts, ids, heads
        self._chars = list(accumulate((len(t) for t in texts), initial=0))
        self._tokens = list(accumulate((len(i) for i in ids), initial=0))

    def cut(self, char: int) -> int | None:
        """Return n where ``ids[:n]`` are the ids of the first ``char`` characters; None where that is not proved."""
        k = bisect_right(self._chars, char) - 1
        within = char - self._chars[k]
        if not within:
            return self._tokens[k]
        if k and within < self._heads[k]:  # inside an added token
            return None
        begin = self._pieces.ids(self._texts[k][:within])
        return self._tokens[k] + len(begin) if self._ids[k][: len(begin)] == begin else None


class Pieces:
    """Tokenizes with one tokenizer; see :meth:`of`."""

    def __init__(self, backend: Any, added: list[str]) -> None:
        self._backend = backend
        # Of the tokens that match at one place the longest counts; an alternation takes the first.
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        self._kept: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> Pieces | None:
        """Return the pieces of a tokenizer; None: it is not one of which the above is known."""
        if not getattr(tokenizer, "is_fast", False):
            return None
        from transformers import PreTrainedTokenizerFast as Fast

        own = ("__call__", "_encode_plus", "_batch_encode_plus", "apply_chat_template")
        if not isinstance(tokenizer, Fast) or any(getattr(type(tokenizer), n, 0) != getattr(Fast, n, 0) for n in own):
            return None
        backend = tokenizer.backend_tokenizer
        tokens = list(backend.get_added_tokens_decoder().values())
        raw = [t for t in tokens if not t.normalized]
        if any(t.lstrip or t.rstrip or t.single_word for t in tokens) or not raw:
            return None
        if backend.encode_special_tokens or getattr(tokenizer, "split_special_tokens", False):
            return None
        if backend.truncation is not None or backend.padding is not None:
            return None
        return cls(backend, [t.content for t in raw])

    def encode(self, text: str) -> Encoded:
        """Return the ids of a text, without special tokens of the tokenizer's own."""
        found = [m.span() for m in self._added.finditer(text)]
        cuts = [start for start, _ in found]
        if not cuts or cuts[0] > 0:
            cuts.insert(0, 0)
        texts = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        heads = [stop - start for start, stop in found]
        if len(heads) < len(texts):
            heads.insert(0, 0)
        return Encoded(self, texts, self._all_ids(texts), heads)

    def ids(self, text: str) -> list[int]:
        """Return the ids of one piece or of its beginning."""
        return self._all_ids([text])[0]

    def _all_ids(self, texts: list[str]) -> list[list[int]]:
        kept = self._kept
        missing = [t for t in dict.fromkeys(texts) if t not in kept]
        if not missing:
            return [kept[t] for t in texts]
        made = self._backend.encode_batch_fast(missing, add_special_tokens=False)
        new = {text: encoding.ids for text, encoding in zip(missing, made, strict=True)}
        out = [new[t] if t in new else kept[t] for t in texts]
        if len(kept) > _KEPT_PIECES:
            kept.clear()
        kept.update((t, i) for t, i in new.items() if len(t) <= _KEPT_CHARACTERS)
        return out
