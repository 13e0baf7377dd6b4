"""Whose embedding and head a draft uses when it is served; whether a trained one is lost. May import ``weights``."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hsformat.engines.drafts import ABSENT, Draft
from hsformat.engines.filled import Attribute, attribute
from hsformat.engines.rows import DraftRow
from hsformat.engines.sizes import DraftSizes
from hsformat.engines.targets import TargetFacts
from hsformat.engines.weights import EMBEDDING, HEAD, find_weight
from hsformat.problems import ForeignFileError, Problem, Severity, problem
from hsformat.target.checkpoint import TensorInfo, read_checkpoint, read_rows
from hsformat.target.keytensors import ALIASES, Role

__all__ = ["Owner", "check_sizes", "embedding_of", "head_of"]

Owner = Literal["draft", "target", "unknown"]

_BLOCK = 1 << 24
"""Numbers that are compared at a time."""


def check_sizes(draft: Draft, sizes: DraftSizes, target: TargetFacts) -> list[Problem]:
    """Return HS409 if the captures' width, as the draft states it, is not the target's."""
    if sizes.target_hidden_size == target.hidden_size:
        return []
    stated = draft.config.get("target_hidden_size") is not None
    key = "target_hidden_size" if stated else f"{draft.decoder_prefix}hidden_size"
    got = f"{sizes.target_hidden_size}" + ("" if stated else ", which stands for the target's where none is stated")
    fix = "the draft is of another target" + ("" if stated else ", or target_hidden_size is missing in its config")
    return [problem("HS409", where=draft.at(key), got=got, expected=f"{target.hidden_size}, as the target's", fix=fix)]


def embedding_of(
    draft: Draft, sizes: DraftSizes, row: DraftRow, target: TargetFacts, title: str, problems: list[Problem]
) -> Owner:
    """Return whose embedding is used; HS409, HS411 and HS412 are added to ``problems``.

    ``unknown``: the draft's where its folder has one, and its weights cannot be read.
    """
    own = find_weight(draft, row, EMBEDDING)
    width, rows = sizes.hidden_size, sizes.vocab_size
    where = f"{draft.where}: {own or EMBEDDING}"
    if own is not None and (shape := (draft.shapes or {})[own]) != (rows, width):
        code = "HS409" if len(shape) == 2 and shape[1] != width else "HS411"
        problems.append(problem(code, where=where, got=list(shape), expected=[rows, width]))
        return "draft"
    keeps = row.embedding == "own" or (
        row.embedding == "own_if_other_width"
        and draft.config.get("target_hidden_size") is not None
        and sizes.target_hidden_size != width
    )
    if _takes_both(draft, sizes, row):
        keeps = False
    if keeps and own is not None:
        return "draft"
    if keeps and draft.shapes is None:
        return "unknown"
    if width != target.hidden_size:
        if draft.shapes is not None and own is None:
            fix = "export the draft's embedding with it"
            got = f"no weight, and the target's embedding is {target.hidden_size} wide"
            problems.append(problem("HS411", where=where, got=got, expected=[rows, width], fix=fix))
        elif own is not None:
            fix = (
                f"write draft_vocab_size: {sizes.vocab_size}, so that the draft's own embedding and head are kept"
                if _takes_both(draft, sizes, row)
                else "state target_hidden_size in the draft's config, so that its own embedding is kept"
            )
            got = f"{title} replaces it by the target's, which is {target.hidden_size} wide"
            problems.append(problem("HS409", where=where, got=got, expected=f"a width of {width}", fix=fix))
    elif own is not None:
        problems += _lost(draft, own, target, "embedding", title, "freeze the embedding when training")
    return "target"


def head_of(
    draft: Draft, sizes: DraftSizes, row: DraftRow, target: TargetFacts, size: int, title: str, problems: list[Problem]
) -> Owner:
    """Return whose head is used; HS409, HS411 and HS412 are added to ``problems``. ``size``: the draft's vocabulary."""
    own = find_weight(draft, row, HEAD)
    where = f"{draft.where}: {own or HEAD}"
    tied = _tied(draft, row, problems)
    if tied.value is True and (row.tied_head == "embedding" or own is None):
        what = "the embedding, which it takes from the target," if row.tied_head == "embedding" else "the target's head"
        stated = "is true" if tied.owner is None else f"is not stated: {tied.owner}'s true"
        got = f"tie_word_embeddings {stated}: {title} uses {what} as the draft's head"
        fix = "write tie_word_embeddings: false and export lm_head"
        expected = "tie_word_embeddings: false"
        problems.append(problem("HS412", where=draft.at("tie_word_embeddings"), got=got, expected=expected, fix=fix))
        return "target"
    null = row.head == "own_unless_no_draft_vocab" and sizes.draft_vocab_size is None
    if draft.shapes is None and not null:
        return "unknown"
    if own is None or null:
        if own is not None:
            fix = f"write draft_vocab_size: {size}"
            problems += _lost(draft, own, target, "lm_head", title, fix)
        elif draft.shapes is not None and (
            size != target.vocab_size or sizes.hidden_size != target.hidden_size or _needs_own(row, sizes)
        ):
            expected = f"lm_head.weight [{size}, {sizes.hidden_size}]"
            fix = "export lm_head with the draft: the target's does not fit, or is not taken"
            problems.append(problem("HS411", where=where, got="no such weight", expected=expected, fix=fix))
        return "target"
    shape = (draft.shapes or {})[own]
    if shape != (size, sizes.hidden_size):
        code = "HS409" if len(shape) == 2 and shape[1] != sizes.hidden_size else "HS411"
        fix = "export head, draft_vocab_size and vocabulary map together"
        problems.append(problem(code, where=where, got=list(shape), expected=[size, sizes.hidden_size], fix=fix))
    return "draft"


