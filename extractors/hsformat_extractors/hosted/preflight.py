"""What can be refused before an engine is imported or a weight is loaded: HS304, HS410, HS506, HS602."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Literal

from packaging.version import Version

from hsformat.contract import Capture
from hsformat.dtypes import numpy_dtype
from hsformat.engines.ids import capturable, ids_of
from hsformat.engines.rows import CaptureRow, parse_depth
from hsformat.extraction.protocol import ExtractionRequest
from hsformat.problems import HsError, Problem, problem
from hsformat.target.config import read_config
from hsformat_extractors.hosted.staging import token_bytes

__all__ = ["Ends", "bytes_of_token", "capture_row_problems", "installed_version", "longest_bytes", "version_problems"]

Ends = Literal["embedding", "last", "last_normed"]
"""Captures taken without the engine's list of layers: depth 0, and depth N before and after the final norm."""


def installed_version(package: str) -> str | None:
    """Return the version of the distribution that brings a module, as the tables write it; None: there is none.

    The module is not imported.
    """
    found: str | None
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a build of the engine may have another name than its module
        names = importlib.metadata.packages_distributions().get(package, [])
        found = importlib.metadata.version(names[0]) if names else None
    return None if found is None else Version(found).public


def version_problems(
    engine: str, version: str | None, *, package: str, minimum: str, install: str
) -> Iterator[Problem]:
    """Refuse an engine that is not installed, or older than what this extractor works with."""
    if version is None:
        yield problem("HS410", where=f"extractor {engine}", got=f"not installed: {package}",
                      expected=f"{package} {minimum} or later, in this environment", fix=install)  # fmt: skip
    elif Version(version) < Version(minimum):
        yield problem("HS410", where=f"extractor {engine}: version", got=f"{package} {version}",
                      expected=f"{minimum} or later: an older one cannot return what is asked of it",
                      fix=install)  # fmt: skip


def capture_row_problems(
    engine: str,
    version: str,
    request: ExtractionRequest,
    row: CaptureRow,
    *,
    beyond: Sequence[Ends] = (),
    applies_norm: bool = False,
) -> Iterator[Problem]:
    """Refuse captures that the engine cannot give, by the row of its version and this architecture.

    Parameters
    ----------
    beyond
        What the extractor takes by other means than the engine's list of layers.
    applies_norm
        It makes depth N after the final norm from the one before it.
    """
    n = request.target.num_layers
    listed: list[int] = []
    problems = []
    for capture in request.captures:
        if capture.depth > n or _is_end(capture, n) in beyond:
            continue
        given = {"final" if capture.depth == n and row.norm == "final" else "none"}
        if applies_norm and capture.depth == n:
            given.add("final")
        if not capturable(row, capture.depth, n) or capture.norm not in given:
            deepest = parse_depth(row.deepest, n)
            expected = f"depths {row.lowest} to {deepest}" + _also(beyond, row, n)
            fix = "extract other depths" if capture.depth < n else "say --last post, or pre, or none"
            problems.append(
                problem("HS410", where=f"capture {capture.key}", got=f"{engine} {version} cannot give it",
                        expected=expected, fix=f"{fix}; or use another engine")
            )  # fmt: skip
        else:
            listed += [] if capture.depth in listed else [capture.depth]  # d30 and d30n are one
    yield from problems
    if listed and not problems and ids_of(row, listed, n) is None:
        yield problem("HS410", where="captures", got=", ".join(f"d{d}" for d in listed),
                      expected=f"depths that a list of ids of {engine} {version} can stand for "
                      f"({row.rule.replace('_', ' ')})", fix="extract other depths")  # fmt: skip


def longest_bytes(request: ExtractionRequest) -> int | None:
    """Return the bytes that the longest sample of the target takes in staging; None: its config does not say."""
    try:
        config = read_config(request.model)
    except HsError:
        return None  # the target was described from it, and whoever loads it says what is wrong
    longest = config.get("max_position_embeddings")
    return longest * bytes_of_token(request) if type(longest) is int and longest > 0 else None


def bytes_of_token(request: ExtractionRequest) -> int:
    """Return the bytes of one token's states in staging."""
    itemsize = numpy_dtype(request.target.dtype).itemsize
    return token_bytes(len(request.captures), request.target.hidden_size, itemsize)


def _is_end(capture: Capture, n: int) -> Ends | None:
    if capture.depth == 0:
        return "embedding"
    if capture.depth == n:
        return "last_normed" if capture.norm == "final" else "last"
    return None


def _also(beyond: Sequence[Ends], row: CaptureRow, n: int) -> str:
    keys = {"embedding": "d0", "last": f"d{n}", "last_normed": f"d{n}n"}
    more = [keys[b] for b in beyond]
    if row.norm == "final":
        more.append(f"d{n}n, not d{n}")
    return f", and {', '.join(more)}" if more else ""
