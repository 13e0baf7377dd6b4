"""What can be proved of an engine's states when it is started, without loading the target beside it.

Short random requests are run and compared with each other and with the two ends of the target, whose tensors are read
from its folder one by one:

1. no state is NaN, infinite or all zero (HS201, HS202), and no two captures hold the same numbers (HS204);
2. depth 0 is the embedding's rows of the tokens (HS206), and no other capture is (HS204);
3. depth N is before or after the final norm, as its capture says (HS205);
4. each token that the target wrote greedily is the argmax of what the norm and the head make of the last capture
   (HS206), which a state of another depth or another row is not; where given tokens are run, the token that the
   engine writes all the same;
5. requests in one batch have the states that they have alone, row by row, a request that is repeated has the same ones,
   and two that begin alike begin with the same states and go on with others (HS206): so rows are neither a neighbour's
   nor shifted, and none comes from a cache of another request.

What it cannot prove: that a capture between the ends is of its very depth and not of the next one. That rests on the
engine's row in ``hsformat.engines``, which was proved against Transformers for a version and an architecture.

Shapes: S states, H hidden, R rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsformat.contract import Capture
from hsformat.dtypes import to_float32
from hsformat.extraction.protocol import ExtractionRequest
from hsformat.layout import parse_capture_key
from hsformat.problems import HsError, Problem, problem
from hsformat.record import TokenSample
from hsformat.target.config import read_config
from hsformat.target.ends import TargetEnds, open_ends
from hsformat.validate.embedding import embedding_problems
from hsformat.validate.excerpt import Excerpt
from hsformat.validate.finalnorm import final_norm_problems
from hsformat.validate.greedy import greedy_problems
from hsformat_extractors._tolerance import BATCH_TOLERANCE, TOLERANCE
from hsformat_extractors.hosted.flow import Flow

__all__ = ["prove"]

LENGTHS = (13, 11, 7, 12, 5, 9, 3, 10, 6, 8, 4, 2)
"""Of the requests that are run together and alone, in no order (speculators PR#365: req_10 before req_2).

With those that share a beginning and some that are repeated there are 32 runs: from so many the tokens are judged."""
SHARED, LONGER = 8, 16
NEW_TOKENS = 8
SAME = 1e-6
"""Relative error below which two captures are one and the same tensor."""

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """One request that ran: its tokens with what was written, and the states as float32, [S, H] a key."""

    name: str
    prompt: int
    tokens: npt.NDArray[np.int64]
    next_token: int | None
    states: Mapping[str, Rows]

    def given(self, key: str) -> Rows:
        """Return the states of the prompt's tokens, which do not depend on what was written."""
        return self.states[key][: self.prompt]


def prove(flow: Flow, *, forbidden: Sequence[int] = ()) -> None:
    """Run the requests of the proof and compare.

    Parameters
    ----------
    forbidden
        Ids that random requests leave out: those of special tokens, which may stand for an image.

    Raises
    ------
    HsError
        All that was found: HS101, HS102, HS109, HS201, HS202, HS204, HS205, HS206, HS207, HS409; HS410 of the engine.
    ForeignFileError
        HS411, HS602: the target's embedding, norm or head cannot be read.
    """
    request = flow.request
    new = min(NEW_TOKENS, request.generation.max_new_tokens or 0) if request.generation.mode != "none" else 0
    room = flow.limits.max_tokens - new
    samples = _samples(request.target.vocab_size, room, forbidden)
    twelve, (first, second) = samples[: len(LENGTHS)], samples[len(LENGTHS) :]
    together = [*twelve, first, second, twelve[0]]
    windows = [together, *([s] for s in (*twelve, first, second, *twelve[:3]))]
    try:
        found = flow.ask(windows, max_new_tokens=new)
    except HsError as e:
        raise (HsError(_once(e.problems)) if any(p.record for p in e.problems) else e) from e
    asked = list(itertools.chain.from_iterable(windows))
    ran = [
        _Ran(
            name=s.id,
            prompt=len(s),
            tokens=np.array(answer.tokens, np.int64),
            next_token=answer.next_token,
            states={c.key: to_float32(arrays[c.key]) for c in request.captures},
        )
        for s, (answer, arrays) in zip(asked, found, strict=True)
    ]
    problems = list(_compare(ran, request, together=len(together), greedy=request.generation.mode != "sampled"))
    if problems:
        raise HsError(problems)


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Return one problem for each capture and code: a request of the proof is none of the caller's."""
    seen: dict[tuple[str, str], list[Problem]] = {}
    for p in problems:
        capture = re.search(r"hidden\['\w+'\]", p.where)
        seen.setdefault((p.code, capture[0] if capture else ""), []).append(p)
    return [
        dataclasses.replace(
            same[0],
            where=f"proof of the engine: {capture}" if capture else "proof of the engine",
            got=same[0].got + (f", and {len(same) - 1} more requests" if len(same) > 1 else ""),
            record=None,
        )
        for (_, capture), same in seen.items()
    ]


def _samples(vocab_size: int, room: int, forbidden: Sequence[int]) -> list[TokenSample]:
    """Return the twelve, then two of a common beginning, as long as the engine allows."""
    every = np.arange(vocab_size, dtype=np.int32)
    allowed = np.setdiff1d(every, np.array(forbidden, np.int32))
    allowed = allowed if len(allowed) >= len(every) // 2 else every  # a vocabulary of added tokens alone
    rng = np.random.default_rng(0)
    draw = [rng.choice(allowed, n).astype(np.int32) for n in (*LENGTHS, LONGER, LONGER)]
    draw[-1][:SHARED] = draw[-2][:SHARED]
    return [
        TokenSample(
            id=f"proof-{i}", input_ids=ids[: max(1, room)], loss_mask=np.zeros(len(ids[: max(1, room)]), np.uint8)
        )
        for i, ids in enumerate(draw)
    ]


def _compare(ran: Sequence[_Ran], request: ExtractionRequest, *, together: int, greedy: bool) -> Iterator[Problem]:
    faults = [*_numbers(ran), *_same_tensor(ran)]
    yield from faults
    if any(p.code == "HS201" for p in faults):
        return
    yield from _ends(ran, request, greedy=greedy)
    dtype = request.target.dtype
    alone = {r.name: r for r in ran[together:]}
    for key in ran[0].states:
        for r in ran[:together]:
            if (other := alone.get(r.name)) is not None:
                yield from _rows(
                    key, r.given(key), other.given(key), f"{r.name} in a batch of {together}, and alone", dtype
                )
        first, second = ran[together - 3 : together - 1]
        a, b = first.given(key)[:SHARED], second.given(key)[:SHARED]
        yield from _rows(
            key, a, b, f"the first {len(a)} tokens of {first.name} and {second.name}, which are the same", dtype
        )
        yield from _goes_on(key, first, second)


def _numbers(ran: Sequence[_Ran]) -> Iterator[Problem]:
    for key in ran[0].states:
        every = np.concatenate([r.states[key] for r in ran])
        if bad := int((~np.isfinite(every)).any(axis=1).sum()):
            yield _problem("HS201", key, f"NaN or infinity in {bad} of {len(every)} rows", "finite numbers",
                           "check the target's weights, or run it in another dtype")  # fmt: skip
        # A row of the embedding may be zero, that of a padding token; depth 0 is compared with it (``_ends``).
        if parse_capture_key(key)[0] and (zero := int((~every.any(axis=1)).sum())):
            yield _problem("HS202", key, f"{zero} of {len(every)} rows are all zero", "states",
                           "switch off the engine's prefix cache and speculative decoding")  # fmt: skip


def _same_tensor(ran: Sequence[_Ran]) -> Iterator[Problem]:
    keys = list(ran[0].states)
    for i, key in enumerate(keys):
        for other in keys[:i]:
            pairs = [(r.states[key], r.states[other]) for r in ran]
            if all(a.shape == b.shape and _error(a, b) <= SAME for a, b in pairs):
                yield _problem(
                    "HS204", key, f"the numbers of {other}", f"states of {key}, which is another capture",
                    "the engine repeats a layer in the place of one that it does not capture: extract other depths, or "
                    "prove the engine's numbering (hsformat engines probe)",
                )  # fmt: skip


def _ends(ran: Sequence[_Ran], request: ExtractionRequest, *, greedy: bool) -> Iterator[Problem]:
    """Compare with embedding, final norm and head, as ``hsformat validate --target`` does."""
    ends, where = open_ends(request.model, request.target), "proof"
    for capture in request.captures:
        key = capture.key
        excerpts = [_excerpt(r, key, np.arange(len(r.states[key]))) for r in ran]
        if capture.norm == "none" and not (capture.depth == 0 and _learned_positions(request)):
            yield from embedding_problems(excerpts, ends, capture=capture, where=where)
        if capture.depth == request.target.num_layers:
            wrong = final_norm_problems(excerpts, ends, capture=capture, where=where)
            yield from wrong
            if greedy and not wrong:
                yield from _greedy(ran, ends, capture, where)


def _greedy(ran: Sequence[_Ran], ends: TargetEnds, capture: Capture, where: str) -> Iterator[Problem]:
    """Compare with what was written after each prompt, or would have been."""
    predicting = []
    for r in ran:
        tokens, states_SH = r.tokens, r.states[capture.key]
        if len(tokens) == r.prompt and r.next_token is not None:
            tokens = np.append(tokens, r.next_token)
        at = np.arange(r.prompt - 1, min(len(tokens) - 1, len(states_SH)))
        predicting.append(_excerpt(dataclasses.replace(r, tokens=tokens), capture.key, at))
    yield from greedy_problems(predicting, ends, capture=capture, where=where)


def _excerpt(r: _Ran, key: str, at: npt.NDArray[np.int64]) -> Excerpt:
    return Excerpt(
        where=f"{r.name}: hidden[{key!r}]", record=r.name, key=key, input_ids=r.tokens, at=at, states=r.states[key][at]
    )


def _learned_positions(request: ExtractionRequest) -> bool:
    """Return whether depth 0 holds more than the embedding; of an unknown family without RoPE it may."""
    family = read_config(Path(request.model)).family
    return family.learned_positions if family is not None else not request.target.rope


def _rows(key: str, got_SH: Rows, want_SH: Rows, what: str, dtype: str) -> Iterator[Problem]:
    """Compare rows of the same tokens after the same tokens: near to each other, and nearer than any other row is."""
    error = _error(got_SH, want_SH)
    if not error <= BATCH_TOLERANCE[dtype]:
        yield _problem("HS206", key, f"{what}: relative error {error:.2g}", f"at most {BATCH_TOLERANCE[dtype]:g}",
                       _MATCH)  # fmt: skip
        return
    distance_SS = np.linalg.norm(got_SH[:, None].astype(np.float64) - want_SH[None], axis=-1)
    own_S = np.diagonal(distance_SS)
    size_S = np.maximum(np.linalg.norm(want_SH, axis=1), np.finfo(np.float32).tiny)
    wrong_S = (distance_SS.argmin(axis=1) != np.arange(len(own_S))) & (own_S > TOLERANCE[dtype] * size_S)
    if wrong_S.any():
        row = int(wrong_S.argmax())
        yield _problem("HS206", key, f"{what}: row {row} is nearest to row {int(distance_SS[row].argmin())}",
                       "each row nearest to its own", _MATCH)  # fmt: skip


def _goes_on(key: str, first: _Ran, second: _Ran) -> Iterator[Problem]:
    """Tell where states do not follow from the tokens: two requests go on with different ones."""
    a, b = first.given(key)[SHARED:], second.given(key)[SHARED:]
    if len(a) and _error(a, b) <= SAME:
        yield _problem("HS206", key, f"{first.name} and {second.name} have the same states after different tokens",
                       "states that follow from the tokens", _MATCH)  # fmt: skip


_MATCH = (
    "switch off the engine's prefix cache; if it returns, report it to the engine with its version: states that depend "
    "on a request's neighbours are worth nothing"
)


def _error(got_SH: Rows, want_SH: Rows) -> float:
    """Return the mean over rows of ``|got - want| / |want|``."""
    got, want = got_SH.astype(np.float64), want_SH.astype(np.float64)
    size = np.maximum(np.linalg.norm(want, axis=-1), np.finfo(np.float32).tiny)
    return float((np.linalg.norm(got - want, axis=-1) / size).mean())


def _problem(code: str, key: str, got: str, expected: str, fix: str) -> Problem:
    return problem(code, where=f"proof of the engine: capture {key}", got=got, expected=expected, fix=fix)
