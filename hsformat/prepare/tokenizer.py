"""The target's tokenizer: loading it from its folder, and what rendering needs of it.

This module may import ``problems``, ``dtypes`` and ``target.jsonfiles``; Transformers is imported on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from hsformat.dtypes import as_array
from hsformat.problems import ForeignFileError, HsError, problem
from hsformat.target.jsonfiles import read_object

__all__ = ["ChatTokenizer", "EndOfTurn", "flat_ids", "load_tokenizer"]


class ChatTokenizer(Protocol):
    """What is used of a Transformers tokenizer; any object that has it will do."""

    eos_token_id: int | None
    all_special_ids: list[int]
    is_fast: bool

    def get_chat_template(self, *, tools: list[dict[str, Any]] | None = None) -> str:
        """Return the template's text; ValueError when there is none."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """Render a conversation to text or ids."""
        ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool | None = None) -> str:
        """Return the text of ids."""
        ...

    def __call__(self, text: str, **kwargs: Any) -> Mapping[str, Any]:
        """Tokenize text."""
        ...


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer in a model folder; only local files are read and no code of the folder is run.

    Its ``model_max_length`` is lifted: the length is the caller's to limit, and ids are never cut here.

    Raises
    ------
    ForeignFileError
        HS602: no such folder, or no tokenizer can be read in it (its own code would be needed, for instance), or its
        chat template is no text.
    HsError
        HS410: Transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise HsError(problem("HS410", where="transformers", got="not installed", expected="Transformers, to tokenize",
                              fix="pip install 'hsformat[transformers]'")) from e  # fmt: skip
    path = Path(folder)
    expected = "a folder with tokenizer.json and tokenizer_config.json"
    if not path.is_dir():
        got = "a file" if path.exists() else "no such folder"
        raise ForeignFileError(problem("HS602", where=str(path), got=got, expected=expected, fix="check the path"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, model_max_length=1 << 60
        )
    except Exception as e:  # tokenizers raises bare Exception for a file it cannot parse
        got = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"
        fix = "copy the target's tokenizer files into the folder"
        raise ForeignFileError(problem("HS602", where=str(path), got=got, expected=expected, fix=fix)) from e
    template = getattr(tokenizer, "chat_template", None)
    texts = list(template.values()) if isinstance(template, dict) else [template]
    if wrong := [t for t in texts if not isinstance(t, str | None)]:
        raise ForeignFileError(problem("HS602", where=f"{path}: chat_template", got=repr(wrong[0])[:80],
                                       expected="the text of a Jinja template, or one for each name",
                                       fix="copy the target's tokenizer files into the folder"))  # fmt: skip
    return tokenizer


def flat_ids(value: Any) -> list[int]:
    """Return token ids as a flat list, whichever way a tokenizer returns them.

    ``apply_chat_template`` gives a list, a list of one list, a dictionary of either, or a tensor, by version and
    tokenizer (Model-Optimizer PR#2172: ``len`` of the dictionary was taken for the number of tokens).

    Raises
    ------
    HsError
        HS603: it is none of these.
    """
    if isinstance(value, Mapping) and "input_ids" in value:
        value = value["input_ids"]
    if isinstance(value, list) and (not value or type(value[0]) is int):
        return value
    try:
        array = as_array(value)
    except TypeError:
        array = None
    if array is not None and array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        got = type(value).__name__ if array is None else f"{array.dtype} of shape {list(array.shape)}"
        raise HsError(problem("HS603", where="tokenizer", got=got, expected="the token ids of one sequence",
                              fix="use a tokenizer that follows Transformers' interface"))  # fmt: skip
    ids: list[int] = array.tolist()
    return ids


class EndOfTurn:
    """Where an assistant turn ends: after the token that closes it, before what the template writes after that.

    A token *closes* a turn if it is the tokenizer's ``eos_token`` or an ``eos_token_id`` of the
    ``generation_config.json`` beside it: these make an engine stop. Where the template writes none of them after a
    one-word answer, the first special token after that answer closes a turn too. *Filler* are tokens of white space
    alone, and special tokens that do not close. Of a stretch of tokens that holds one turn:

    1. If it ends in a closing token and filler, the turn ends after the last closing token.
    2. Otherwise, if a closing token directly follows the stretch, the turn ends after that one.
    3. Otherwise the template closes no turn: the turn is the stretch, without white space at its end, which may be the
       template's; a stretch from generation tags is taken as it stands.

    Parameters
    ----------
    tokenizer
        The target's.
    example
        Ids of a conversation that ends in a one-word answer; empty: the template would not render one.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, example: list[int]) -> None:
        self._tokenizer = tokenizer
        self._blank: dict[int, bool] = {}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self.closing = frozenset(_configured(tokenizer))
        tail = list(takewhile(self._is_filler, reversed(example)))
        if self.closing.isdisjoint(tail):  # none of those that stop an engine: the one nearest to the answer
            self.closing |= set([i for i in tail if i in self.special][-1:])

    def find(self, ids: list[int], start: int, stop: int, *, exact: bool = False) -> int:
        """Return the index after the last token of the turn in ``ids[start:stop]``.

        Parameters
        ----------
        ids
            May go on after ``stop``.
        start, stop
            The stretch that holds the turn.
        exact
            Whether the stretch came from generation tags (rule 3).
        """
        closed = stop
        while closed > start and ids[closed - 1] not in self.closing and self._is_filler(ids[closed - 1]):
            closed -= 1
        if closed > start and ids[closed - 1] in self.closing:
            return closed
        if stop < len(ids) and ids[stop] in self.closing:
            return stop + 1
        while not exact and stop > start and self._is_blank(ids[stop - 1]):
            stop -= 1
        return stop

    def _is_filler(self, token: int) -> bool:
        return token in self.special or self._is_blank(token)

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = token not in self.special and not self._tokenizer.decode([token]).strip()
        return self._blank[token]


def _configured(tokenizer: ChatTokenizer) -> set[int]:
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(str(getattr(tokenizer, "name_or_path", ""))) / "generation_config.json"
    if path.is_file():
        given = read_object(path).get("eos_token_id")
        ids |= {i for i in (given if isinstance(given, list) else [given]) if type(i) is int}
    return ids
