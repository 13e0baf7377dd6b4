"""What extractors captured of which targets when it was tried: ``ran/ENGINE-VERSION.json``, for docs/engines.md.

Each file is written by the conformance suite of extractors as it runs on the engine (tests/engines), and that suite
fails where it captures anything else than the file says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hsformat.models import FromList, Frozen

__all__ = ["RAN", "Extracted", "ExtractedRow", "extracted", "load_extracted"]

RAN = Path(__file__).with_name("ran")
"""The folder of the files."""


class ExtractedRow(Frozen):
    """One target, in one dtype.

    Attributes
    ----------
    architecture, dtype, num_layers
        Of the target.
    depths
        Captured before the final norm, ascending.
    normed
        Whether depth N was captured after the final norm as well.
    answers
        Whether answers that the engine wrote itself were captured, too.
    worst_relative_error
        Largest relative L2 error of a row of any capture against Transformers in float32.
    """

    architecture: Annotated[str, Field(min_length=1)]
    dtype: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(ge=1)]
    depths: Annotated[tuple[int, ...], FromList]
    normed: bool
    answers: bool
    worst_relative_error: Annotated[float, Field(ge=0)]


class Extracted(Frozen):
    """All that ran on one version of an engine.

    Attributes
    ----------
    engine, version, device
        Which engine, and on what it ran.
    captures
        Ascending by architecture, dtype and number of layers.
    """

    engine: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1)]
    device: Annotated[str, Field(min_length=1)]
    captures: Annotated[tuple[ExtractedRow, ...], FromList]


def load_extracted(file: Path) -> Extracted:
    """Read one file.

    Raises
    ------
    pydantic.ValidationError
        It is not what the suite writes.
    """
    return Extracted.model_validate(json.loads(file.read_text(encoding="utf-8")))


def extracted(engine: str) -> Iterator[Extracted]:
    """Yield what ran on the versions of an engine."""
    for file in sorted(RAN.glob(f"{engine}-*.json")):
        yield load_extracted(file)
