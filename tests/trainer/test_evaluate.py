"""Acceptance by walking, against a simulation of an engine, token by token."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer.plain_draft import PlainDraft
from trainer.tiny_drafts import AUX, DEPTH, GIVEN, GREEDY, VOCAB, mixed_pack, random_draft, random_target, record_of

from hsformat.layout import Layout
from hsformat.torch import pack
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.evaluate import (
    evaluate,
    evaluate_records,
    summarize,
    walk,
    walk_expected,
)
from hsformat_trainer.objective import predictions

pytestmark = pytest.mark.needs("torch")

LAYOUT = Layout(aux=AUX, last=f"d{DEPTH}")
SOME_IDS = [i for i in range(VOCAB) if i % 3 != 1]


def engine(draft, target, record, start, end, *, steps, target_ids):
    """Serve one answer as an engine does: draft from what it knows by then, verify, go on; return accepted a round."""
    ids, plain = record.input_ids.tolist(), PlainDraft(draft.spec, dict(draft.named_parameters()))
    captures = torch.stack([record.hidden[a] for a in AUX]).double()
    embedding = target.embed_weight.double()
    known, rounds = start + 1, []  # tokens that are said: the prompt and the first of the answer
    while known < end:
        caches = [[] for _ in range(draft.spec.num_layers)]
        for row in range(known - 1):  # the prefill of the draft, with the target's own states
            head, fed = plain.row(plain.combine(captures[:, row]), embedding[ids[row + 1]], float(row), caches)
        drafted = []
        for k in range(steps):
            best = int((draft.lm_head.weight.double() @ head).argmax())
            drafted.append(best if target_ids is None else target_ids[best])
            if k + 1 < steps:
                head, fed = plain.row(fed, embedding[drafted[-1]], float(known - 1 + k), caches)
        accepted = 0
        while known + accepted < end and accepted < steps and drafted[accepted] == ids[known + accepted]:
            accepted += 1
        rounds.append(accepted)
        known += accepted + 1
    return rounds


def agree(draft, target, record, start, end, *, steps):
    """Let the target say what is drafted, for some tokens of each round."""
    row = start - 1
    for n in itertools.cycle((3, 0, 1, 2)):
        for k in range(n):
            batch = TrainBatch.from_packed(pack([record]), aux=AUX, last=f"d{DEPTH}", steps=steps)
            rows = batch.steps[k].rows.tolist()
            if row in rows and row + 2 + k < end:
                record.input_ids[row + 2 + k] = predictions(draft, target, batch, steps=steps).drafted[k][
                    rows.index(row)
                ]
        row += n + 1
        if row + 2 >= end:
            break


@pytest.mark.parametrize(("target_ids", "options"), [(None, {}), (SOME_IDS, {"norm_output": True, "fc_norm": True})])
def test_the_walk_is_what_an_engine_does_with_the_answer(target_ids, options):
    target = random_target()
    draft = random_draft(target, target_ids=target_ids, **options)
    masks = [[0, 0, 0] + [1] * 11, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0], [1] * 7, [0, 0, 1], [0, 0, 0, 1, 1]]
    records = [record_of(f"r{i}", m, seed=i, generation=GREEDY) for i, m in enumerate(masks)]
    steps = 3
    spans = [[(3, 14)], [(1, 5), (7, 13)], [(1, 7)], [(2, 3)], [(3, 5)]]  # r2 has no prompt: nothing drafts its token 1
    for record, parts in zip(records, spans, strict=True):
        for start, end in parts:
            agree(draft, target, record, start, end, steps=steps)
    scores = evaluate_records(
        draft, target, [pack(records[:2]), pack(records[2:])], layout=LAYOUT, steps=steps
    )  # fmt: skip
    for record, score, parts in zip(records, scores, spans, strict=True):
        rounds = [n for a, b in parts for n in engine(draft, target, record, a, b, steps=steps, target_ids=target_ids)]
        assert score.rounds == len(rounds), record.id
        assert score.accepted == tuple(float(sum(n > k for n in rounds)) for k in range(steps)), record.id
        assert score.exact
    assert sum(s.accepted[-1] for s in scores) > 0  # all K of a round, somewhere
    assert sum(s.accepted[0] for s in scores) < sum(s.rounds for s in scores)  # and none, somewhere
    found = summarize(scores, steps=steps)
    assert found.acceptance_length == 1 + sum(map(sum, (s.accepted for s in scores))) / found.rounds
    assert not found.estimate


def test_rounds_at_the_end_of_an_answer():
    """The last round drafts K tokens, whatever is left; nothing past the end counts as accepted."""
    right = np.ones((3, 10), np.bool_)
    for k in range(3):
        right[k, 10 - 2 - k :] = False  # no such token
    # The answer is tokens 2..9: token 2 is the target's. Round 1 at row 1 drafts 3, 4, 5 and the target adds 6; round 2
    # at row 5 drafts 7, 8, 9, and is the last, since 9 is the end.
    assert [walk(right, 2, 10)[0], walk(right, 2, 10)[1].tolist()] == [2, [2, 2, 2]]
    # An answer that ends at 8: round 2 drafts 7, 8 and one past the end.
    short = right[:, :9].copy()
    for k in range(3):
        short[k, 9 - 2 - k :] = False
    assert [walk(short, 2, 9)[0], walk(short, 2, 9)[1].tolist()] == [2, [2, 2, 1]]
    # One token, and two: nothing to draft, one round.
    assert [walk(right, 9, 10)[0], walk(right, 8, 10)[0]] == [0, 1]


def test_expected_walk_is_the_mean_of_walks():
    made = np.random.default_rng(0)
    chance = made.uniform(0.2, 0.9, (2, 12))
    for k in range(2):
        chance[k, 12 - 2 - k :] = 0
    total, tallies, n = 0, np.zeros(2), 4000
    for _ in range(n):
        rounds, accepted = walk(made.uniform(size=chance.shape) < chance, 3, 12)
        total, tallies = total + rounds, tallies + accepted
    rounds, accepted = walk_expected(chance, 3, 12)
    assert rounds == pytest.approx(total / n, rel=0.02)
    assert accepted == pytest.approx(tallies / n, rel=0.03)
    certain = (chance > 0.5).astype(float)
    assert walk_expected(certain, 3, 12)[0] == walk(certain > 0, 3, 12)[0]


@pytest.mark.parametrize("target_ids", [None, SOME_IDS])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_acceptance_at_a_temperature_is_the_overlap_of_whole_distributions(target_ids, temperature):
    packed, target = mixed_pack(), random_target(head={"bias": True, "softcap": 5.0, "scale": 0.5, "padded_vocab": 41})
    draft = random_draft(target, target_ids=target_ids)
    batch = TrainBatch.from_packed(packed, aux=AUX, last=f"d{DEPTH}", steps=2)
    said = predictions(draft, target, batch, steps=2, temperature=temperature)
    for k, rows in enumerate(batch.steps):
        last = batch.last[batch.distributions[rows.distribution]]
        logits = target.logits(last, normed=False)
        hidden = draft(batch, target)[k]
        q = torch.softmax(hidden @ draft.lm_head.weight.T / temperature, -1)
        whole = torch.zeros_like(logits)
        whole[:, list(range(VOCAB)) if target_ids is None else target_ids] = q
        overlap = torch.minimum(torch.softmax(logits / temperature, -1), whole).sum(-1)
        torch.testing.assert_close(said.accepted[k], overlap, check_dtype=False)
        assert said.expected[k].tolist() == logits.argmax(-1).tolist()


def test_who_wrote_a_record_decides_what_is_exact():
    packed, target = mixed_pack(), random_target()
    draft = random_draft(target)
    count = len(packed)

    def found(*generations, **options):
        described = replace(packed, generations=generations)
        return evaluate(draft, target, [described], layout=LAYOUT, steps=2, **options)

    assert found(*[GREEDY] * count).basis.startswith("exact")
    mixed = found(GIVEN, *[GREEDY] * (count - 1))
    assert (mixed.estimate, f"1 of {count} records" in mixed.basis) == (True, True)
    warm = found(*[GREEDY] * count, temperature=0.7)
    assert (warm.estimate, "temperature 0.7" in warm.basis) == (True, True)
    json.dumps(warm.to_json())


def test_interval_over_records():
    """Records that differ give a wide interval, equal ones none; shares of processes add up."""
    packed, target = mixed_pack(), random_target()
    draft = random_draft(target)
    scores = evaluate_records(draft, target, [packed], layout=LAYOUT, steps=2)
    found = summarize(scores, steps=2)
    assert found == summarize(scores[:3] + scores[3:], steps=2)
    low, high = found.interval
    assert low <= found.acceptance_length <= high
    assert (
        summarize([scores[0]] * 5, steps=2).interval
        == (pytest.approx(1 + sum(scores[0].accepted) / scores[0].rounds),) * 2
    )
    assert summarize(scores[:1], steps=2).interval is None
    nothing = summarize([], steps=2)
    assert (nothing.acceptance_length, nothing.records, nothing.accuracy) == (1.0, 0, (0.0, 0.0))
