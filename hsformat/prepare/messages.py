"""The forms in which a row spells a conversation, to messages as chat templates take them.

Known are ``messages`` of role and content, and ShareGPT's ``conversations`` of from and value (or of role and content),
each with an optional ``system`` prompt and ``tools`` beside it. Two things are changed as every engine changes them
before it renders: keys that are null are left out (Transformers 5 does so itself, and many templates print "None"), and
the arguments of a tool call that are JSON in a string, as OpenAI's interface has them, become the object (vLLM,
SGLang). This module may import ``problems``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hsformat.problems import Problem, problem

__all__ = ["REASONING_KEYS", "ROLES", "Found", "format_problem", "messages_of", "shown", "tools_of"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A ChatML template renders any other word without complaint, as a turn that the target never saw in training."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""One thing under the names that servers and templates have for it."""

_SPEAKERS = {
    "system": "system", "developer": "developer", "human": "user", "user": "user", "gpt": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Who speaks in ShareGPT; ``function_call`` is not here, since templates write calls in forms of their own."""


@dataclass(slots=True, kw_only=True)
class Found:
    """Messages, and what is wrong with them: (place in the row, got, expected)."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def messages_of(value: dict[str, Any], form: str) -> Found:
    """Return the messages of a row whose conversation stands under the key ``form``."""
    given, found = value[form], Found()
    if not isinstance(given, list) or not given:
        found.wrong.append((form, shown(given), "a list of at least one message"))
        return found
    for i, message in enumerate(given):
        at = f"{form}[{i}]"
        if not isinstance(message, dict):
            found.wrong.append((at, shown(message), "an object with role and content"))
        elif form == "conversations" and "from" in message:
            _add_spoken(message, at, found)
        else:
            _add(message, at, found)
    if (system := value.get("system")) is not None and not found.wrong:
        if not isinstance(system, str):
            found.wrong.append(("system", shown(system), "text"))
        elif found.messages[0]["role"] in ("system", "developer"):
            found.wrong.append(("system", shown(system), f"no other system prompt than that of {form}[0]"))
        elif system:
            found.messages.insert(0, {"role": "system", "content": system})
    return found


def tools_of(value: dict[str, Any], found: Found) -> list[dict[str, Any]] | None:
    """Return the tools of a row: a list of JSON schemas, or the text of one, as columns hold them."""
    tools = value.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = _parsed(tools)
    elif tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        found.wrong.append(("tools", shown(value["tools"]), "a list of JSON schemas"))
        return None
    return tools


def _add_spoken(message: dict[str, Any], at: str, found: Found) -> None:
    """Add one of ``{"from": ..., "value": ...}``."""
    if extra := {"role", "content"} & message.keys():
        found.wrong.append((at, f"from and {min(extra)}", "from and value, or role and content"))
        return
    speaker = message["from"]
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        found.wrong.append((f"{at}: from", shown(speaker), f"one of {', '.join(_SPEAKERS)}"))
        return
    rest = {k: v for k, v in message.items() if k not in ("from", "value")}
    _add({"role": role, "content": message.get("value")} | rest, at, found, content_key="value")


def _add(message: dict[str, Any], at: str, found: Found, *, content_key: str = "content") -> None:
    message = {k: v for k, v in message.items() if v is not None}
    if message.get("role") not in ROLES:
        found.wrong.append((f"{at}: role", shown(message.get("role")), f"one of {', '.join(ROLES)}"))
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        found.wrong.append((f"{at}: {content_key}", shown(content), "text"))
    if calls is not None:
        message["tool_calls"] = _calls(calls, f"{at}: tool_calls", found)
    for key in REASONING_KEYS:
        if not isinstance(message.get(key, ""), str):
            found.wrong.append((f"{at}: {key}", shown(message[key]), "text"))
    found.messages.append(message)


def _calls(calls: Any, at: str, found: Found) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        found.wrong.append((at, shown(calls), "a list of tool calls"))
        return []
    out = []
    for i, call in enumerate(calls):
        function = call.get("function", call)  # templates take {"name", "arguments"} with or without the outer object
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            found.wrong.append((f"{at}[{i}]", shown(call), "a function with a name and arguments"))
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict) and function.get("arguments") is not None:
            found.wrong.append((f"{at}[{i}]: arguments", shown(function["arguments"]), "a JSON object"))
            continue
        function = function | {"arguments": arguments or {}}
        out.append(call | {"function": function} if "function" in call else function)
    return out


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def format_problem(where: str, got: str, expected: str, *, record: str | None = None) -> Problem:
    """Return HS603 with the forms that are known."""
    return problem("HS603", where=where, got=got, expected=expected, record=record,
                   fix='give {"messages": [{"role": "user", "content": "..."}, ...]}, {"conversations": [{"from": '
                   '"human", "value": "..."}, ...]} or {"input_ids": [...], "loss_mask": [...]}')  # fmt: skip


def shown(value: Any) -> str:
    """Return a value for a problem, cut."""
    return "nothing" if value is None else repr(value)[:60]
