"""A row's meaning: a conversation, or token ids with their mask. Nothing is guessed and nothing is cut to fit.

Another input format becomes another function to messages (``messages``); nothing after it changes. This module may
import ``problems``, ``digests``, ``row`` and ``messages``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hsformat.checks import MAX_ID_BYTES
from hsformat.digests import digest_json
from hsformat.prepare.messages import Found, format_problem, messages_of, shown, tools_of
from hsformat.prepare.row import ID_KEYS, MEANING_KEYS, Row
from hsformat.problems import Problem, problem

__all__ = ["Conversation", "TokenRow", "check_id", "parse_row"]


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
        As chat templates take them, whatever form the row had; further keys of a message are the template's business.
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
    """Return what a row means, or every reason why that cannot be told (HS1xx, HS602, HS603).

    Rows of one meaning have one derived id and one content digest, in whatever form they come.
    """
    value, where = row.value, row.where
    forms = [k for k in ("messages", "conversations") if value.get(k) is not None]
    has_ids = any(value.get(k) is not None for k in ("input_ids", "loss_mask"))
    if len(forms) + has_ids != 1:
        return [format_problem(where, f"keys {sorted(value)[:20]}",
                               "one of messages, conversations, or input_ids and loss_mask")]  # fmt: skip
    found = messages_of(value, forms[0]) if forms else Found()
    meaning = {k: value[k] for k in ("input_ids", "loss_mask") if value.get(k) is not None}
    if forms:
        tools = tools_of(value, found)
        meaning = {"messages": found.messages} | ({} if tools is None else {"tools": tools})
    try:
        digest = "" if found.wrong else digest_json(meaning)
    except UnicodeError:
        return [problem("HS602", where=where, got="a lone surrogate (half a character)",
                        expected="text that UTF-8 can hold", fix="repair the escape")]  # fmt: skip
    except (ValueError, RecursionError) as e:
        return [problem("HS602", where=where, got=str(e), expected="numbers that JSON keeps exactly",
                        fix="write such numbers as text")]  # fmt: skip
    given = next((value[k] for k in ID_KEYS if value.get(k) is not None), None)
    rid = f"c-{digest[7:23]}" if given is None else str(given)
    problems = [] if given is None else list(check_id(given, f"{where}: id"))
    if given is not None or digest:
        where = f"{where}: {'conversation' if forms else 'record'} {rid[:80]!r}"
    record = None if given is None and found.wrong else rid
    problems += [format_problem(f"{where}: {at}", got, expected, record=record) for at, got, expected in found.wrong]
    if not forms:
        problems += _check_tokens(value, where, rid)
    if problems:
        return problems
    content = bytes.fromhex(digest[7:39])
    known = MEANING_KEYS if forms else ("input_ids", "loss_mask")
    ignored = tuple(k for k in value if k not in known and k not in ID_KEYS)
    if forms:
        return Conversation(id=rid, where=where, content=content, ignored=ignored, messages=found.messages,
                            tools=meaning.get("tools") or None)  # fmt: skip
    return TokenRow(id=rid, where=where, content=content, ignored=ignored, input_ids=value["input_ids"],
                    loss_mask=value["loss_mask"])  # fmt: skip


def check_id(given: Any, where: str) -> Iterator[Problem]:
    """Yield HS107 for an id that no record can have."""
    if (isinstance(given, str) and 0 < len(given.encode()) <= MAX_ID_BYTES) or type(given) is int:
        return
    got = f"{repr(given)[:80]}, {len(given.encode()):,} bytes" if isinstance(given, str) else repr(given)[:80]
    yield problem("HS107", where=where, got=got,
                  expected=f"text of 1 to {MAX_ID_BYTES} bytes, or an integer",
                  fix="give each row a short id of its own, or none")  # fmt: skip


def _check_tokens(value: dict[str, Any], where: str, rid: str) -> Iterator[Problem]:
    for name in ("input_ids", "loss_mask"):
        if not isinstance(value.get(name), list):
            yield format_problem(f"{where}: {name}", shown(value.get(name)), "a list of integers", record=rid)
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
        yield problem("HS105", where=f"{where}: input_ids[{bad}]", got=shown(ids[bad]), expected="an integer",
                      fix="give token ids as integers", record=rid)  # fmt: skip
    bad = next((i for i, x in enumerate(mask) if type(x) not in (int, bool) or x not in (0, 1)), None)
    if bad is not None:
        yield problem("HS104", where=f"{where}: loss_mask[{bad}]", got=shown(mask[bad]), expected="0 or 1", record=rid)
