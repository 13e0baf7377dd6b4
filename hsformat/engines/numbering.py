"""From a capture to an engine's own number and back. Engines' numbers exist here and nowhere else inside hsformat.

>>> engine_number("transformers", "LlamaForCausalLM", 30, "d15").text
'hidden_states[15]'
>>> engine_number("sglang", "LlamaForCausalLM", 30, "d15").text
'id 14'
>>> capture_of("vllm", "LlamaForCausalLM", 30, 30)
'd30'
"""

from __future__ import annotations

from dataclasses import dataclass

from hsformat.engines import sglang, transformers, vllm
from hsformat.engines.rules import NumberingRule
from hsformat.layout import capture_key, parse_capture_key
from hsformat.problems import Problem, ResolveError, problem

__all__ = ["ENGINES", "EngineNumber", "capture_of", "describe_capture", "engine_number", "numbering_rule"]

_RULES: dict[str, tuple[NumberingRule, ...]] = {
    "transformers": transformers.RULES,
    "vllm": vllm.RULES,
    "sglang": sglang.RULES,
}

ENGINES = tuple(_RULES)
"""The engines that are known, in the order in which they are shown."""


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


def numbering_rule(engine: str, architecture: str) -> NumberingRule:
    """Return the rule by which ``engine`` numbers the captures of ``architecture``.

    Raises
    ------
    ResolveError
        HS410: the engine or the architecture is not known; the problem lists what is.
    """
    if engine not in _RULES:
        raise ResolveError(
            problem(
                "HS410", where="engine", got=engine, expected=f"one of {', '.join(ENGINES)}",
                fix="name an engine that is listed",
            )
        )  # fmt: skip
    for rule in _RULES[engine]:
        if architecture in rule.architectures:
            return rule
    known = sorted(a for rule in _RULES[engine] for a in rule.architectures)
    raise ResolveError(
        problem("HS410", where=f"{engine}: architecture", got=architecture, expected=f"one of {', '.join(known)}")
    )


def engine_number(engine: str, architecture: str, num_layers: int, key: str) -> EngineNumber:
    """Return what ``engine`` calls the capture ``key`` of a target of this architecture and number of layers.

    Raises
    ------
    ResolveError
        HS410: engine or architecture unknown. HS304: the target has no such capture.
    """
    rule = numbering_rule(engine, architecture)
    depth, normed = _parse(key, num_layers)
    reason = _why_none(rule, depth, num_layers, normed=normed)
    if reason is not None:
        return EngineNumber(number=None, text=f"none: {reason}")
    number = depth - rule.shift
    return EngineNumber(number=number, text=rule.text.format(number))


def capture_of(engine: str, architecture: str, num_layers: int, number: int) -> str:
    """Return the key of the capture that ``engine`` calls ``number``: the inverse of :func:`engine_number`.

    Raises
    ------
    ResolveError
        HS410: engine or architecture unknown. HS304: the engine has no such number for this target.
    """
    rule = numbering_rule(engine, architecture)
    low, high = rule.first_depth - rule.shift, num_layers - rule.shift - (rule.at_last == "absent")
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ResolveError(
            problem(
                "HS304", where=f"{engine}: {rule.text.format(number)}", got=number,
                expected=f"a number from {low} to {high} for {num_layers} layers",
                fix="use a number that exists: an engine drops another one or repeats a layer in its place",
            )
        )  # fmt: skip
    depth = number + rule.shift
    return capture_key(depth, normed=depth == num_layers and rule.at_last == "final")


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


def _why_none(rule: NumberingRule, depth: int, num_layers: int, *, normed: bool) -> str | None:
    if depth < rule.first_depth:
        return rule.reasons["first"]
    if normed:
        return None if rule.at_last == "final" else rule.reasons["last_normed"]
    return rule.reasons["last"] if depth == num_layers and rule.at_last != "none" else None


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
