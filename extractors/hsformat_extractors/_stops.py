"""Which tokens end a turn, and which are special, from a target's files alone: no model, no torch, no Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsformat.problems import HsError, Problem, problem
from hsformat.target.jsonfiles import read_object

__all__ = ["end_of_turn_ids", "no_end_of_turn", "special_ids"]


def no_end_of_turn(folder: Path) -> Problem:
    """Return what is wrong with a target that names no token which ends a turn."""
    return problem(
        "HS410",
        where=f"{folder}: eos_token_id",
        got="none in generation_config.json, config.json or the tokenizer",
        expected="at least one id that ends a turn",
        fix="add eos_token_id to generation_config.json",
    )


def end_of_turn_ids(folder: Path) -> list[int]:
    """Return all ids that end a turn: of the generation config, the config and the tokenizer.

    Raises
    ------
    HsError
        HS410: there are none, so that an answer would never end. HS602: a file cannot be read.
    """
    config = _object(folder / "config.json")
    text = config.get("text_config")
    named = [
        _object(folder / "generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
        text.get("eos_token_id") if isinstance(text, dict) else None,
    ]
    ids = {i for value in named for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    ids |= set(_of_tokenizer(folder))
    if not ids:
        raise HsError(no_end_of_turn(folder))
    return sorted(ids)


def special_ids(folder: Path) -> list[int]:
    """Return the ids of added tokens, some of which may stand for an image or a tool; empty: none are known.

    Raises
    ------
    ForeignFileError
        HS602: a file cannot be read.
    """
    return sorted(set(_added(folder).values()))


def _of_tokenizer(folder: Path) -> Iterator[int]:
    """Yield the id of the tokenizer's ``eos_token``."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            for vocabulary in (_added(folder), _vocabulary(folder)):
                if type(found := vocabulary.get(token)) is int:
                    yield found
                    return


def _added(folder: Path) -> dict[str, int]:
    out: dict[str, int] = {}
    listed = _object(folder / "tokenizer.json").get("added_tokens")
    for token in listed if isinstance(listed, list) else []:
        match token:
            case {"content": str(content), "id": int(number)}:
                out[content] = number
    decoder = _object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        match token:
            case {"content": str(content)} if number.isdigit():
                out.setdefault(content, int(number))
    return out


def _vocabulary(folder: Path) -> dict[str, Any]:
    model = _object(folder / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return vocabulary
    return _object(folder / "vocab.json")


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}
