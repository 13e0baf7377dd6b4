"""Training-time test against dense attention and plain losses in float64: values, gradients, counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.plain_draft import PlainDraft
from trainer.tiny_drafts import (
    AUX,
    DEPTH,
    GIVEN,
    VOCAB,
    mixed_pack,
    on_policy,
    random_draft,
    random_target,
    record_of,
)

from hsformat.align import step_view, supervised
from hsformat.record import Generation
from hsformat.torch import pack
from hsformat_trainer import attention, coverage, objective
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.objective import ttt_loss

pytestmark = pytest.mark.needs("torch")

SOME_IDS = [i for i in range(VOCAB) if i % 3 != 1]


def plain_loss(draft, target, packed, *, steps, decay, name, rule, target_ids):
    """The same by loops over records, steps and rows; differentiable."""
    weights = {**dict(draft.named_parameters()), **dict(draft.named_buffers())}
    plain = PlainDraft(draft.spec, weights)
    embedding = target.embed_weight.double() if draft.embed_tokens is None else draft.embed_tokens.weight
    ids_in = list(range(VOCAB)) if target_ids is None else target_ids
    sums, hits, counted, covered = ([0.0] * steps for _ in range(4))
    for record in packed.unpack():
        captures = torch.stack([record.hidden[a] for a in AUX]).double()
        out = plain.record(record.input_ids.tolist(), record.position_ids, captures, embedding, steps)
        for k in range(steps):
            view, carries = step_view(record.num_tokens, k), supervised(record.loss_mask, k, rule=rule)
            for t in carries.nonzero()[:, 0].tolist():
                last = record.hidden[f"d{DEPTH}"][view.distribution][t].double()
                full = target.logits(last, normed=False)
                z = weights["lm_head.weight"].double() @ out[k, t]
                counted[k] += 1
                best = int(full.argmax())
                if best not in ids_in:
                    continue
                covered[k] += 1
                hits[k] += ids_in[int(z.argmax())] == best
                logp, logq = full[ids_in].log_softmax(-1), z.log_softmax(-1)
                p, q = logp.exp(), logq.exp()
                kl = (p * (logp - logq)).sum()
                accepted = torch.minimum(p, q).sum()
                weight = torch.exp(-3 * accepted).detach()
                sums[k] = (
                    sums[k]
                    + {
                        "kl": kl,
                        "ce": -logq[ids_in.index(best)],
                        "reverse_kl": (q * (logq - logp)).sum(),
                        "lk": weight * kl + (1 - weight) * (1 - accepted),
                    }[name]
                )
    loss = sum(decay**k * sums[k] / counted[k] for k in range(steps) if counted[k])
    return loss, hits, counted, covered


CASES = {
    "kl": {},
    "ce-some-ids": {"name": "ce", "target_ids": SOME_IDS},
    "reverse": {"name": "reverse_kl", "target_ids": SOME_IDS, "steps": 2},
    "lk-four-steps": {"name": "lk", "steps": 4},
    "input-rule": {"rule": "input", "target_ids": SOME_IDS},
    "feature-rule": {"rule": "feature"},
    "norms": {"norm_before_fc": True, "fc_norm": True, "norm_output": True, "attention_bias": True},
    "fc-norm-residual": {"fc_norm": True, "norm_before_residual": True, "train_embedding": True},
    "frozen-head": {"train_head": False, "target_ids": SOME_IDS},
    "two-layers": {"num_layers": 2, "later_layers_norm": "hidden_norm", "steps": 3},
    "three-layers": {"num_layers": 3, "later_layers_norm": "input_layernorm", "target_ids": SOME_IDS},
    "partial": {"rope": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.67}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients_equal_a_dense_reference(case):
    options = {"name": "kl", "steps": 3, "rule": "serving", "target_ids": None} | case
    name, steps, rule, ids = (options.pop(k) for k in ("name", "steps", "rule", "target_ids"))
    packed, target = mixed_pack(), random_target()
    draft = random_draft(target, target_ids=ids, **options)
    batch = TrainBatch.from_packed(packed, aux=AUX, last=f"d{DEPTH}", steps=steps, rule=rule)
    result = ttt_loss(draft, target, batch, steps=steps, decay=0.7, loss=name)
    trained = [(n, p) for n, p in draft.named_parameters() if p.requires_grad]
    got = torch.autograd.grad(result.loss * 2, [p for _, p in trained])
    loss, hits, counted, covered = plain_loss(
        draft, target, packed, steps=steps, decay=0.7, name=name, rule=rule, target_ids=ids
    )
    expected = torch.autograd.grad(loss * 2, [p for _, p in trained])
    torch.testing.assert_close(result.loss, loss, rtol=1e-6, atol=1e-8)
    assert (result.hits.tolist(), result.counted.tolist(), result.covered.tolist()) == (hits, counted, covered)
    assert batch.counts.tolist() == counted
    for (n, _), a, b in zip(trained, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")
        assert b.abs().max() > 0, n


class Shapes(TorchDispatchMode):
    """Collects the shapes of everything that torch computes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in (out if isinstance(out, tuple | list) else [out]) if hasattr(t, "shape")}
        return out


