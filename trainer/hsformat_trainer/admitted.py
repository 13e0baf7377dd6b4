"""What the gate has let through: data, layout, engines and draft that mean the same. Brings no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract, TargetModel, compatibility_view
from hsformat.digests import digest_bytes
from hsformat.layout import Layout, ServingLayout
from hsformat.problems import Problem, problem
from hsformat_trainer.content import source_digest
from hsformat_trainer.differing import ABSENT, differing_leaves, shown

if TYPE_CHECKING:
    from hsformat.source import RecordSource
    from hsformat_trainer.draft_spec import DraftSpec

__all__ = ["Admitted", "Source", "differences"]

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """Records that take part.

    Attributes
    ----------
    name
        The store's place.
    source
        The records; a store, or another source.
    weight
        How often its records come an epoch.
    train, held_out
        [n], [m] numbers of the records that are trained on and evaluated on, ascending.
    train_tokens, held_out_tokens
        [n], [m] T of each of them.
    too_long
        Records that are in neither, since they have more tokens than a batch.
    """

    name: str
    source: RecordSource
    weight: float
    train: _Rows
    held_out: _Rows
    train_tokens: _Rows
    held_out_tokens: _Rows
    too_long: int

    @property
    def per_epoch(self) -> int:
        """Training records of every epoch, one that comes twice counted twice: ``weight`` passes, rounded."""
        return floor(self.weight) * len(self.train) + self.part

    @property
    def part(self) -> int:
        """Those of them that are of a pass that is not whole."""
        return round((self.weight - floor(self.weight)) * len(self.train))

    def ids_digest(self, rows: _Rows) -> str:
        """Return the digest of the ids of some records, in order."""
        ids = self.source.ids
        return digest_bytes(f"{len(i := ids[int(row)])}:{i}".encode() for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admitted:
    """What was found to fit together.

    Attributes
    ----------
    contract
        Of the first store; the others have its compatibility digest.
    layout
        What the draft is trained on: aux captures in the order in which ``fc`` concatenates them, and the last capture.
    trained
        What training does with the draft, in the words of serving; its ``vocab_map`` is null, since the vocabulary is
        counted later.
    servings
        What each engine will do with the draft, in the order of ``--serve``.
    spec
        Sizes and options of the draft.
    target, target_folder
        The target, as its folder describes it, and the folder.
    sources
        What is trained and evaluated on.
    special_ids
        Target ids that are in every draft vocabulary: those that end a text, and after them the special tokens.
    origins
        How records came about (generation, chat template, producer) and how many, worst mixed first.
    notes
        Problems that are no errors: what is worth knowing.
    """

    contract: Contract
    layout: Layout
    trained: ServingLayout
    servings: tuple[ServingLayout, ...]
    spec: DraftSpec
    target: TargetModel
    target_folder: Path
    sources: tuple[Source, ...]
    special_ids: tuple[int, ...]
    origins: Mapping[str, Mapping[str, int]]
    notes: tuple[Problem, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint says of the data and the layout that it was trained on, as JSON-able data.

        A source that is no store is read for it, without its states: ask once a run.
        """
        target = compatibility_view(self.contract.to_json())["target"]
        return {
            "version": 1,
            "compatibility_digest": self.contract.compatibility_digest,
            "target": target,
            "tokenizer_digest": self.contract.tokenizer_digest,
            "layout": self.layout.model_dump(mode="json"),
            "servings": [s.to_json() for s in self.servings],
            "spec": self.spec.model_dump(mode="json"),
            "sources": [
                {
                    "name": s.name,
                    "contract_digest": s.source.contract.digest,
                    "content": source_digest(s.source),
                    "weight": s.weight,
                    "train": {"records": len(s.train), "ids": s.ids_digest(s.train)},
                    "held_out": {"records": len(s.held_out), "ids": s.ids_digest(s.held_out)},
                }
                for s in self.sources
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield for people what is trained on, for what, and what was left out."""
        n = self.contract.target.num_layers
        yield f"draft: fc takes {_keys(self.layout.aux)}, target distribution from {self.layout.last} (of {n} layers)"
        for served in self.servings:
            yield f"  {served.engine} {served.version} feeds it {_keys(served.keys)} ({served.evidence})"
        for s in self.sources:
            weight = "" if s.weight == 1 else f", weight {s.weight:g}"
            tokens = f"{int(s.train_tokens.sum()):,} tokens"
            yield f"data: {s.name}: {len(s.train):,} records of {tokens}{weight}, {len(s.held_out):,} held out"
            if s.too_long:
                yield f"  left out: {s.too_long:,} records of more tokens than a batch (--batch-tokens)"
        for kind, counts in self.origins.items():
            if len(counts) > 1:
                yield f"  mixed {kind}: " + "; ".join(f"{name}: {n:,} records" for name, n in counts.items())


def differences(record: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[Problem]:
    """Return in what a run differs from another by their :meth:`Admitted.record`; empty: that run may go on with this.

    One problem a field, whole. The places of stores are not compared: they may have been moved.
    """
    fix = "resume with the data, target and engines that the run was begun with, or begin a new run in another --out"
    out = []
    for path, now, was in differing_leaves(_comparable(record), _comparable(recorded)):
        got, expected = shown(now), f"{shown(was)}, as the run had"
        if "\n" in expected:  # only what was got may have lines
            got, expected = f"{'none' if now == ABSENT else got}; the run had{shown(was)}", "as the run had"
        elif was == ABSENT:
            expected = "none, as the run had"
        out.append(problem(_code(path), where=f"resume: {path}", got=got, expected=expected, fix=fix))
    return out


def _comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared: not where stores are, nor how it came to be known what an engine does."""
    sources = [{k: v for k, v in s.items() if k != "name"} for s in record.get("sources", [])]
    servings = [{k: v for k, v in s.items() if k != "evidence"} for s in record.get("servings", [])]
    return {**record, "sources": sources, "servings": servings}


_CODES = (
    ("layout", "HS401"), ("servings", "HS401"), ("spec.rope", "HS407"), ("spec.", "HS405"), ("target.", "HS301"),
    ("tokenizer_digest", "HS302"),
)  # fmt: skip


def _code(path: str) -> str:
    return next((code for prefix, code in _CODES if path.startswith(prefix)), "HS507")


def _keys(keys: Any) -> str:
    return f"[{', '.join(keys)}]"
