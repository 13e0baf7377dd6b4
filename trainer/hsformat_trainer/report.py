"""The table at the end of a run: before, best and after, on stdout. Reads the log; knows nothing of the run itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hsformat_trainer.timer import Spent

__all__ = ["print_summary", "summary_table"]

Line = Mapping[str, Any]


def summary_table(lines: Sequence[Line]) -> Table:
    """Return loss, acceptance length and accuracy before, at the best evaluation, and after the last step.

    Parameters
    ----------
    lines
        Of :func:`hsformat_trainer.journal.read_journal`.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    table = Table(title="Training of the draft", title_justify="left")
    table.add_column("")
    columns = _columns(evaluations)
    for name, evaluation in columns:
        table.add_column(f"{name}\nstep {evaluation['step']}", justify="right")
    if not columns:
        table.add_column("first logged step", justify="right")
        table.add_column("last step", justify="right")
        if steps:
            table.add_row("training loss", _number(steps[0]["loss"]), _number(steps[-1]["loss"]))
        return table
    table.add_row("training loss", *(_number(_loss_at(steps, e["step"])) for _, e in columns))
    chosen = [e for _, e in columns]
    name = "acceptance length, walked" if not chosen[-1]["estimate"] else "acceptance length, estimated by walking"
    table.add_row(name, *(f"{e['acceptance_length']:.3f}" for e in chosen))
    table.add_row("  95% interval over records", *(_interval(e["interval"]) for e in chosen))
    for k in range(len(chosen[0]["accuracy"])):
        shares = (_number(e["acceptance_by_position"][k]) for e in chosen)
        table.add_row(f"  accepted up to position {k + 1}", *shares)
    for k in range(len(chosen[0]["accuracy"])):
        table.add_row(f"accuracy, position {k + 1}", *(_number(e["accuracy"][k]) for e in chosen))
    table.add_row("held-out records", *(str(e["records"]) for e in chosen))
    if len({e["records"] for e in evaluations}) > 1:  # otherwise it is the acceptance length
        table.add_row("  over the records of every evaluation", *(f"{e['compared_length']:.3f}" for e in chosen))
    return table


def print_summary(lines: Sequence[Line], trained: Spent, *, notes: Sequence[str] = ()) -> None:
    """Print the table, what the steps took, and lines that follow.

    Parameters
    ----------
    trained
        Of the steps that this process made.
    """
    console = Console(highlight=False)
    console.print(summary_table(lines))
    if trained.seconds:
        told = f"{trained.tokens:,} tokens in {trained.seconds:.1f} s"
        console.print(f"{told}: {trained.speed:,.0f} tokens/s, loader {trained.wait_share:.1%} of the time")
    for note in notes:
        console.print(note, soft_wrap=True)


def _columns(evaluations: Sequence[Line]) -> list[tuple[str, Line]]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    if first is last:
        return [("before", first)]
    best = max(evaluations[1:], key=lambda e: (e["compared_length"], e["step"]))
    middle = [] if best is last else [("best", best)]
    return [("before", first), *middle, ("after", last)]


def _loss_at(steps: Sequence[Line], step: int) -> float | None:
    """Return the loss logged nearest to a step; before the first step, that of the first."""
    if not steps:
        return None
    return float(min(steps, key=lambda line: abs(line["step"] - step))["loss"])


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f} .. {interval[1]:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