@pytest.mark.parametrize("train_head", [True, False])
def test_memory_grows_neither_with_rows_by_vocabulary_nor_with_rows_by_rows(train_head, monkeypatch):
    """In the forward and the backward pass: no logits of more rows than a chunk, no scores of more than a block."""
    monkeypatch.setattr(objective, "CHUNK_ELEMENTS", 1)  # 64 states
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1)  # 16 queries
    target = random_target()
    draft = random_draft(target, target_ids=SOME_IDS, train_head=train_head)
    batch = TrainBatch.from_packed(
        pack([record_of("r", [0] + [1] * 299)]), aux=AUX, last=f"d{DEPTH}", steps=4, rule="serving"
    )
    with Shapes() as shapes:
        ttt_loss(draft, target, batch, steps=4, decay=0.8, loss="lk").loss.backward()
    vocabularies = {len(SOME_IDS), VOCAB - len(SOME_IDS), VOCAB}
    logits = {s for s in shapes.seen if len(s) == 2 and s[1] in vocabularies}
    assert (64, len(SOME_IDS)) in logits
    assert max(s[0] for s in logits) == 64
    scores = {s for s in shapes.seen if len(s) == 4 and s[-1] > 100}
    assert scores
    assert max(s[2] for s in scores) == 16


def _batch(*records, **options):
    planned = {"aux": AUX, "last": f"d{DEPTH}", "steps": 3, "hashed": True} | options
    return TrainBatch.from_packed(pack(records), **planned)


def test_what_is_known_of_a_state_is_not_computed_again(monkeypatch):
    """Loss, gradient and counts are those of computing it, whatever batch a record was in before."""
    target = random_target()
    draft = random_draft(target, target_ids=SOME_IDS)
    records = [record_of(name, [0] + [1] * n, seed=n) for name, n in (("a", 8), ("b", 13), ("c", 4))]
    known = coverage.Coverage(target)

    def run(batch, coverage):
        draft.zero_grad()
        result = ttt_loss(draft, target, batch, steps=3, decay=0.8, loss="kl", coverage=coverage)
        result.loss.backward()
        return result, draft.fc.weight.grad.clone()

    for first in records:
        run(_batch(first), known)
    plain, gradient = run(_batch(*records), None)
    assert 0 < plain.covered.sum() < plain.counted.sum()

    def never(*_):
        raise AssertionError("logits outside the draft's vocabulary")

    monkeypatch.setattr(coverage, "outside_logits", never)
    monkeypatch.setattr(objective, "outside_logits", never)
    again, same = run(_batch(*reversed(records)), known)
    torch.testing.assert_close(again.loss, plain.loss)
    torch.testing.assert_close(same, gradient)
    for name in ("hits", "counted", "covered"):
        assert torch.equal(getattr(again, name), getattr(plain, name))
    with pytest.raises(AssertionError, match="outside"):  # other states under a known id
        run(_batch(record_of("a", [0] + [1] * 8, seed=3)), known)
    with pytest.raises(AssertionError, match="outside"):  # as many other rows of the same states
        run(_batch(record_of("a", [0, 1, 1, 1, 1, 1, 1, 1, 0], seed=8)), known)


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("rule", ["serving", "input"])
def test_what_the_target_wrote_tells_its_argmax(monkeypatch, rule, hashed):
    """Logits outside the draft's vocabulary are asked for past the answer alone, and the results are the same."""
    target = random_target(dtype=torch.float64, sharpness=4.0)
    draft = random_draft(target, target_ids=SOME_IDS)
    records = [on_policy(target, f"r{i}", i, dtype=torch.float64, missing_state=i == 1) for i in range(3)]
    for record in records:
        record.loss_mask[-2:] = False  # so that under "input" a row is supervised whose target nobody wrote
    batch = _batch(*records, rule=rule, hashed=hashed)
    plain = ttt_loss(draft, target, batch, steps=3, decay=0.8, loss="kl")
    assert 0 < plain.covered.sum() < plain.counted.sum()
    asked = []
    real = coverage.outside_logits

    def counted(target, split, hidden, temperature):
        asked.append(len(hidden))
        return real(target, split, hidden, temperature)

    monkeypatch.setattr(coverage, "outside_logits", counted)
    monkeypatch.setattr(objective, "outside_logits", counted)
    again = ttt_loss(draft, target, batch, steps=3, decay=0.8, loss="kl", coverage=coverage.Coverage(target))
    assert sum(asked) == 0 if rule == "serving" else 0 < sum(asked) <= len(records)
    assert torch.equal(again.loss, plain.loss)
    for name in ("hits", "counted", "covered"):
        assert torch.equal(getattr(again, name), getattr(plain, name))


def test_records_that_are_not_greedy_are_looked_at():
    """The same tokens and states, said to be given or sampled; and with a token that is not the argmax."""
    target = random_target(dtype=torch.float64, sharpness=4.0)
    draft = random_draft(target, target_ids=SOME_IDS)
    greedy = on_policy(target, "r", 1, dtype=torch.float64)
    expected = coverage.Coverage(target).of(_batch(greedy), draft.target_ids, torch.float64)
    other = replace(greedy, input_ids=torch.where(greedy.loss_mask, SOME_IDS[0], greedy.input_ids))
    known = coverage.Coverage(target)
    believed = known.of(_batch(other), draft.target_ids, torch.float64)
    assert believed.all()
    assert not expected.all()
    for generation in (GIVEN, Generation(mode="sampled", max_new_tokens=9, temperature=1.0)):
        batch = _batch(replace(other, generation=generation))
        assert (batch.written == -1).all()
        assert torch.equal(known.of(batch, draft.target_ids, torch.float64), expected)
        once = _batch(replace(other, generation=generation), hashed=False)
        assert known.of(once, draft.target_ids, torch.float64) is None


def test_no_more_states_are_kept_than_allowed():
    target = random_target()
    draft = random_draft(target, target_ids=SOME_IDS)
    some = coverage.Coverage(target, most=9)
    for _ in range(2):
        for record in (record_of("a", [0] + [1] * 8), record_of("b", [0] + [1] * 13)):
            batch = _batch(record)
            found = some.of(batch, draft.target_ids, torch.float64)
            assert torch.equal(found, coverage.Coverage(target).of(batch, draft.target_ids, torch.float64))
    assert list(some._known) == list(_batch(record_of("a", [0] + [1] * 8)).content_hash)
