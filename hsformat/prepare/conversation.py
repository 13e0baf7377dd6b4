"""A row's meaning: a conversation, or token ids with their mask. Nothing is guessed and nothing is cut to fit.

Another input format becomes another function from its rows to :class:`Conversation`; nothing after it changes. This
module may import ``problems``, ``digests`` and ``rows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hsformat.digests import digest_json
from hsformat.prepare.rows import Row
from hsformat.problems import Problem, problem

__all__ = ["Conversation", "TokenRow", "parse_row"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A ChatML template renders any other word without complaint, as a turn that the target never saw in training."""

_IDS = ("id", "conversation_id")
_MEANING = ("messages", "tools", "input_ids", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to render.

    Attributes
    ----------
    id
        The row's ``id``, else its ``conversation_id``, else ``c-`` and 16 hexadecimal digits of its content's digest.
    where
        Its place, for problems.
    content
        Digest of what the row means, 16 bytes: rows of one id with one content are copies.
    ignored
        Keys of the row that mean nothing here.
    messages, tools
        As chat templates take them; further keys of a message are the template's business.
    """

    id: str
    where: str
    content: bytes
    ignored: tuple[str, ...]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Token ids and mask as a row gives them: of one length, at least 1, the mask of 0 and 1."""

    id: str
    where: str
    content: bytes
    ignored: tuple[str, ...]
    input_ids: list[int]
    loss_mask: list[int]


def parse_row(row: Row) -> Conversation | TokenRow | list[Problem]:
    """Return what a row means, or every reason why that cannot be told (HS1xx, HS602, HS603)."""
    value, where = row.value, row.where
    has_messages = value.get("messages") is not None
    has_ids = any(value.get(k) is not None for k in ("input_ids", "loss_mask"))
    if has_messages == has_ids:
        return [_format(where, f"keys {sorted(value)[:20]}", "either messages, or input_ids and loss_mask")]
    try:
        digest = digest_json({k: value[k] for k in _MEANING if value.get(k) is not None})
    except ValueError as e:
        return [problem("HS602", where=where, got=str(e), expected="numbers that JSON keeps exactly",
                        fix="write such numbers as text")]  # fmt: skip
    given = next((value[k] for k in _IDS if value.get(k) is not None), None)
    rid = f"c-{digest[7:23]}" if given is None else str(given)
    problems = [] if given is None else list(_check_id(given, where))
    where = f"{where}: {'conversation' if has_messages else 'record'} {rid[:80]!r}"
    problems += _check_conversation(value, where, rid) if has_messages else _check_tokens(value, where, rid)
    if problems:
        return problems
    content = bytes.fromhex(digest[7:39])
    ignored = tuple(k for k in value if k not in _MEANING and k not in _IDS)
    if has_messages:
        return Conversation(id=rid, where=where, content=content, ignored=ignored, messages=value["messages"],
                            tools=value.get("tools") or None)  # fmt: skip
    return TokenRow(id=rid, where=where, content=content, ignored=ignored, input_ids=value["input_ids"],
                    loss_mask=value["loss_mask"])  # fmt: skip


def _check_id(given: Any, where: str) -> Iterator[Problem]:
    if (isinstance(given, str) and 0 < len(given.encode()) <= 1024) or type(given) is int:
        return
    yield problem("HS107", where=f"{where}: id", got=repr(given)[:80],
                  expected="text of 1 to 1024 bytes, or an integer",
                  fix="give each row a short id of its own, or none")  # fmt: skip


def _check_conversation(value: dict[str, Any], where: str, rid: str) -> Iterator[Problem]:
    messages, tools = value["messages"], value.get("tools")
    if not isinstance(messages, list) or not messages:
        yield _format(f"{where}: messages", _shown(messages), "a list of at least one message", record=rid)
        return
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        yield _format(f"{where}: tools", _shown(tools), "a list of JSON schemas", record=rid)
    for i, message in enumerate(messages):
        at = f"{where}: messages[{i}]"
        if not isinstance(message, dict):
            yield _format(at, _shown(message), "an object with role and content", record=rid)
            continue
        if message.get("role") not in ROLES:
            yield _format(f"{at}: role", _shown(message.get("role")), f"one of {', '.join(ROLES)}", record=rid)
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            yield _format(f"{at}: content", _shown(content), "text", record=rid)


def _check_tokens(value: dict[str, Any], where: str, rid: str) -> Iterator[Problem]:
    for name in ("input_ids", "loss_mask"):
        if not isinstance(value.get(name), list):
            yield _format(f"{where}: {name}", _shown(value.get(name)), "a list of integers", record=rid)
            return
    ids, mask = value["input_ids"], value["loss_mask"]
    if not ids:
        yield problem("HS102", where=f"{where}: input_ids", got="0 tokens", expected="at least 1", record=rid)
    if len(mask) != len(ids):
        yield problem("HS101", where=f"{where}: loss_mask", got=f"{len(mask)} mask values",
                      expected=f"{len(ids)}, the number of input_ids", record=rid,
                      fix="cut ids and mask together where the ids were cut; a mask is never cut to fit")  # fmt: skip
    bad = next((i for i, x in enumerate(ids) if type(x) is not int), None)
    if bad is not None:
        yield problem("HS105", where=f"{where}: input_ids[{bad}]", got=_shown(ids[bad]), expected="an integer",
                      fix="give token ids as integers", record=rid)  # fmt: skip
    bad = next((i for i, x in enumerate(mask) if type(x) not in (int, bool) or x not in (0, 1)), None)
    if bad is not None:
        yield problem("HS104", where=f"{where}: loss_mask[{bad}]", got=_shown(mask[bad]), expected="0 or 1", record=rid)


def _format(where: str, got: str, expected: str, *, record: str | None = None) -> Problem:
    return problem("HS603", where=where, got=got, expected=expected, record=record,
                   fix='give {"messages": [{"role": "user", "content": "..."}, ...]} or {"input_ids": [...], '
                   '"loss_mask": [...]}')  # fmt: skip


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]
