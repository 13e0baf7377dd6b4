"""``hsformat export-draft CHECKPOINT --engine sglang|vllm|both --out DIR``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["export_draft"]


def export_draft(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a checkpoint.")],
    out: Annotated[str, typer.Option(help="Folder to write; it must not be there.")],
) -> None:
    """Write a draft as engines serve it."""
    raise NotImplementedError(checkpoint, out)
