"""Evaluation that tells the truth: accuracy by position, and acceptance by walking a record as an engine does.

An engine drafts K tokens, the target accepts those before its first objection and adds one of its own, and the next
round begins behind that. So a round begins only where the last one stopped, which is a harder place than most: a mean
over all positions was 8% above what vLLM measured, and the walk within 0.001 of it (docs/benchmarks.md).

In a record, for an assistant span of tokens [a, b): the target says token a after the prompt, and the first round
drafts at row a-1 (its token is ids[a]). A round at row t may find its step k right where token t+2+k is still in the
span. After ``n`` accepted tokens and the target's own, the next round is at row t+n+1, as long as the last token is not
yet known to be said: t+1 <= b-2. What is drafted past the end of the span counts as drafted and not as accepted, since
nobody knows what the target would have said; an engine counts it so, or as accepted, in the last round alone.

The walk is exact for greedy records at temperature 0: the target would say the record's own tokens, whatever is
drafted. For others it is an estimate: the target's argmax after the record's own tokens, and at a temperature the
probability ``sum min(p, q)`` with which a drafted token is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.layout import Layout
from hsformat.problems import InvalidRecord, Problem
from hsformat.torch import Packed
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.draft import Draft
from hsformat_trainer.finite import is_finite, states_not_finite
from hsformat_trainer.objective import predictions
from hsformat_trainer.target_head import TargetHead

__all__ = [
    "Evaluation",
    "RecordScore",
    "acceptance_length",
    "evaluate",
    "evaluate_records",
    "summarize",
    "walk",
    "walk_expected",
]

RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordScore:
    """What one record gives.

    Attributes
    ----------
    id
        Of the record.
    exact
        Whether its walk is what an engine would do.
    rounds
        Rounds of drafting; expected ones at a temperature.
    accepted
        A position of the draft (K): rounds in which it and all before it are accepted.
    counted, hits, covered, prefixes
        A position: supervised rows; those where the draft's argmax is the target's over its whole vocabulary; those
        where the target's is in the draft's vocabulary; those where it and all positions before it are hits.
    """

    id: str
    exact: bool
    rounds: float
    accepted: tuple[float, ...]
    counted: tuple[int, ...]
    hits: tuple[int, ...]
    covered: tuple[int, ...]
    prefixes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What held-out records say of a draft.

    Attributes
    ----------
    acceptance_length
        Tokens a round: 1 + accepted / rounds, as engines report it. 1.0 if there is no round.
    interval
        Of it, 95%: percentiles of a bootstrap over records (2,000 resamples with a fixed seed, each the ratio of its
        sums). None for fewer than two records with a round.
    acceptance_by_position
        Share of the rounds in which a position and all before it are accepted.
    accuracy
        A position, over all supervised rows: draft's argmax = target's argmax over its whole vocabulary.
    prefix_accuracy
        The same, of rows where all positions before are right, too: higher than what serving shows; for comparison
        with trainers that report it.
    coverage
        Share of the rows for which the target's argmax is in the draft's vocabulary.
    records, rounds, steps
        What it is over.
    temperature
        0: greedy.
    estimate
        Whether the acceptance is an estimate; ``basis`` says why.
    """

    acceptance_length: float
    interval: tuple[float, float] | None
    acceptance_by_position: tuple[float, ...]
    accuracy: tuple[float, ...]
    prefix_accuracy: tuple[float, ...]
    coverage: tuple[float, ...]
    records: int
    rounds: float
    steps: int
    temperature: float
    estimate: bool
    basis: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return asdict(self)


