"""Trackers through ``accelerate``: TensorBoard, W&B, MLflow and trackio, each only if it is named and installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from hsformat.problems import NothingToOpen, problem
from hsformat_trainer.config import TrackerName

__all__ = ["PACKAGES", "check_trackers", "flat"]

PACKAGES: Mapping[TrackerName, tuple[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", ("tensorboard", "tensorboardX")),
    "wandb": ("wandb", ("wandb",)),
    "mlflow": ("mlflow", ("mlflow",)),
    "trackio": ("trackio", ("trackio",)),
}
"""By tracker: what pip installs, and the modules of which accelerate needs one (``accelerate.utils.imports``)."""


def check_trackers(trackers: Sequence[TrackerName]) -> None:
    """Refuse trackers that are not installed; accelerate would leave them out with a line in the log.

    Raises
    ------
    NothingToOpen
        HS410, one problem a tracker, with the pip command that brings it.
    """
    missing = [name for name in trackers if not any(find_spec(module) for module in PACKAGES[name][1])]
    if missing:
        raise NothingToOpen(
            [
                problem(
                    "HS410",
                    where=f"--trackers {name}",
                    got=f"{name} is not installed",
                    expected="each tracker that is named",
                    fix=f"pip install {PACKAGES[name][0]}",
                )
                for name in missing
            ]
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Return nested values under joined names, as the settings of a tracker: what is no number is text."""
    out: dict[str, int | float | str | bool] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return out
