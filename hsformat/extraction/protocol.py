"""The seam between hsformat and an engine: what an extractor is given and what it gives back.

An extractor turns token samples into records. It knows nothing of stores, progress bars or resuming: the driver
(``driver.py``) does that for all of them. Third parties add one by an entry point of group
``hsformat.extractors`` that names a class of this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hsformat.contract import Capture, TargetModel
from hsformat.problems import Problem
from hsformat.record import Generation, Record, TokenSample

__all__ = ["ExtractionRequest", "Extractor", "Measures", "Rejected"]


@dataclass(frozen=True, kw_only=True)
class ExtractionRequest:
    """What the user asks of an extractor; the same for every engine.

    Attributes
    ----------
    model
        The target's folder.
    target
        What :func:`hsformat.target.describe` found in it. ``target.dtype`` is the dtype to run in.
    captures
        The captures to return, ascending. Nothing else is kept in memory.
    generation
        Mode ``none``: run the samples as they are. Otherwise the target writes on from each sample.
    batch_tokens
        Upper bound of tokens in one forward pass, padding included.
    options
        Of this engine alone (``device``); an unknown name is refused by ``preflight``.
    """

    model: Path
    target: TargetModel
    captures: tuple[Capture, ...]
    generation: Generation
    batch_tokens: int
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A sample that gave no record, and why. The driver quarantines it and goes on."""

    sample: TokenSample
    problems: list[Problem]


@runtime_checkable
class Extractor(Protocol):
    """An engine behind one interface. Construction is cheap and takes no argument."""

    name: str
    """As in ``--engine``: lower case."""

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        """Return all reasons why this request cannot be done, before any weight is loaded."""
        ...

    def load(self, request: ExtractionRequest) -> None:
        """Load the target, then prove on a short input that captures are what the request says.

        Raises
        ------
        HsError
            The target cannot be loaded, or its states are not what the request says (HS204, HS205, HS410).
        """
        ...

    def extract(self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool]) -> Iterator[Record | Rejected]:
        """Yield one record or rejection for each sample, in any order, matched by id.

        Samples are consumed as they are needed. States are NumPy arrays in the dtype that the target ran in, on the
        host, and owned by the record. ``record.source_digest`` is that of the sample. Once ``stopping()`` is true,
        nothing new is begun: what is in hand is finished and yielded, and the iterator ends.
        """
        ...

    def producer(self) -> dict[str, Any]:
        """Return provenance of the engine as JSON data: name, versions of packages, options, device."""
        ...

    def close(self) -> None:
        """Free the target. May be called twice."""
        ...


@runtime_checkable
class Measures(Protocol):
    """What an extractor may do besides: describe a target whose family is not in the table, by running it."""

    def measure(self, model: Path, *, options: Mapping[str, str]) -> Mapping[str, Any]:
        """Return what :func:`hsformat.target.describe` takes as ``measured`` for the target in this folder.

        ``options`` are the engine's own, as in :class:`ExtractionRequest`. Nothing stays loaded.

        Raises
        ------
        HsError
            The target cannot be loaded, or its numbers are not those of any description (HS205, HS410): never a guess.
        """
        ...
