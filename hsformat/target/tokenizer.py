"""Digests of what turns text into ids: the tokenizer and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hsformat.digests import canonical_json, digest_bytes
from hsformat.problems import ForeignFileError, problem
from hsformat.target.jsonfiles import corrupt, read_bytes, read_object, read_text

__all__ = ["chat_template", "tokenizer_digest"]

_RUNTIME = ("truncation", "padding", "version")
"""Set by a caller or by the library's version; they do not change which ids a text has."""


def tokenizer_digest(folder: Path) -> str:
    """Return the digest of a tokenizer: the first of these that the folder has.

    1. ``tokenizer.json``: canonical JSON without ``truncation``, ``padding`` and ``version``. In ``model``, merges
       written as ``"a b"`` count as ``["a", "b"]`` (tokenizers 0.20 changed the form), and null or false entries as
       absent (later versions write them out).
    2. ``tokenizer.model``: its bytes.
    3. ``vocab.json`` and ``merges.txt``: canonical JSON of the first, a zero byte, the bytes of the second.

    Raises
    ------
    ForeignFileError
        HS602: no tokenizer, or a broken one.
    """
    if (path := folder / "tokenizer.json").exists():
        return digest_bytes((_canonical(path, _semantic(read_object(path))),))
    if (path := folder / "tokenizer.model").exists():
        return digest_bytes((read_bytes(path),))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.exists() and merges.exists():
        return digest_bytes((_canonical(vocab, read_object(vocab)), b"\0", read_bytes(merges)))
    raise corrupt(
        str(folder), "no tokenizer", "tokenizer.json, tokenizer.model, or vocab.json and merges.txt",
        "put the tokenizer's files beside the weights",
    )  # fmt: skip


def chat_template(folder: Path) -> str | None:
    """Return the chat template's text; None: there is none.

    Looked for in ``chat_template.jinja``, then ``tokenizer_config.json``, then ``chat_template.json``, as Transformers
    does; of a list of named templates, the one named ``default``.

    Raises
    ------
    ForeignFileError
        HS602: a broken file. HS603: named templates without a default.
    """
    if (path := folder / "chat_template.jinja").exists():
        return read_text(path)
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        if path.exists() and (value := read_object(path).get("chat_template")) is not None:
            text = _template(value, f"{path}: chat_template")
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise corrupt(f"{path}: chat_template", "a lone surrogate", "text that UTF-8 can write")
            return text
    return None


def _template(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(text)}:
                named[name] = text
            case _:
                raise corrupt(where, json.dumps(entry)[:200], "a string, or a list of objects with name and template")
    if "default" not in named:
        got = f"templates named {', '.join(named) or 'nothing'}"
        fix = "write the template that is meant to chat_template.jinja"
        raise ForeignFileError(problem("HS603", where=where, got=got, expected="one named default", fix=fix))
    return named["default"]


def _semantic(tokenizer: dict[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in tokenizer.items() if k not in _RUNTIME}
    if isinstance(model := out.get("model"), dict):
        out["model"] = model = {k: v for k, v in model.items() if v is not None and v is not False}
        if isinstance(merges := model.get("merges"), list):
            model["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
    return out


def _canonical(path: Path, value: Any) -> bytes:
    try:
        return canonical_json(value)
    except ValueError as e:
        raise corrupt(str(path), e, "text and numbers that canonical JSON (RFC 8785) can write") from e