def evaluate(
    draft: Draft,
    target: TargetHead,
    batches: Iterable[Packed],
    *,
    layout: Layout,
    steps: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Evaluation:
    """Evaluate a draft: :func:`evaluate_records`, then :func:`summarize`."""
    scores = evaluate_records(draft, target, batches, layout=layout, steps=steps, temperature=temperature)
    return summarize(scores, steps=steps, temperature=temperature, seed=seed)


def evaluate_records(
    draft: Draft,
    target: TargetHead,
    batches: Iterable[Packed],
    *,
    layout: Layout,
    steps: int,
    temperature: float = 0.0,
) -> list[RecordScore]:
    """Return the score of every record, in the order of the batches; several processes may each do some of them.

    Parameters
    ----------
    layout
        Which captures the draft is fed, and which gives the target's distribution.
    steps
        K, tokens drafted a round.
    temperature
        At which draft and target sample; 0: greedy.

    Raises
    ------
    ValueError
        The layout has no ``last``, or the temperature is negative.
    InvalidRecord
        HS201: states of records are NaN or infinite, with the records of all batches. Whatever the draft said there
        would count as a miss.
    """
    if layout.last is None:
        raise ValueError("the layout names no last capture, so that the target's distribution is not known")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, and must be at least 0")
    device = target.embed_weight.device
    was_training = draft.training
    draft.eval()
    scores: list[RecordScore] = []
    broken: list[Problem] = []
    try:
        for packed in batches:
            batch = TrainBatch.from_packed(packed, aux=layout.aux, last=layout.last, steps=steps, rule="serving")
            batch = batch.to(device)
            if all(map(is_finite, (*batch.aux, batch.last))):
                scores += _scores(draft, target, packed, batch, temperature)
            else:
                broken += states_not_finite(packed)
    finally:
        draft.train(was_training)
    if broken:
        raise InvalidRecord(broken)
    return scores


def summarize(scores: Sequence[RecordScore], *, steps: int, temperature: float = 0.0, seed: int = 0) -> Evaluation:
    """Return the evaluation of scores, of all processes together.

    Parameters
    ----------
    seed
        Of the bootstrap.
    """
    rounds_R = np.array([s.rounds for s in scores], np.float64)
    accepted_RK = np.array([s.accepted for s in scores], np.float64).reshape(len(scores), steps)

    def sums(name: str) -> npt.NDArray[np.int64]:
        tallies: npt.NDArray[np.int64] = (
            np.array([getattr(s, name) for s in scores], np.int64).reshape(len(scores), steps).sum(0)
        )
        return tallies

    def shares(part_K: npt.NDArray[Any], whole: Any) -> tuple[float, ...]:
        whole_K = np.broadcast_to(whole, part_K.shape)
        return tuple(float(p / w) if w else 0.0 for p, w in zip(part_K, whole_K, strict=True))

    counted_K, rounds = sums("counted"), float(rounds_R.sum())
    exact = sum(s.exact for s in scores)
    estimate = exact < len(scores)
    if temperature > 0:
        basis = f"estimate: sum min(p, q) at temperature {temperature:g}, along the record's own tokens"
    elif estimate:
        basis = f"estimate: {len(scores) - exact} of {len(scores)} records were not written greedily by the target"
    else:
        basis = "exact: every record was written greedily by the target"
    return Evaluation(
        acceptance_length=1.0 + (float(accepted_RK.sum()) / rounds if rounds else 0.0),
        interval=_interval(accepted_RK.sum(1), rounds_R, seed),
        acceptance_by_position=shares(accepted_RK.sum(0), rounds),
        accuracy=shares(sums("hits"), counted_K),
        prefix_accuracy=shares(sums("prefixes"), counted_K),
        coverage=shares(sums("covered"), counted_K),
        records=len(scores),
        rounds=rounds,
        steps=steps,
        temperature=temperature,
        estimate=estimate,
        basis=basis,
    )


def acceptance_length(scores: Sequence[RecordScore]) -> float:
    """Return the acceptance length of scores, as :func:`summarize` does; 1.0 without a round."""
    rounds = sum(s.rounds for s in scores)
    return 1.0 + (sum(sum(s.accepted) for s in scores) / rounds if rounds else 0.0)


def walk(right_KT: npt.NDArray[np.bool_], start: int, end: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Walk one span in rounds.

    Parameters
    ----------
    right_KT
        Whether step k of row t is what the target says; False where token t+2+k is not in the span.
    start, end
        The span's tokens, [a, b).

    Returns
    -------
    The number of rounds, and [K] in how many of them a step and all before it are right.
    """
    steps = len(right_KT)
    accepted_K, rounds, t = np.zeros(steps, np.int64), 0, max(start - 1, 0)
    while t + 1 <= end - 2:
        rounds += 1
        n = 0
        while n < steps and right_KT[n, t]:
            n += 1
        accepted_K[:n] += 1
        t += n + 1
    return rounds, accepted_K


def walk_expected(chance_KT: npt.NDArray[np.float64], start: int, end: int) -> tuple[float, npt.NDArray[np.float64]]:
    """Return what :func:`walk` gives on average, if step k of row t is accepted with a chance, each by itself.

    Every row is begun at with the chance that a round before it ends there.
    """
    steps, first = len(chance_KT), max(start - 1, 0)
    begins = np.zeros(max(end, first) + steps + 2)
    begins[first] = 1.0
    accepted_K, rounds = np.zeros(steps), 0.0
    for t in range(first, end - 2):
        here = begins[t]
        if here == 0.0:
            continue
        rounds += here
        reached = here * np.cumprod(chance_KT[:, t])
        accepted_K += reached
        exactly = -np.diff(np.concatenate(([here], reached, [0.0])))
        begins[t + 1 : t + 2 + steps] += exactly
    return rounds, accepted_K


def _scores(
    draft: Draft,
    target: TargetHead,
    packed: Packed,
    batch: TrainBatch,
    temperature: float,
) -> list[RecordScore]:
    said = predictions(draft, target, batch, steps=len(batch.steps), temperature=temperature)
    steps, total = len(batch.steps), batch.num_tokens
    counted, hit, inside, as_written = np.zeros((4, steps, total), np.bool_)
    chance = np.zeros((steps, total))
    for k, rows in enumerate(batch.steps):
        at = (rows.rows if rows.loss is None else rows.rows[rows.loss]).cpu().numpy()
        drafted = said.drafted[k]
        counted[k, at] = True
        hit[k, at] = (drafted == said.expected[k]).cpu().numpy()
        inside[k, at] = said.covered[k].cpu().numpy()
        as_written[k, at] = (drafted == rows.targets).cpu().numpy()
        if said.accepted is not None:
            chance[k, at] = said.accepted[k].double().cpu().numpy()
    prefix = np.logical_and.accumulate(hit, axis=0)
    mask, starts = packed.loss_mask.cpu().numpy(), packed.cu_seqlens.tolist()
    scores = []
    for record_id, generation, (first, end) in zip(packed.ids, packed.generations, pairwise(starts), strict=True):
        here = slice(first, end)
        greedy = generation.mode == "greedy"
        rounds, accepted_K = 0.0, np.zeros(steps)
        for a, b in _spans(mask[here]):
            if temperature > 0:
                more, taken_K = walk_expected(chance[:, here], a, b)
            else:
                right = as_written if greedy else hit
                n, counts_K = walk(right[:, here], a, b)
                more, taken_K = float(n), counts_K.astype(np.float64)
            rounds, accepted_K = rounds + more, accepted_K + taken_K
        tallies = {
            name: tuple(values[:, here].sum(1).tolist())
            for name, values in (("counted", counted), ("hits", hit), ("covered", inside), ("prefixes", prefix))
        }
        scores.append(
            RecordScore(
                id=record_id,
                exact=greedy and temperature == 0,
                rounds=rounds,
                accepted=tuple(accepted_K.tolist()),
                **tallies,
            )
        )
    return scores


def _spans(mask_T: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return [a, b) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask_T, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _interval(
    accepted_R: npt.NDArray[np.float64], rounds_R: npt.NDArray[np.float64], seed: int
) -> tuple[float, float] | None:
    there = rounds_R > 0
    accepted_R, rounds_R = accepted_R[there], rounds_R[there]
    n = len(rounds_R)
    if n < 2:
        return None
    chosen = np.random.Generator(np.random.PCG64(seed))
    lengths = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        counts = np.bincount(chosen.integers(0, n, n), minlength=n)
        lengths[i] = 1.0 + (counts @ accepted_R) / (counts @ rounds_R)
    low, high = np.quantile(lengths, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
