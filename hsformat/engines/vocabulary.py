"""The draft's vocabulary: its size, and the map from its ids to the target's. May import ``sizes``.

``d2t`` holds offsets: draft id i stands for target id ``i + d2t[i]``. A map of absolute ids, one of the wrong size and
a missing one draft other tokens than meant, or crash; ``t2d`` says which ids are in the draft's vocabulary, and so
tells an absolute map from an offset map beyond doubt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsformat.digests import digest_bytes
from hsformat.engines.drafts import Draft
from hsformat.engines.rows import DraftRow
from hsformat.engines.sizes import DraftSizes
from hsformat.engines.targets import TargetFacts
from hsformat.problems import Problem, problem

__all__ = ["DraftVocabulary", "check_map", "read_vocabulary", "vocabulary_digest"]


class DraftVocabulary(NamedTuple):
    """Rows of the draft's head, and the digest of the target ids that they stand for.

    None: the target's own. ``unknown``: the map cannot be read, which was reported.
    """

    size: int
    map_digest: str | None


def read_vocabulary(
    draft: Draft, sizes: DraftSizes, row: DraftRow, target: TargetFacts, title: str, problems: list[Problem]
) -> DraftVocabulary:
    """Return the draft's vocabulary; HS408 is added to ``problems``."""
    total = target.vocab_size
    if sizes.vocab_size != total:
        where = draft.at(f"{draft.decoder_prefix}vocab_size")
        fix = "it is the size of the target's vocabulary, also of a draft with fewer ids (draft_vocab_size)"
        expected = f"{total}, as the target's"
        problems.append(problem("HS408", where=where, got=sizes.vocab_size, expected=expected, fix=fix))
    size = sizes.draft_vocab_size
    if size is None:
        if "draft_vocab_size" not in draft.config and row.loads.no_draft_vocab == "fails":
            fix = f"write draft_vocab_size: {total} for a head of the target's vocabulary"
            where = draft.at("draft_vocab_size")
            expected = f"a number, or null for the target's own head: {title} fails to load the draft otherwise"
            problems.append(problem("HS408", where=where, got="no such field", expected=expected, fix=fix))
        size = total
    if size > total:
        where = draft.at("draft_vocab_size")
        problems.append(problem("HS408", where=where, got=size, expected=f"at most {total}, as the target"))
        return DraftVocabulary(size, "unknown")
    if size == total:
        return DraftVocabulary(size, _full(draft, row, size, title, problems))
    named = _map_names(draft, row, title, problems)
    if draft.d2t is None or (draft.shapes is not None and not named):
        if draft.shapes is not None and not any("d2t" in name for name in draft.shapes):
            fix = "export d2t with the draft: without it an engine takes the first ids of the target's vocabulary"
            got = f"no d2t, and a draft vocabulary of {size} of {total} ids"
            expected = f"d2t, int64 [{size}]"
            problems.append(problem("HS408", where=f"{draft.where}: d2t", got=got, expected=expected, fix=fix))
        unread = draft.shapes is None or bool(named)
        return DraftVocabulary(size, "unknown" if unread else vocabulary_digest(np.zeros(size, np.int64)))
    problems += check_map(draft.d2t, draft.t2d, size=size, total=total, where=draft.where)
    return DraftVocabulary(size, vocabulary_digest(draft.d2t))


