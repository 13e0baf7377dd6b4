"""Rendering: a conversation to ids and mask, from the template's generation tags or turn by turn.

Both ways prove every boundary. With tags, the rendering is repeated with marks inside the tags: without the marks it
must be the same text, and each mark must fall between two tokens; and each turn inside tags must stand where it is
served: after what is rendered of the turns before it with the generation prompt, and as it is rendered while it is the
last. Transformers' own assistant mask is not used: where a
span ended at token 0 or in stripped white space, it ran to the end (transformers#47325). Without tags, which stock
templates lack (transformers#34172), the rendering of each shorter conversation must be a prefix of that of the longer,
token by token. Where that fails there is no mask, but a problem.

With a fast tokenizer the texts are compared and each is tokenized once, in pieces between which a cut is proved
(``pieces``). What that does not prove is tokenized for each shorter conversation anew: it is proved then, or refused.
This module may import ``problems``, ``digests``, ``record`` and the modules of this package.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hsformat.digests import canonical_json
from hsformat.prepare.conversation import Conversation
from hsformat.prepare.messages import REASONING_KEYS
from hsformat.prepare.pieces import Pieces
from hsformat.prepare.template import Mismatch, Template, after_prompt, analysed, split_marks
from hsformat.prepare.tokenizer import ChatTokenizer, EndOfTurn, flat_ids
from hsformat.problems import ForeignFileError, HsError, Problem, Severity, problem
from hsformat.record import Provenance

__all__ = ["Rendered", "Renderer"]

_QUESTION = [{"role": "user", "content": "Yes?"}]
_ONE_WORD_ANSWER = [*_QUESTION, {"role": "assistant", "content": "Yes"}]

_STRIPPED = (
    "the template renders a turn otherwise once it is history (thinking is stripped): give --explode-turns, one record "
    "a turn as it is served"
)
_OTHER_PROMPT = (
    "the template renders this turn otherwise than its own generation prompt begins it (a <think> that the answer "
    "lacks): give the arguments it is served with (--template-kwargs), or an answer that follows the prompt"
)

Spans = list[tuple[int, int]]
"""Supervised stretches of tokens, [start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """[T] ids and mask of one conversation, and the digest of the template that was used."""

    input_ids: list[int]
    loss_mask: list[int]
    template_digest: str


class Renderer:
    """Renders conversations with one tokenizer and one set of template arguments.

    Raises
    ------
    HsError
        HS303: a template argument has the name of one of ``apply_chat_template``'s own, or they are no JSON that can be
        stored with the records.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, template_kwargs: dict[str, Any]) -> None:
        own = {"messages", *signature(tokenizer.apply_chat_template).parameters}
        if wrong := sorted(own & template_kwargs.keys()):
            raise HsError(problem("HS303", where="template arguments", got=", ".join(wrong), severity=Severity.ERROR,
                                  expected="variables of the template, such as enable_thinking",
                                  fix="leave them out"))  # fmt: skip
        try:
            Provenance(template_kwargs=template_kwargs)
            canonical_json(template_kwargs)
        except (ValueError, TypeError, RecursionError) as e:  # a surrogate, NaN, an integer beyond 2**53, an object
            got = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise HsError(problem("HS303", where="template arguments", got=got, severity=Severity.ERROR,
                                  expected="JSON values that are kept exactly, since they are stored with each record",
                                  fix="write such a number as text, or leave it out")) from e  # fmt: skip
        self._tokenizer = tokenizer
        self._pieces = Pieces.of(tokenizer)
        self._kwargs = template_kwargs
        self._compiled: set[str] = set()
        self._ends: dict[str, EndOfTurn] = {}
        self._prompts: dict[str, str] = {}

    def conversation(self, conversation: Conversation) -> Rendered | Problem:
        """Return ids and mask of a whole conversation; HS303 where its turns cannot be told apart.

        Raises
        ------
        HsError
            HS303: the tokenizer has no chat template. HS602: that template is no program.
        """
        return self._guarded(conversation, self._supervised)

    def turn(self, conversation: Conversation) -> Rendered | Problem:
        """Return ids and mask of a conversation's last turn, an assistant's, as it is served.

        The prompt is what the template renders of the turns before, with the generation prompt; the rendering of all
        begins with it token by token (else HS303), and what follows is the turn, the only one that is supervised.

        Raises
        ------
        HsError
            HS303: the tokenizer has no chat template. HS602: that template is no program.
        """
        return self._guarded(conversation, self._served)

    def prompt(self, conversation: Conversation) -> Rendered | Problem:
        """Return ids and an all-0 mask of a conversation whose next turn the target is to write.

        Raises
        ------
        HsError
            HS303: the tokenizer has no chat template. HS602: that template is no program.
        """
        return self._guarded(conversation, self._prompt)

    def _guarded(self, c: Conversation, render: Callable[[Conversation, Template], Rendered]) -> Rendered | Problem:
        template = self._template(c)
        try:
            return render(replace(c, messages=template.named(c.messages)), template)
        except Mismatch as e:
            return problem("HS303", where=f"{c.where}: {e.where}", got=e.got, expected=e.expected, fix=e.fix,
                           record=c.id, severity=Severity.ERROR)  # fmt: skip

    def _prompt(self, c: Conversation, template: Template) -> Rendered:
        ids = self._ids(c, template, len(c.messages), prompt=True)
        return Rendered(input_ids=ids, loss_mask=[0] * len(ids), template_digest=template.digest)

    def _supervised(self, c: Conversation, template: Template) -> Rendered:
        turns = [i for i, m in enumerate(c.messages) if m["role"] == "assistant"]
        _check_reasoning(c, template, turns)
        if not self._has_tags(template):
            return _masked(*self._by_turns(c, template, turns), template)
        text, edges = self._tagged(c, template)
        self._check_as_served(c, template, turns, text, edges)
        return _masked(*self._by_tags(template, text, edges), template)

    def _served(self, c: Conversation, template: Template) -> Rendered:
        last = len(c.messages) - 1
        _check_reasoning(c, template, [last])
        if not self._has_tags(template) or not last:
            return _masked(*self._by_turns(c, template, [last]), template)
        ids, spans = self._by_tags(template, *self._tagged(c, template))
        prompt = self._ids(c, template, last, prompt=True)
        self._check_prefix(prompt, ids, f"messages[{last}]", "its generation prompt", _OTHER_PROMPT)
        n = len(prompt)
        return _masked(ids, [(max(start, n), stop) for start, stop in spans if stop > n], template)

    def _has_tags(self, template: Template) -> bool:
        return template.marked is not None and self._tokenizer.is_fast  # offsets need a fast tokenizer

    # -- generation tags

    def _tagged(self, c: Conversation, template: Template) -> tuple[str, list[int]]:
        """Return the text of a conversation, and in it the edges of what its tags hold: first, end, first, end, ..."""
        marked = self._render(c.messages, template.marked or "", c.tools, tokenize=False)
        plain = self._render(c.messages, template.text, c.tools, tokenize=False)
        text, edges = split_marks(marked)
        if text != plain:
            at = _first_difference(text, plain)
            raise Mismatch(f"character {at}", got=repr(text[at : at + 20]), expected=repr(plain[at : at + 20]),
                            fix="keep filters outside the generation tags: marks in them change the text")  # fmt: skip
        prompt = self._generation_prompt(template)
        edges[::2] = [min(after_prompt(text, a, prompt), b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return text, edges

    def _by_tags(self, template: Template, text: str, edges: list[int]) -> tuple[list[int], Spans]:
        end = self._end_of_turn(template)
        ids, cuts = self._cut(text, edges)
        return ids, [(a, end.find(ids, a, b, exact=True)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]

    def _check_as_served(
        self, c: Conversation, template: Template, turns: list[int], text: str, edges: list[int]
    ) -> None:
        """Refuse a text in which a turn inside tags stands otherwise than the target writes it, from the last one back.

        Turns outside tags are not trained on; templates may strip them. So the walk ends at the first edge.
        """
        header = self._generation_prompt(template)
        for i in reversed(turns):
            if not edges:
                return
            turn, begin = f"messages[{i}]", 0
            if i:  # none can be rendered for an assistant turn that comes first
                (prompt,) = self._texts(c, template, [i], prompt=True)
                begin = len(prompt.removesuffix(header))
                same = text.startswith(prompt[:begin])
                if same and edges[-1] <= begin:
                    continue
                self._check_text(prompt, text, turn, "its generation prompt", _OTHER_PROMPT if same else _STRIPPED)
            if i + 1 < len(c.messages):
                upto, of_upto = self._tagged(replace(c, messages=c.messages[: i + 1]), template)
                stop = of_upto[-1] if of_upto and of_upto[-1] > begin else len(upto.rstrip())
                self._check_text(upto[:stop], text, turn, "the conversation up to this turn", _STRIPPED)
            edges = [edge for edge in edges if edge < begin]

    def _check_text(self, prefix: str, text: str, turn: str, what: str, fix: str) -> None:
        if not text.startswith(prefix):
            self._check_prefix(self._cut(prefix, [])[0], self._cut(text, [])[0], turn, what, fix)

    def _cut(self, text: str, edges: list[int]) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and the token at which each edge, a character, falls between two tokens."""
        if self._pieces is not None:
            made = self._pieces.encode(text)
            cuts = [made.cut(edge) for edge in edges]
            if all(cut is not None for cut in cuts):
                return made.ids, [cut for cut in cuts if cut is not None]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = flat_ids(encoded)
        # A token's text begins where the one before ends: some tokenizers leave leading spaces out of the offset.
        ends = [stop for _, stop in encoded["offset_mapping"]]
        return ids, [self._token_at(edge, ends, ids) for edge in edges]

    def _token_at(self, edge: int, ends: list[int], ids: list[int]) -> int:
        token = bisect_right(ends, edge)
        if edge != (ends[token - 1] if token else 0):
            raise Mismatch(f"token {token}", got=f"{self._shown(ids, token)} across a generation tag",
                            expected="a tag between two tokens",
                            fix="let the template put a special token or a newline there")  # fmt: skip
        return token

    # -- turn by turn

    def _by_turns(self, c: Conversation, template: Template, turns: list[int]) -> tuple[list[int], Spans]:
        if (made := self._by_texts(c, template, turns)) is not None:
            return made
        whole, end = self._ids(c, template, len(c.messages)), self._end_of_turn(template)
        spans = []
        for i in turns:
            message, turn = c.messages[i], f"messages[{i}]"
            if i == 0:
                raise Mismatch(turn, got="an assistant turn first", expected="a turn before it, which it answers",
                                fix="remove it: no generation prompt can be rendered for it")  # fmt: skip
            prompt = self._ids(c, template, i, prompt=True)
            upto = whole if i + 1 == len(c.messages) else self._ids(c, template, i + 1)
            self._check_prefix(prompt, upto, turn, "its generation prompt", _OTHER_PROMPT)
            start, stop = len(prompt), end.find(upto, len(prompt), len(upto))
            self._check_prefix(upto[:stop], whole, turn, "the conversation up to this turn", _STRIPPED)
            stop = end.find(whole, start, stop)  # some templates close a turn only when another follows
            if "add_generation_prompt" not in template.text:
                self._check_begins(whole[start:stop], message.get("content") or "", turn)
            spans.append((start, stop))
        return whole, spans

    def _by_texts(self, c: Conversation, template: Template, turns: list[int]) -> tuple[list[int], Spans] | None:
        """Prove on texts what :meth:`_by_turns` proves on ids, for turns that end in a closing token and white space.

        None where that is not so, or anything else is not proved.
        """
        if self._pieces is None or turns[0] == 0 or "add_generation_prompt" not in template.text:
            return None
        try:
            prompts = self._texts(c, template, turns, prompt=True)
            *uptos, whole = self._texts(c, template, [i + 1 for i in turns if i + 1 < len(c.messages)] + [None])
        except Mismatch:
            return None
        made, closing, spans = self._pieces.encode(whole), self._end_of_turn(template).closing, []
        for prompt, upto in zip(prompts, [*uptos, whole], strict=False):
            closed = upto.rstrip()
            if not (closed.startswith(prompt) and whole.startswith(closed)):
                return None
            start, stop = made.cut(len(prompt)), made.cut(len(closed))
            if start is None or stop is None or stop <= start or made.ids[stop - 1] not in closing:
                return None
            spans.append((start, stop))
        return made.ids, spans

    def _check_prefix(self, prefix: list[int], ids: list[int], turn: str, what: str, fix: str) -> None:
        if ids[: len(prefix)] == prefix:
            return
        at = _first_difference(prefix, ids)
        raise Mismatch(f"{turn}: token {at}", got=self._shown(ids, at),
                       expected=f"{self._shown(prefix, at)}, as {what} is rendered", fix=fix)  # fmt: skip

    def _check_begins(self, turn_ids: list[int], content: str, turn: str) -> None:
        """Without a generation prompt, only the content tells a turn's header from what the assistant wrote."""
        text = self._tokenizer.decode(turn_ids, clean_up_tokenization_spaces=False).lstrip()
        if not text.startswith(content.strip()):
            raise Mismatch(turn, got=f"a turn that begins {text[:30]!r}", expected=repr(content[:30]),
                            fix="give the template a generation prompt (add_generation_prompt), or tags")  # fmt: skip

    # -- template and tokenizer

    def _template(self, c: Conversation) -> Template:
        try:
            template = analysed(self._tokenizer.get_chat_template(tools=c.tools))
        except ValueError as e:
            raise HsError(problem("HS303", where="tokenizer", got="no chat template",
                                  expected="a chat template, to render messages", severity=Severity.ERROR,
                                  fix="add chat_template.jinja to the model folder, or give input_ids and loss_mask",
                                  )) from e  # fmt: skip

        if template.digest not in self._compiled:
            self._check_compiles(template)
            self._compiled.add(template.digest)
        return template

    def _check_compiles(self, template: Template) -> None:
        """Refuse, once for all rows, a template that is no program: no conversation could be changed to suit it."""
        try:
            self._render(_QUESTION, template.text, None, tokenize=False)
        except Mismatch as e:
            broken = e.__cause__
            if not any(cls.__name__ == "TemplateSyntaxError" for cls in type(broken).__mro__):  # of Jinja
                return
            place = f"tokenizer: chat template: line {getattr(broken, 'lineno', '?')}"
            raise ForeignFileError(problem("HS602", where=place, got=e.got,
                                           expected="a template that Jinja compiles", severity=Severity.ERROR,
                                           fix="repair chat_template.jinja of the model folder, or get it again",
                                           )) from e  # fmt: skip

    def _end_of_turn(self, template: Template) -> EndOfTurn:
        if template.digest not in self._ends:
            try:
                example = flat_ids(self._render(_ONE_WORD_ANSWER, template.text, None, tokenize=True))
            except Mismatch:
                example = []
            self._ends[template.digest] = EndOfTurn(self._tokenizer, example=example)
        return self._ends[template.digest]

    def _generation_prompt(self, template: Template) -> str:
        """Return what the template writes for a turn that is still to come, or nothing where that cannot be told."""
        if template.digest not in self._prompts:
            try:
                bare, prompt = (self._render(_QUESTION, template.text, None, tokenize=False, add_generation_prompt=p)
                                for p in (False, True))  # fmt: skip
            except Mismatch:
                bare, prompt = "", ""
            self._prompts[template.digest] = prompt[len(bare) :] if prompt.startswith(bare) else ""
        return self._prompts[template.digest]

    def _ids(self, c: Conversation, template: Template, n: int, *, prompt: bool = False) -> list[int]:
        """Return the ids of the first n messages."""
        if self._pieces is not None:
            return self._pieces.encode(self._texts(c, template, [n], prompt=prompt)[0]).ids
        how = {"add_generation_prompt": prompt, "tokenize": True}
        return flat_ids(self._render(c.messages[:n], template.text, c.tools, **how))

    def _texts(
        self, c: Conversation, template: Template, counts: Sequence[int | None], *, prompt: bool = False
    ) -> list[str]:
        """Return the texts of the first so many messages, in one call; None: of all."""
        how = {"add_generation_prompt": prompt, "tokenize": False}
        texts: list[str] = self._render([c.messages[:n] for n in counts], template.text, c.tools, **how)
        return texts

    def _render(self, messages: list[Any], template: str, tools: Any, **how: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, **how, **self._kwargs
            )
        except Exception as e:  # isolates a template: a program of the model folder, which may die of anything
            raise Mismatch("template", got=f"{type(e).__name__}: {e}",
                           expected="a conversation that the template accepts",
                           fix="change the conversation's turns to what the template takes") from e  # fmt: skip

    def _shown(self, ids: list[int], at: int) -> str:
        if at >= len(ids):
            return f"the end, after {len(ids)} tokens"
        return f"{ids[at]} {self._tokenizer.decode([ids[at]])!r}"


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _masked(ids: list[int], spans: Spans, template: Template) -> Rendered:
    mask = [0] * len(ids)
    for start, stop in spans:
        mask[start:stop] = [1] * (stop - start)
    return Rendered(input_ids=ids, loss_mask=mask, template_digest=template.digest)


def _check_reasoning(c: Conversation, template: Template, turns: list[int]) -> None:
    """Refuse turns to be trained on whose reasoning the template would leave out without a word (slime PR#330)."""
    if template.reasoning:
        return
    for i in turns:
        for key in REASONING_KEYS:
            if c.messages[i].get(key, "").strip():
                raise Mismatch(f"messages[{i}]: {key}", got="reasoning, which the template does not read",
                               expected="a template that writes it, or reasoning in the content",
                               fix="write it into the content as the target does (<think>...</think>), or remove the "
                               "key to train on the answer alone")  # fmt: skip
