"""The curves of a run as a picture: ``OUT/curves.png``, from its log. Needs matplotlib, imported when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "can_draw", "draw_curves"]

MISSING = "no curves.png: matplotlib is not installed: pip install matplotlib"

Line = Mapping[str, Any]


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_curves(lines: Sequence[Line], path: Path) -> None:
    """Draw loss, accuracy by position, acceptance length, and rate with gradient norm over the steps.

    Parameters
    ----------
    lines
        Of :func:`hsformat_trainer.journal.read_journal`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot
    from matplotlib.figure import Figure

    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    names = max((len(line["accuracy"]) for line in (*steps, *evaluations)), default=0)
    columns = -(-names // 16)  # a legend higher than its picture leaves no room for the curves
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    (loss, accuracy), (acceptance, rate) = figure.subplots(2, 2)
    x = [line["step"] for line in steps]
    loss.plot(x, [line["loss"] for line in steps], color="black")
    loss.set(title="loss", xlabel="step")
    at = [line["step"] for line in evaluations]
    for k in range(names):
        color = f"C{k}"
        accuracy.plot(x, [_or_nan(line["accuracy"], k) for line in steps], color=color, alpha=0.35)
        accuracy.plot(
            at, [_or_nan(line["accuracy"], k) for line in evaluations], "o-", color=color, label=f"position {k + 1}"
        )
    accuracy.set(title="accuracy by position (line: training, dots: held out)", xlabel="step", ylim=(0, 1))
    if accuracy.lines:
        accuracy.legend(fontsize="small" if columns == 1 else "xx-small", ncols=columns)
    lengths = [line["acceptance_length"] for line in evaluations]
    intervals = [line["interval"] or (a, a) for a, line in zip(lengths, evaluations, strict=True)]
    reach = [[a - low for a, (low, _) in zip(lengths, intervals, strict=True)]]
    reach += [[high - a for a, (_, high) in zip(lengths, intervals, strict=True)]]
    acceptance.errorbar(at, lengths, reach, fmt="o-", capsize=3, color="black")
    acceptance.set(title="walked acceptance length, held out, 95% interval", xlabel="step")
    for name in sorted({name for line in steps for name in line["lr"]}):
        rate.plot(x, [line["lr"].get(name, float("nan")) for line in steps], label=f"lr {name}")
    rate.set(title="learning rate (left), gradient norm (right)", xlabel="step")
    if rate.lines:
        rate.legend(fontsize="small", loc="lower left")
    norm = rate.twinx()
    norm.plot(x, [line["grad_norm"] for line in steps], color="grey", alpha=0.5)
    figure.savefig(path, dpi=110)


def _or_nan(values: Sequence[float | None], k: int) -> float:
    value = values[k] if k < len(values) else None
    return float("nan") if value is None else value
