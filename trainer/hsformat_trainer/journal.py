"""The log of a run: ``OUT/log.jsonl``, one JSON object a line, from which the table and the curves are made.

A line says what it is by ``kind``: ``step`` or ``evaluation``. All but ``seconds``, ``tokens_per_second`` and
``loader_wait`` follows from data, configuration and seed: lines of a resumed run equal those of an uninterrupted one.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hsformat.models import Frozen
from hsformat.problems import ForeignFileError, Severity, StoreError, problem
from hsformat.strict_json import parse_json
from hsformat_trainer.checkpoint_state import model_problems

__all__ = ["Journal", "StepLine", "read_journal", "writing"]

NAME = "log.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One optimizer step.

    Attributes
    ----------
    step, epoch
        The step, from 1; the epoch that it was of, from 0.
    loss
        The number that was minimised, over all batches and processes of the step.
    losses
        [K] mean loss of the rows supervised at each step of training-time test; None where there is none.
    accuracy
        [K] share of these rows where the draft's argmax is the target's, over the full vocabulary.
    lr
        By optimizer.
    grad_norm
        Before clipping.
    tokens
        All tokens trained on since the run began, those without loss included.
    tokens_per_second
        Since the line before, over all processes, in wall time without evaluations and checkpoints.
    loader_wait
        Share of that time in which the first process waited for the loader.
    seconds
        Of that time.
    """

    step: int
    epoch: int
    loss: float
    losses: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    lr: Mapping[str, float]
    grad_norm: float
    tokens: int
    tokens_per_second: float
    loader_wait: float
    seconds: float

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name, flat, as trackers take them."""
        out = {"loss": self.loss, "grad_norm": self.grad_norm, "tokens": float(self.tokens)}
        out |= {"tokens_per_second": self.tokens_per_second, "loader_wait": self.loader_wait}
        out |= {f"lr/{name}": rate for name, rate in self.lr.items()}
        for name, values in {"loss": self.losses, "accuracy": self.accuracy}.items():
            out |= {f"{name}/position_{k + 1}": v for k, v in enumerate(values) if v is not None}
        return out


class Journal:
    """Appends lines, each on the disk's way before the next; away from the first process it writes nothing.

    Parameters
    ----------
    out
        The run's folder.
    after
        Lines of steps beyond this one are removed first: of a run that was killed later than its last checkpoint.
    writes
        Whether this process writes.

    Raises
    ------
    StoreError
        HS506: the file cannot be written, now or at a later line.
    """

    def __init__(self, out: str | Path, *, after: int, writes: bool) -> None:
        self._path = Path(out) / NAME
        self._file = None
        if writes:
            with writing(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._cut(after)
                self._file = self._path.open("a", encoding="utf-8")

    def _cut(self, after: int) -> None:
        if not self._path.exists():
            return
        kept = [line for line in read_journal(self._path.parent) if line["step"] <= after]
        new = self._path.with_suffix(".new")
        new.write_text("".join(f"{json.dumps(line)}\n" for line in kept), "utf-8")
        os.replace(new, self._path)

    def step(self, line: StepLine) -> None:
        """Add a step."""
        self._add("step", asdict(line))

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Add an evaluation, made after a step; 0: before the first."""
        self._add("evaluation", {"step": step, **values})

    def _add(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            text = json.dumps({"kind": kind, **values}, allow_nan=False) + "\n"
            with writing(self._path):
                self._file.write(text)
                self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is None:
            return
        if kind is not None:
            with suppress(OSError):  # what could not be written is told already
                self._file.close()
            return
        with writing(self._path):
            self._file.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what a run cannot write.

    Raises
    ------
    StoreError
        HS506: the system refuses it, as on a full disk.
    """
    try:
        yield
    except OSError as e:
        full = e.errno == errno.ENOSPC
        fix = "free space on this disk, or give another --out" if full else "see the error of the system"
        expected = "a file that is written as a whole"
        fix = f"{fix}; --resume goes on from the last checkpoint"
        found = problem("HS506", where=str(path), got=e, expected=expected, fix=fix, severity=Severity.ERROR)
        raise StoreError([found]) from e


def read_journal(out: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log. A last line that a kill cut off is left out.

    Raises
    ------
    ForeignFileError
        HS602: another line is none that a run writes, or lacks a number that is read of it.
    """
    path = Path(out) / NAME
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [_line(line, f"{path}: line {n}") for n, line in enumerate(lines, 1) if line.endswith(b"\n")]


class _Step(Frozen):
    """What is read of a step: by the table, the curves and a run that goes on."""

    model_config = ConfigDict(extra="ignore")

    kind: Literal["step"]
    step: int
    loss: float
    accuracy: list[float | None]
    lr: dict[str, float]
    grad_norm: float


class _Evaluation(Frozen):
    """What is read of an evaluation."""

    model_config = ConfigDict(extra="ignore")

    kind: Literal["evaluation"]
    step: int
    records: int
    accuracy: list[float]
    acceptance_length: float
    acceptance_by_position: list[float]
    interval: tuple[float, float] | None
    compared_length: float
    estimate: bool


_LINE: TypeAdapter[_Step | _Evaluation] = TypeAdapter(Annotated[_Step | _Evaluation, Field(discriminator="kind")])


def _line(text: bytes, where: str) -> dict[str, Any]:
    fix = "remove this line, or give another --out; checkpoints are whole without it"
    expected = "an object with kind (step, evaluation) and its numbers, as a run writes it"
    try:
        found: dict[str, Any] = parse_json(text.decode("utf-8"))
        _LINE.validate_json(text)
    except ValidationError as e:
        raise ForeignFileError(model_problems(e, where=where, fix=fix)) from e
    except (ValueError, RecursionError) as e:
        raise ForeignFileError(problem("HS602", where=where, got=e, expected=expected, fix=fix)) from e
    return found
