"""Rendering: a conversation to ids and mask, from the template's generation tags or turn by turn.

Both ways prove every boundary. With tags, the rendering is repeated with marks inside the tags: without the marks it
must be the same text, and each mark must fall between two tokens. Transformers' own assistant mask is not used: where a
span ended at token 0 or in stripped white space, it ran to the end (transformers#47325). Without tags, which stock
templates lack (transformers#34172), the rendering of each shorter conversation must be a prefix of that of the longer,
token by token. Where that fails there is no mask, but a problem. This module may import ``problems``, ``digests``,
``conversation`` and ``tokenizer``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import accumulate
from typing import Any

from hsformat.digests import digest_bytes
from hsformat.prepare.conversation import Conversation
from hsformat.prepare.tokenizer import ChatTokenizer, EndOfTurn, flat_ids
from hsformat.problems import HsError, Problem, Severity, problem

__all__ = ["Rendered", "Renderer"]

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them for a program's internal use
_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_ONE_WORD_ANSWER = [{"role": "user", "content": "Yes?"}, {"role": "assistant", "content": "Yes"}]

Spans = list[tuple[int, int]]
"""Supervised stretches of tokens, [start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """[T] ids and mask of one conversation, and the digest of the template that was used."""

    input_ids: list[int]
    loss_mask: list[int]
    template_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    text: str
    digest: str
    marked: str | None
    """The template with marks inside its generation tags; None: it has no tags."""


class _Mismatch(Exception):
    """The rendering of one conversation cannot be proved; becomes HS303."""

    def __init__(self, where: str, *, got: str, expected: str, fix: str) -> None:
        super().__init__(got)
        self.where, self.got, self.expected, self.fix = where, got, expected, fix


class Renderer:
    """Renders conversations with one tokenizer and one set of template arguments.

    Raises
    ------
    HsError
        HS303: a template argument has the name of one of ``apply_chat_template``'s own.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, template_kwargs: dict[str, Any]) -> None:
        own = {"messages", *signature(tokenizer.apply_chat_template).parameters}
        if wrong := sorted(own & template_kwargs.keys()):
            raise HsError(problem("HS303", where="template arguments", got=", ".join(wrong), severity=Severity.ERROR,
                                  expected="variables of the template, such as enable_thinking",
                                  fix="leave them out"))  # fmt: skip
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        self._ends: dict[str, EndOfTurn] = {}

    def conversation(self, conversation: Conversation) -> Rendered | Problem:
        """Return ids and mask of a whole conversation; HS303 where its turns cannot be told apart.

        Raises
        ------
        HsError
            HS303: the tokenizer has no chat template.
        """
        return self._guarded(conversation, self._supervised)

    def prompt(self, conversation: Conversation) -> Rendered | Problem:
        """Return ids and an all-0 mask of a conversation whose next turn the target is to write.

        Raises
        ------
        HsError
            HS303: the tokenizer has no chat template.
        """
        return self._guarded(conversation, self._prompt)

    def _guarded(self, c: Conversation, render: Callable[[Conversation, _Template], Rendered]) -> Rendered | Problem:
        template = self._template(c)
        try:
            return render(c, template)
        except _Mismatch as e:
            return problem("HS303", where=f"{c.where}: {e.where}", got=e.got, expected=e.expected, fix=e.fix,
                           record=c.id, severity=Severity.ERROR)  # fmt: skip

    def _prompt(self, c: Conversation, template: _Template) -> Rendered:
        ids = self._ids(c, template, len(c.messages), prompt=True)
        return Rendered(input_ids=ids, loss_mask=[0] * len(ids), template_digest=template.digest)

    def _supervised(self, c: Conversation, template: _Template) -> Rendered:
        tags = template.marked is not None and self._tokenizer.is_fast  # offsets need a fast tokenizer
        ids, spans = self._by_tags(c, template) if tags else self._by_turns(c, template)
        mask = [0] * len(ids)
        for start, stop in spans:
            mask[start:stop] = [1] * (stop - start)
        return Rendered(input_ids=ids, loss_mask=mask, template_digest=template.digest)

    # -- generation tags

    def _by_tags(self, c: Conversation, template: _Template) -> tuple[list[int], Spans]:
        text, edges = _split(self._render(c.messages, template.marked or "", c.tools, tokenize=False))
        plain = self._render(c.messages, template.text, c.tools, tokenize=False)
        if text != plain:
            at = _first_difference(text, plain)
            raise _Mismatch(f"character {at}", got=repr(text[at : at + 20]), expected=repr(plain[at : at + 20]),
                            fix="keep filters outside the generation tags: marks in them change the text")  # fmt: skip
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, end = flat_ids(encoded), self._end_of_turn(template)
        # A token's text begins where the one before ends: some tokenizers leave leading spaces out of the offset.
        ends = [stop for _, stop in encoded["offset_mapping"]]
        cuts = [self._token_at(edge, ends, ids) for edge in edges]
        return ids, [(a, end.find(ids, a, b, exact=True)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]

    def _token_at(self, edge: int, ends: list[int], ids: list[int]) -> int:
        token = bisect_right(ends, edge)
        if edge != (ends[token - 1] if token else 0):
            raise _Mismatch(f"token {token}", got=f"{self._shown(ids, token)} across a generation tag",
                            expected="a tag between two tokens",
                            fix="let the template put a special token or a newline there")  # fmt: skip
        return token

    # -- turn by turn

    def _by_turns(self, c: Conversation, template: _Template) -> tuple[list[int], Spans]:
        whole, end = self._ids(c, template, len(c.messages)), self._end_of_turn(template)
        spans = []
        for i, message in enumerate(c.messages):
            if message["role"] != "assistant":
                continue
            turn = f"messages[{i}]"
            if i == 0:
                raise _Mismatch(turn, got="an assistant turn first", expected="a turn before it, which it answers",
                                fix="remove it: no generation prompt can be rendered for it")  # fmt: skip
            prompt = self._ids(c, template, i, prompt=True)
            upto = whole if i + 1 == len(c.messages) else self._ids(c, template, i + 1)
            self._check_prefix(prompt, upto, turn, "its generation prompt")
            start, stop = len(prompt), end.find(upto, len(prompt), len(upto))
            self._check_prefix(upto[:stop], whole, turn, "the conversation up to this turn")
            stop = end.find(whole, start, stop)  # some templates close a turn only when another follows
            if "add_generation_prompt" not in template.text:
                self._check_begins(whole[start:stop], message.get("content") or "", turn)
            spans.append((start, stop))
        return whole, spans

    def _check_prefix(self, prefix: list[int], ids: list[int], turn: str, what: str) -> None:
        if ids[: len(prefix)] == prefix:
            return
        at = _first_difference(prefix, ids)
        raise _Mismatch(f"{turn}: token {at}", got=self._shown(ids, at),
                        expected=f"{self._shown(prefix, at)}, as {what} is rendered",
                        fix="the template renders a turn otherwise once it is answered or is history (thinking is "
                        "stripped): give it generation tags, or make this turn the conversation's last")  # fmt: skip

    def _check_begins(self, turn_ids: list[int], content: str, turn: str) -> None:
        """Without a generation prompt, only the content tells a turn's header from what the assistant wrote."""
        text = self._tokenizer.decode(turn_ids, clean_up_tokenization_spaces=False).lstrip()
        if not text.startswith(content.strip()):
            raise _Mismatch(turn, got=f"a turn that begins {text[:30]!r}", expected=repr(content[:30]),
                            fix="give the template a generation prompt (add_generation_prompt), or tags")  # fmt: skip

    # -- template and tokenizer

    def _template(self, c: Conversation) -> _Template:
        try:
            return _analysed(self._tokenizer.get_chat_template(tools=c.tools))
        except ValueError as e:
            raise HsError(problem("HS303", where="tokenizer", got="no chat template",
                                  expected="a chat template, to render messages", severity=Severity.ERROR,
                                  fix="add chat_template.jinja to the model folder, or give input_ids and loss_mask",
                                  )) from e  # fmt: skip

    def _end_of_turn(self, template: _Template) -> EndOfTurn:
        if template.digest not in self._ends:
            try:
                example = flat_ids(self._render(_ONE_WORD_ANSWER, template.text, None, tokenize=True))
            except _Mismatch:
                example = []
            self._ends[template.digest] = EndOfTurn(self._tokenizer, example=example)
        return self._ends[template.digest]

    def _ids(self, c: Conversation, template: _Template, n: int, *, prompt: bool = False) -> list[int]:
        """Return the ids of the first n messages."""
        how = {"add_generation_prompt": prompt, "tokenize": True}
        return flat_ids(self._render(c.messages[:n], template.text, c.tools, **how))

    def _render(self, messages: list[dict[str, Any]], template: str, tools: Any, **how: bool) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, **how, **self._kwargs
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as e:
            raise _Mismatch("template", got=f"{type(e).__name__}: {e}",
                            expected="a conversation that the template accepts",
                            fix="change the conversation's turns to what the template takes") from e  # fmt: skip

    def _shown(self, ids: list[int], at: int) -> str:
        if at >= len(ids):
            return f"the end, after {len(ids)} tokens"
        return f"{ids[at]} {self._tokenizer.decode([ids[at]])!r}"


@lru_cache(maxsize=16)
def _analysed(text: str) -> _Template:
    """Put marks inside generation tags, leaving the white-space control of each tag to work as it did.

    ``{% set %}`` renders nothing, so that a block tag still stands at both ends (``trim_blocks``, ``lstrip_blocks``).
    """
    marked = None
    if _BEGIN.search(_COMMENT.sub("", text)):
        begun = _BEGIN.sub(rf"{{%\1 generation %}}{{{{ '{_OPEN}' }}}}{{% set hs_mark = 0 \2%}}", text)
        marked = _END.sub(rf"{{%\1 set hs_mark = 0 %}}{{{{ '{_CLOSE}' }}}}{{% endgeneration \2%}}", begun)
    return _Template(text=text, digest=digest_bytes((text.encode(),)), marked=marked)


def _split(marked: str) -> tuple[str, list[int]]:
    """Return a text without its marks, and the places of the marks, which must open and close by turns."""
    marks = "".join(re.findall(f"[{_OPEN}{_CLOSE}]", marked))
    if marks != (_OPEN + _CLOSE) * (len(marks) // 2):
        raise _Mismatch("generation tags", got="tags that overlap or do not close",
                        expected="pairs, one after the other",
                        fix="let the template close each tag before the next")  # fmt: skip
    parts = re.split(f"[{_OPEN}{_CLOSE}]", marked)
    return "".join(parts), list(accumulate(len(p) for p in parts[:-1]))


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