def check_map(
    d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_] | None, *, size: int, total: int, where: str
) -> list[Problem]:
    """Return what is wrong with a vocabulary map (HS408).

    Parameters
    ----------
    d2t
        Offsets, [size].
    t2d
        Whether a target id is in the draft's vocabulary, [total]; None: the folder has none.
    size, total
        Of the draft's and the target's vocabulary.
    """
    problems: list[Problem] = []
    if len(d2t) != size:
        fix = "export head and map together"
        got = f"{len(d2t)} entries"
        problems.append(_wrong(f"{where}: d2t", got, f"{size}, as draft_vocab_size says", fix))
    counted = None
    if t2d is not None:
        counted = int(t2d.sum())
        if len(t2d) != total or counted != size:
            fix = "make the map again: it names too few ids where the data had too few different tokens"
            got = f"{len(t2d)} entries, {counted} of them true"
            problems.append(_wrong(f"{where}: t2d", got, f"{total} entries, {size} of them true", fix))
    ids = d2t + np.arange(len(d2t), dtype=np.int64)
    rising = bool((np.diff(ids) > 0).all())
    inside = bool(len(ids) and ids.min() >= 0 and ids.max() < total)
    marked = t2d is None or len(t2d) != total or not inside or bool(t2d[ids].all())
    if not (rising and inside and marked):
        absolute = _absolute(d2t, t2d, total)
        got = _what(ids, rising=rising, inside=inside, total=total)
        if absolute:
            got += "; d2t itself is rising and in range: it holds target ids, not offsets"
        fix = (
            "write d2t[i] = target id - i"
            if absolute
            else "make the map again: i + d2t[i] is the target id of draft id i"
        )
        problems.append(_wrong(f"{where}: d2t", got, "i + d2t[i] strictly rising, in range, and true in t2d", fix))
    elif t2d is None and len(d2t) > 1 and bool((np.diff(d2t) > 0).all()):
        got = "offsets that rise at every id, as a map of target ids does: nothing tells which it is"
        fix = "store t2d beside it, which tells offsets from ids; of ids, write d2t[i] = target id - i"
        problems.append(_wrong(f"{where}: d2t", got, "some neighbouring target ids, or t2d", fix))
    return problems


def vocabulary_digest(d2t: npt.NDArray[np.int64]) -> str:
    """Return the digest of the target ids ``i + d2t[i]`` (int64, little-endian)."""
    ids = (d2t + np.arange(len(d2t), dtype=np.int64)).astype("<i8")
    return digest_bytes((ids.tobytes(),))


def _full(draft: Draft, row: DraftRow, size: int, title: str, problems: list[Problem]) -> str | None:
    """Check a draft of the target's whole vocabulary: a map changes nothing, or is no map of it."""
    named = draft.shapes is not None and any("d2t" in name for name in draft.shapes)
    if named and not row.full_vocabulary_map:
        fix = "leave d2t and t2d out"
        got = f"d2t beside a draft vocabulary of all {size} ids"
        problems.append(_wrong(f"{draft.where}: d2t", got, f"none: {title} fails to load it", fix))
    if draft.d2t is not None and (len(draft.d2t) != size or draft.d2t.any()):
        fix = "leave d2t out, or state the draft_vocab_size that it is of"
        got = f"{len(draft.d2t)} entries, not all 0"
        problems.append(_wrong(f"{draft.where}: d2t", got, f"{size} times 0 for the whole vocabulary", fix))
        return vocabulary_digest(draft.d2t)
    return None


def _map_names(draft: Draft, row: DraftRow, title: str, problems: list[Problem]) -> list[str]:
    """Return the tensors that an engine takes for the map; HS408 for another one whose name says that it is one."""
    names = sorted(n for n in draft.shapes or () if "d2t" in n)
    taken = {
        "d2t": [n for n in names if n == "d2t"],
        "part": [n for n in names if n.rpartition(".")[2] == "d2t"],
        "anywhere": names,
    }[row.loads.map_name]
    what = "fails to load" if row.unknown_weights == "refused" else "leaves out"
    for name in names:
        if name not in taken:
            where, got = f"{draft.where}: {name}", f"a map under a name that {title} {what}"
            problems.append(_wrong(where, got, "d2t", "rename it to d2t"))
    return taken


def _absolute(d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_] | None, total: int) -> bool:
    if not len(d2t) or d2t.min() < 0 or d2t.max() >= total or not (np.diff(d2t) > 0).all():
        return False
    return t2d is None or len(t2d) != total or bool(t2d[d2t].all())


def _what(ids: npt.NDArray[np.int64], *, rising: bool, inside: bool, total: int) -> str:
    if not len(ids):
        return "an empty map"
    if not inside:
        i = int(np.argmax((ids < 0) | (ids >= total)))
        return f"draft id {i} stands for target id {ids[i]}, outside 0..{total - 1}"
    if not rising:
        i = int(np.argmax(np.diff(ids) <= 0))
        return f"draft ids {i} and {i + 1} stand for target ids {ids[i]} and {ids[i + 1]}"
    return "target ids that t2d does not have"


def _wrong(where: str, got: str, expected: str, fix: str) -> Problem:
    return problem("HS408", where=where, got=got, expected=expected, fix=fix)
