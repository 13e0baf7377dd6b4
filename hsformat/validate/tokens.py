"""Whether states are what they are called, by the target's embedding, final norm and head (HS204, HS205, HS206).

A part of the records is looked at, since the head's product is not free: 64 records and 16 rows of each at level
``sample``, four times as many at ``full``, fewer for a large vocabulary. Nothing here runs the model. May import
``store``, ``target`` and the other modules of ``validate``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hsformat.contract import Capture, Contract
from hsformat.problems import ForeignFileError, Problem, Severity, problem
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord
from hsformat.target.config import read_config
from hsformat.target.describe import TargetDescription
from hsformat.target.ends import TargetEnds, open_ends
from hsformat.validate.embedding import embedding_problems
from hsformat.validate.excerpt import (
    Excerpt,
    Extent,
    Positions,
    any_position,
    excerpts,
    is_greedy,
    predicting_positions,
)
from hsformat.validate.finalnorm import final_norm_problems
from hsformat.validate.greedy import greedy_problems

__all__ = ["Counted", "TokenCheck"]

RECORDS, ROWS = 64, 16
FULL = 4
"""How many times as much is looked at at level ``full``."""
STATE_BYTES = 64 * 1024 * 1024
"""Of the rows of one capture as float32, at most."""
PRODUCTS = 2**38
"""Multiplications of the head at level ``sample``, at most: some seconds on two cores."""


class Counted(NamedTuple):
    """A segment by name, with the number of its records, and of those that the target generated greedily."""

    name: str
    records: int
    greedy: int


@dataclass(kw_only=True)
class TokenCheck:
    """Compares the states of a store with its tokens, by the key tensors of the target that the data was made with.

    Attributes
    ----------
    segments
        All of the store.
    full
        Whether to look at more records.
    problems
        What was found, so far. HS206 where depth 0 is not the embedding of the record's tokens, or where a state at
        depth N does not give the next token although the target wrote it greedily. HS204 where another capture holds
        the embedding's rows. HS205 where the last capture is normed and should not be, or the reverse. A note says what
        could not be compared.
    rows
        States that were compared.
    """

    source: Source
    contract: Contract
    segments: Sequence[Counted]
    full: bool
    problems: list[Problem]
    rows: int = 0

    def run(
        self,
        folder: str | os.PathLike[str],
        described: TargetDescription,
        tick: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Compare with the target in a folder.

        Parameters
        ----------
        described
            The folder. Nothing is compared if its key tensors are not those of the contract: HS301 has said so.
        tick
            Called with the share of the head that was read.
        """
        target = self.contract.target
        if described.model.basis_digest != target.basis_digest:
            return
        try:
            ends = open_ends(Path(folder), target)
            learned = _adds_positions(self.contract, Path(folder))
            for capture in self.contract.captures:
                if capture.depth == 0 and learned:
                    self._say_skipped(capture)
                else:
                    self._rows(capture, ends)
            for capture in self.contract.captures:
                if capture.depth == target.num_layers:
                    self._greedy(capture, ends, tick)
        except ForeignFileError as e:  # it could be read a moment ago
            self.problems += e.problems

    def _rows(self, capture: Capture, ends: TargetEnds) -> None:
        """Compare with the embedding and the final norm."""
        segments = [Extent(s.name, s.records) for s in self.segments]
        sample = self._sample(capture, segments, self._records(), any_position)
        where = self.source.location
        if capture.norm == "none":
            self.problems += embedding_problems(sample, ends, capture=capture, where=where)
        if capture.depth == self.contract.target.num_layers:
            self.problems += final_norm_problems(sample, ends, capture=capture, where=where)

    def _greedy(self, capture: Capture, ends: TargetEnds, tick: Callable[[float], None]) -> None:
        """Compare with the tokens that the target wrote."""
        normed = {p.record for p in self.problems if p.code == "HS205"}  # another norm gives other tokens
        if None in normed:
            return
        target = self.contract.target
        products = target.vocab_size * target.hidden_size * ROWS
        records = min(self._records(), max(2, self._factor * PRODUCTS // products))
        segments = [Extent(s.name, s.greedy) for s in self.segments]
        sample = self._sample(capture, segments, records, predicting_positions, is_greedy)
        rest = [e for e in sample if e.record not in normed]
        self.problems += greedy_problems(rest, ends, capture=capture, where=self.source.location, tick=tick)

    def _sample(
        self,
        capture: Capture,
        segments: Sequence[Extent],
        records: int,
        positions: Positions,
        eligible: Callable[[CommitRecord, int], bool] = lambda commit, row: True,
    ) -> list[Excerpt]:
        sample = list(
            excerpts(
                self.source,
                self.contract,
                segments,
                capture.key,
                records=records,
                rows=ROWS,
                positions=positions,
                eligible=eligible,
                problems=self.problems,
            )
        )
        self.rows += sum(len(e.at) for e in sample)
        return sample

    @property
    def _factor(self) -> int:
        return FULL if self.full else 1

    def _records(self) -> int:
        return min(self._factor * RECORDS, max(2, STATE_BYTES // (4 * self.contract.target.hidden_size * ROWS)))

    def _say_skipped(self, capture: Capture) -> None:
        self.problems.append(
            problem(
                "HS206",
                where=f"{self.source.location}: hidden[{capture.key!r}]",
                got="states that were not compared with the embedding",
                expected="states that are a row of it and nothing else",
                fix="nothing: this target adds, or may add, a learned position embedding, which is not looked up",
                severity=Severity.NOTE,
            )
        )


def _adds_positions(contract: Contract, folder: Path) -> bool:
    """Return whether depth 0 holds more than the embedding; of an unknown family without RoPE it may."""
    family = read_config(folder).family
    return family.learned_positions if family is not None else not contract.target.rope
