"""From a file to token samples: the one place that counts, drops and truncates.

Streaming: memory does not grow with the file but for two 16-byte digests a row (or turn), by which copies and
conflicting ids are found. This module may import ``problems``, ``record`` and the other modules of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hsformat.checks import token_range_problem
from hsformat.prepare.conversation import Conversation, TokenRow, check_id, parse_row
from hsformat.prepare.render import Rendered, Renderer
from hsformat.prepare.rows import Row, read_rows
from hsformat.prepare.summary import Summary
from hsformat.prepare.tokenizer import ChatTokenizer
from hsformat.problems import HsError, Problem, problem
from hsformat.record import Provenance, TokenSample

__all__ = ["Preparation", "prepare"]

_Outcome = TokenSample | list[Problem] | str
"""A sample, why a row was refused, or the reason why it was dropped."""


def prepare(
    path: str | Path,
    tokenizer: ChatTokenizer,
    *,
    vocab_size: int,
    max_length: int | None,
    for_generation: bool,
    reserve: int = 0,
    explode_turns: bool = False,
    template_kwargs: dict[str, Any] | None = None,
) -> Preparation:
    """Return the samples of a file or a dataset on disk, to be iterated; nothing is read but its beginning.

    Parameters
    ----------
    path
        Of a kind that ``rows`` lists; rows of ``messages`` or ``conversations``, or of ``input_ids`` and ``loss_mask``.
    tokenizer
        The target's own (:func:`hsformat.prepare.tokenizer.load_tokenizer`).
    vocab_size
        Of the target; ids are below it.
    max_length
        Ids and mask are cut to so many tokens together. None: never cut.
    for_generation
        Samples are prompts, up to the last user or tool turn with the generation prompt, mask all 0. A prompt longer
        than ``max_length - reserve`` is dropped, not cut.
    reserve
        Room for tokens to be generated.
    explode_turns
        One sample an assistant turn, as it is served: what the template renders for the turns before it and the
        generation prompt, then the turn, which alone is supervised. Its id is ``<id>#<n>``, n counted from 0. Turns
        after the last assistant turn are left out, or are the last prompt for generation. Rows of token ids, in which
        turns cannot be told apart, stay as they are.
    template_kwargs
        Variables for the chat template, such as ``{"enable_thinking": False}``; JSON values.

    Raises
    ------
    ForeignFileError
        HS602, HS603: the file cannot be read at all.
    HsError
        HS410: pyarrow is needed and missing. HS303: a template argument that is none. HS102: ``max_length`` leaves no
        room.
    """
    if max_length is not None and (max_length <= 0 or (for_generation and max_length <= reserve)):
        raise HsError(problem("HS102", where="max_length", got=f"{max_length}, of which {reserve} are reserved",
                              expected="room for a token", fix="raise the maximum length"))  # fmt: skip
    read_rows(path)
    return Preparation(
        path=Path(path),
        renderer=Renderer(tokenizer, template_kwargs=template_kwargs or {}),
        vocab_size=vocab_size,
        max_length=max_length,
        for_generation=for_generation,
        reserve=reserve,
        explode_turns=explode_turns,
        template_kwargs=template_kwargs or {},
    )


class Preparation:
    """The samples of a file. Each iteration reads it anew, with a new :attr:`summary`.

    Attributes
    ----------
    summary
        Of the iteration begun last, kept up to date as it goes.
    """

    def __init__(
        self,
        *,
        path: Path,
        renderer: Renderer,
        vocab_size: int,
        max_length: int | None,
        for_generation: bool,
        reserve: int,
        explode_turns: bool,
        template_kwargs: dict[str, Any],
    ) -> None:
        self._path = path
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._for_generation = for_generation
        self._reserve = reserve
        self._explode_turns = explode_turns
        self._template_kwargs = template_kwargs
        self._provenances: dict[str | None, Provenance] = {}
        self.summary = Summary(source=str(path), for_generation=for_generation)

    def __iter__(self) -> Iterator[TokenSample]:
        summary = self.summary = Summary(source=str(self._path), for_generation=self._for_generation)
        contents: dict[bytes, bytes] = {}
        for row in read_rows(self._path):
            summary.rows += 1
            summary.more_turns -= 1
            for outcome in self._outcomes(row, contents, summary):
                summary.more_turns += 1
                match outcome:
                    case TokenSample() as sample:
                        summary.samples += 1
                        summary.tokens += len(sample)
                        summary.supervised += int(sample.loss_mask.sum())
                        yield sample
                    case str() as reason:
                        summary.dropped[reason] += 1
                    case problems:
                        summary.reject(problems)

    def _outcomes(self, row: Row | Problem, contents: dict[bytes, bytes], summary: Summary) -> Iterator[_Outcome]:
        """Yield what a row gives: one outcome, or with ``explode_turns`` one an assistant turn."""
        item = [row] if isinstance(row, Problem) else parse_row(row)
        if isinstance(item, list):
            yield item
            return
        summary.ignore(item.ignored)
        explode = self._explode_turns and isinstance(item, Conversation)
        if (known := _known(item, contents, key=f"{item.id}#" if explode else item.id)) is not None:
            yield known
        elif isinstance(item, TokenRow):
            yield self._token_prompt(item, summary) if self._for_generation else self._training(item, item, summary)
        elif explode:
            yield from self._turns(item, contents, summary)
        else:
            yield self._prompt(item, summary) if self._for_generation else self._conversation(item, summary)

    def _turns(self, item: Conversation, contents: dict[bytes, bytes], summary: Summary) -> Iterator[_Outcome]:
        roles = [m["role"] for m in item.messages]
        ends = [i for i, role in enumerate(roles) if role == "assistant"]
        if self._for_generation:
            ends = [i for i in range(1, len(roles) + 1)
                    if roles[i - 1] in ("user", "tool") and roles[i : i + 1] in ([], ["assistant"])]  # fmt: skip
        if not ends:
            yield "no-user-turn" if self._for_generation else "no-assistant-turn"
        for n, i in enumerate(ends):
            turn = replace(item, id=f"{item.id}#{n}", content=item.content[:12] + n.to_bytes(4, "big"),
                           messages=item.messages[: i + 1])  # fmt: skip
            if problems := list(check_id(turn.id, f"{item.where}: id of turn {n}")):
                yield problems
            elif (known := _known(turn, contents, key=turn.id)) is not None:
                yield known
            elif self._for_generation:
                yield self._prompt(turn, summary)
            else:
                rendered = self._renderer.turn(turn)
                yield [rendered] if isinstance(rendered, Problem) else self._training(turn, rendered, summary)

    def _conversation(self, item: Conversation, summary: Summary) -> _Outcome:
        if all(m["role"] != "assistant" for m in item.messages):
            return "no-assistant-turn"
        rendered = self._renderer.conversation(item)
        return [rendered] if isinstance(rendered, Problem) else self._training(item, rendered, summary)

    def _prompt(self, item: Conversation, summary: Summary) -> _Outcome:
        last = max((i for i, m in enumerate(item.messages) if m["role"] in ("user", "tool")), default=None)
        if last is None:
            return "no-user-turn"
        replaced = any(m["role"] == "assistant" for m in item.messages[last + 1 :])
        rendered = self._renderer.prompt(replace(item, messages=item.messages[: last + 1]))
        return (
            [rendered]
            if isinstance(rendered, Problem)
            else self._generation(item, rendered, summary, replaced=replaced)
        )

    def _token_prompt(self, item: TokenRow, summary: Summary) -> _Outcome:
        """Take away a supervised run at the end: the answer, which the target will write."""
        stop = len(item.loss_mask)
        while stop and item.loss_mask[stop - 1]:
            stop -= 1
        if any(item.loss_mask[:stop]) and stop == len(item.loss_mask):
            return [
                problem("HS104", where=f"{item.where}: loss_mask", got="unsupervised tokens after the last answer",
                        expected="a prompt (mask all 0), or an answer at the end", record=item.id,
                        fix="cut ids and mask to the prompt: whether these tokens are one cannot be told"),
            ]  # fmt: skip
        prompt = replace(item, input_ids=item.input_ids[:stop], loss_mask=[0] * stop)
        return self._generation(item, prompt, summary, replaced=stop < len(item.loss_mask)) if stop else "no-user-turn"

    def _training(self, item: Conversation | TokenRow, made: Rendered | TokenRow, summary: Summary) -> _Outcome:
        sample = self._sample(item, made)
        if isinstance(sample, list):
            return sample
        if not sample.loss_mask.any():
            return "no-supervision"
        if self._max_length is None or len(sample) <= self._max_length:
            return sample
        n = self._max_length
        sample = replace(sample, input_ids=sample.input_ids[:n].copy(), loss_mask=sample.loss_mask[:n].copy())
        if not sample.loss_mask.any():  # only now: truncation may take the one answer away (trl PR#6025)
            return "no-supervision-after-truncation"
        summary.truncated += 1
        return sample

    def _generation(
        self, item: Conversation | TokenRow, made: Rendered | TokenRow, summary: Summary, *, replaced: bool
    ) -> _Outcome:
        if self._max_length is not None and len(made.input_ids) > self._max_length - self._reserve:
            return "prompt-too-long"
        sample = self._sample(item, made)
        if replaced and isinstance(sample, TokenSample):
            summary.answers_replaced += 1
        return sample

    def _provenance(self, template: str | None) -> Provenance:
        if template not in self._provenances:
            kwargs = {} if template is None else self._template_kwargs
            self._provenances[template] = Provenance(template_digest=template, template_kwargs=kwargs)
        return self._provenances[template]

    def _sample(self, item: Conversation | TokenRow, made: Rendered | TokenRow) -> TokenSample | list[Problem]:
        ids, size = made.input_ids, self._vocab_size
        if not ids:
            return [problem("HS102", where=item.where, got="0 tokens", expected="at least 1", record=item.id)]
        if min(ids) < 0 or max(ids) >= size:
            found = token_range_problem(ids, size, where=f"{item.where}: input_ids", record=item.id)
            return [] if found is None else [found]
        provenance = self._provenance(made.template_digest if isinstance(made, Rendered) else None)
        return TokenSample(
            id=item.id,
            input_ids=np.array(ids, np.int32),
            loss_mask=np.array(made.loss_mask, np.uint8),
            provenance=provenance,
        )


def _known(item: Conversation | TokenRow, contents: dict[bytes, bytes], *, key: str) -> _Outcome | None:
    """Return why an item of a key met before is left out; otherwise remember it."""
    digest = hashlib.sha256(key.encode()).digest()[:16]
    if digest not in contents:
        contents[digest] = item.content
        return None
    if contents[digest] == item.content:
        return "duplicate"
    return [problem("HS107", where=item.where, got="other content than an earlier row of this id",
                    expected="one row an id", record=item.id)]  # fmt: skip
