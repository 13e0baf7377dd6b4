"""From what a user asks to a contract: depths, captures, layout. Nothing is guessed.

May import ``contract``, ``layout``, ``problems`` and ``target``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hsformat.contract import SPEC_VERSION, Capture, Contract, StateDtype, TargetModel
from hsformat.layout import Layout, capture_key
from hsformat.problems import ContractMismatch, Problem, problem

__all__ = ["LastOption", "eagle3_depths", "make_captures", "make_contract", "parse_layers"]

LastOption = Literal["pre", "post", "none"]


def eagle3_depths(num_layers: int) -> tuple[int, int, int]:
    """Return the aux depths that EAGLE-3 trainers and engines use by convention: 2, N//2, N-3.

    vLLM 0.32.0 and SGLang 0.5.23 feed a draft whose config names no layers exactly these (run on 30 layers: 2, 15, 27).

    Raises
    ------
    ContractMismatch
        HS304: the target is so shallow that two of them collide or one is not a depth; some tools then drop a slot
        without a word (NeMo Automodel PR#2256).
    """
    depths = (2, num_layers // 2, num_layers - 3)
    if not 2 < depths[1] < depths[2]:
        raise ContractMismatch(
            problem(
                "HS304",
                where="--layers eagle3",
                got=f"depths {list(depths)} of a target of {num_layers} layers",
                expected="three different depths in ascending order",
                fix="name the depths, for example --layers 1,2,3",
            )
        )
    return depths


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the aux depths, in order, of ``eagle3`` or a list such as ``2,15,27``.

    Raises
    ------
    ContractMismatch
        HS304, one problem an entry that is not a depth of the target or stands twice.
    """
    if text.strip() == "eagle3":
        return eagle3_depths(num_layers)
    problems: list[Problem] = []
    depths: list[int] = []
    for part in text.split(","):
        word = part.strip()
        depth = int(word) if word.isascii() and word.isdigit() else -1
        if depth < 0 or depth > num_layers:
            expected = f"a depth from 0 to {num_layers}, or eagle3 alone"
            fix = "depth d is the residual stream after d decoder layers"
            problems.append(problem("HS304", where="--layers", got=repr(word), expected=expected, fix=fix))
        elif depth in depths:
            problems.append(
                problem("HS304", where="--layers", got=f"{depth} twice", expected="each depth once", fix="name it once")
            )
        depths.append(depth)
    if problems:
        raise ContractMismatch(problems)
    return tuple(depths)


def make_captures(num_layers: int, aux: Sequence[int], last: LastOption, dtype: StateDtype) -> tuple[Capture, ...]:
    """Return the captures of an extraction, ascending; the parameters are those of :func:`make_contract`."""
    keys = {(depth, False) for depth in aux}
    if last != "none":
        keys.add((num_layers, last == "post"))
    return tuple(
        Capture(depth=depth, norm="final" if normed else "none", dtype=dtype) for depth, normed in sorted(keys)
    )


def make_contract(
    target: TargetModel,
    *,
    tokenizer_digest: str,
    aux: Sequence[int],
    last: LastOption,
    codec: Literal["compact", "fast"],
) -> Contract:
    """Return the contract of an extraction: captures in the dtype that the target runs in, ascending.

    Parameters
    ----------
    aux
        Depths in the order in which ``fc`` concatenates them.
    last
        ``pre``: depth N before the final norm; ``post``: after it; ``none``: no last capture.
    """
    n = target.num_layers
    return Contract(
        spec_version=SPEC_VERSION,
        target=target,
        tokenizer_digest=tokenizer_digest,
        captures=make_captures(n, aux, last, target.dtype),
        positions="1d",
        codec=codec,
        fields=(),
        layout=Layout(
            aux=tuple(capture_key(d) for d in aux),
            last=None if last == "none" else capture_key(n, normed=last == "post"),
        ),
    )