def _tied(draft: Draft, row: DraftRow, problems: list[Problem]) -> Attribute:
    """Return ``tie_word_embeddings`` as the engine sees it; HS603 if it is neither true nor false."""
    found = attribute(draft, "tie_word_embeddings", row)
    if found.value is not ABSENT and not isinstance(found.value, bool):
        where, fix = draft.at(f"{draft.decoder_prefix}tie_word_embeddings"), "write false: config classes refuse it"
        got = "null" if found.value is None else repr(found.value)[:100]
        problems.append(problem("HS603", where=where, got=got, expected="true or false", fix=fix))
    return found


def _takes_both(draft: Draft, sizes: DraftSizes, row: DraftRow) -> bool:
    """Return whether embedding and head are both the target's, whatever their width, for want of a draft vocabulary."""
    null = row.head == "own_unless_no_draft_vocab" and sizes.draft_vocab_size is None
    tied = row.tied_head == "embedding" and attribute(draft, "tie_word_embeddings", row).value is True
    return null and not tied


def _needs_own(row: DraftRow, sizes: DraftSizes) -> bool:
    return row.head == "own_unless_no_draft_vocab" and sizes.draft_vocab_size is not None


def _lost(draft: Draft, name: str, target: TargetFacts, role: Role, title: str, fix: str) -> list[Problem]:
    """Return HS412 if a weight that is replaced by the target's differs from it, or (warning) cannot be compared."""
    where, expected = f"{draft.where}: {name}", f"the target's {role}, which {title} puts in its place"
    theirs = _target_tensor(target, role)
    own = draft.tensors.get(name)
    if theirs is None or own is None or own.numpy_dtype is None or theirs.numpy_dtype is None:
        got = "a weight that could not be compared with the target's"
        fix = "give the target's folder with its weights; if it was trained, it is lost"
        severity = Severity.WARNING
        return [problem("HS412", where=where, got=got, expected=expected, fix=fix, severity=severity)]
    if _same(own, theirs):
        return []
    return [problem("HS412", where=where, got="a weight that differs from it", expected=expected, fix=fix)]


def _target_tensor(target: TargetFacts, role: Role) -> TensorInfo | None:
    if target.folder is None:
        return None
    try:
        tensors = read_checkpoint(target.folder).tensors
    except ForeignFileError:
        return None
    found = [tensors[name] for name in ALIASES[role] if name in tensors]
    return found[0] if len(found) == 1 else None


def _same(own: TensorInfo, theirs: TensorInfo) -> bool:
    """Return whether two matrices hold the same numbers, the target's rounded to the draft's dtype.

    A target may have more rows than its vocabulary: those are not compared.
    """
    if len(theirs.shape) != 2 or own.shape[1] != theirs.shape[1] or own.shape[0] > theirs.shape[0]:
        return False
    step = max(1, _BLOCK // own.shape[1])
    for start in range(0, own.shape[0], step):
        stop = min(start + step, own.shape[0])
        x = read_rows(own, start, stop)
        if not np.array_equal(x, read_rows(theirs, start, stop).astype(x.dtype)):
            return False
    return True
