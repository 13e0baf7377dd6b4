"""From a capture to an engine's own number and back. Engines' numbers exist here and nowhere else inside hsformat.

Where no version is named, the row of the newest version that is known for the architecture is used; whoever shows the
number shows the versions with it (``numbering_row``).

>>> engine_number("transformers", "LlamaForCausalLM", 30, "d15").text
'hidden_states[15]'
>>> engine_number("sglang", "LlamaForCausalLM", 30, "d15").text
'id 14'
>>> capture_of("vllm", "LlamaForCausalLM", 30, 30)
'd30'
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from hsformat.engines.rows import CaptureRow, parse_depth
from hsformat.engines.table import capture_row, engine_of
from hsformat.layout import capture_key, parse_capture_key
from hsformat.problems import Problem, ResolveError, problem

__all__ = ["EngineNumber", "capture_of", "describe_capture", "engine_number", "numbering_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumber:
    """What an engine calls a capture.

    Attributes
    ----------
    number
        The engine's number; None: the engine has none for this capture.
    text
        For people: ``hidden_states[15]``, ``id 14``, or ``none: <reason>``.
    """

    number: int | None
    text: str


def numbering_row(engine: str, architecture: str, version: str | None = None) -> CaptureRow:
    """Return the row by which ``engine`` numbers the captures of ``architecture``.

    Raises
    ------
    ResolveError
        HS410: the engine or the architecture is not known; the problem lists what is.
    """
    if version is not None:
        return capture_row(engine, version, architecture)
    rows = engine_of(engine).captures
    own = [row for row in rows if architecture in row.architectures]
    if own:
        return max(own, key=lambda row: max(Version(v) for v in row.versions))
    known = sorted({a for row in rows for a in row.architectures})
    raise ResolveError(
        problem("HS410", where=f"{engine}: architecture", got=architecture, expected=f"one of {', '.join(known)}")
    )


def engine_number(
    engine: str, architecture: str, num_layers: int, key: str, version: str | None = None
) -> EngineNumber:
    """Return what ``engine`` calls the capture ``key`` of a target of this architecture and number of layers.

    Raises
    ------
    ResolveError
        HS410: engine or architecture unknown. HS304: the target has no such capture.
    """
    row = numbering_row(engine, architecture, version)
    depth, normed = _parse(key, num_layers)
    reason = _why_none(row, depth, num_layers, normed=normed)
    if reason is not None:
        return EngineNumber(number=None, text=f"none: {reason}")
    number = depth - row.shift
    return EngineNumber(number=number, text=_text(engine, number))


def capture_of(engine: str, architecture: str, num_layers: int, number: int, version: str | None = None) -> str:
    """Return the key of the capture that ``engine`` calls ``number``: the inverse of :func:`engine_number`.

    Raises
    ------
    ResolveError
        HS410: engine or architecture unknown. HS304: the engine has no such number for this target.
    """
    row = numbering_row(engine, architecture, version)
    low, high = row.lowest - row.shift, parse_depth(row.deepest, num_layers) - row.shift
    exact = not isinstance(number, bool) and isinstance(number, int) and low <= number <= high
    if row.rule != "shift" or not exact:
        expected = f"a number from {low} to {high} for {num_layers} layers"
        fix = "use a number that exists: an engine drops another one or repeats a layer in its place"
        if row.rule != "shift":
            expected, fix = "a list of ids: what one means depends on the others", "see hsformat.engines.ids.depths_of"
        where = f"{engine}: {_text(engine, number)}"
        raise ResolveError(problem("HS304", where=where, got=number, expected=expected, fix=fix))
    depth = number + row.shift
    return capture_key(depth, normed=depth == num_layers and row.norm == "final")


def describe_capture(key: str, num_layers: int) -> str:
    """Say in plain words what a capture is.

    Raises
    ------
    ResolveError
        HS304: a target of ``num_layers`` layers has no such capture.

    Examples
    --------
    >>> describe_capture("d15", 30)
    'residual after 15 of 30 layers'
    """
    depth, normed = _parse(key, num_layers)
    if normed:
        return "after the final norm"
    if depth == 0:
        return f"embedding output, before the first of {num_layers} layers"
    residual = f"residual after {depth} of {num_layers} layers"
    return residual + ", before the final norm" if depth == num_layers else residual


def _text(engine: str, number: int) -> str:
    return f"hidden_states[{number}]" if engine == "transformers" else f"id {number}"


def _why_none(row: CaptureRow, depth: int, num_layers: int, *, normed: bool) -> str | None:
    if row.rule != "shift":
        return "what an id means depends on the others in its list"
    deepest = parse_depth(row.deepest, num_layers)
    if not row.lowest <= depth <= deepest:
        return f"depths {row.lowest} to {deepest} are captured"
    if normed and row.norm == "none":
        return "what is captured is before the final norm"
    if depth == num_layers and not normed and row.norm == "final":
        return "it is the input of the final norm module; the last entry is after that norm"
    return None


def _parse(key: str, num_layers: int) -> tuple[int, bool]:
    try:
        depth, normed = parse_capture_key(key)
    except ValueError as e:
        raise ResolveError(_no_capture(key, str(e))) from e
    if depth > num_layers:
        raise ResolveError(_no_capture(key, f"a depth from 0 to {num_layers}"))
    if normed and depth != num_layers:
        raise ResolveError(_no_capture(key, f"the final norm at depth {num_layers} alone"))
    return depth, normed


def _no_capture(key: str, expected: str) -> Problem:
    return problem("HS304", where=f"capture {key}", got=key, expected=expected)
