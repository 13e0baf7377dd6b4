"""Preparation as commands ask for it, so that all of them see the same samples. May import ``prepare``, ``target``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hsformat.prepare import Preparation, Summary, prepare
from hsformat.target.config import ModelConfig

__all__ = ["PreparationOptions", "preparation_progress"]


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """What the options of a command say about samples.

    Attributes
    ----------
    data, generate, max_length, explode_turns, template_kwargs
        As the options of these names.
    """

    data: Path
    generate: int
    max_length: int | None
    explode_turns: bool
    template_kwargs: dict[str, Any]

    def samples(self, tokenizer: Any, *, vocab_size: int, max_positions: int | None) -> Preparation:
        """Return the samples for a target of this vocabulary and length."""
        return prepare(
            self.data,
            tokenizer,
            vocab_size=vocab_size,
            max_length=self.max_length if self.max_length is not None else max_positions,
            for_generation=bool(self.generate),
            reserve=self.generate,
            explode_turns=self.explode_turns,
            template_kwargs=self.template_kwargs,
        )

    def samples_of_config(self, tokenizer: Any, config: ModelConfig) -> Preparation:
        """Return the same samples from the target's config alone."""
        positions = config.get("max_position_embeddings")
        return self.samples(
            tokenizer,
            vocab_size=config.values["vocab_size"],
            max_positions=positions if type(positions) is int else None,
        )


@contextmanager
def preparation_progress(rows: int) -> Iterator[Callable[[Summary], None]]:
    """Yield a listener that shows a bar on a terminal: so many rows are prepared, and nothing else is done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda summary: None
        return
    columns = (TextColumn("prepare"), BarColumn(), TaskProgressColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task, started = bar.add_task("prepare", total=rows, rate=""), time.monotonic()

        def show(summary: Summary) -> None:
            rate = summary.rows / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=summary.rows, rate=f"{rate:,.0f} rows/s")

        yield show
