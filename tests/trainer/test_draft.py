"""The draft against a plain reading of what engines do, in float32, over its options; attention in blocks; memory."""

from __future__ import annotations

import pytest
import torch
from trainer.plain_draft import PlainDraft
from trainer.tiny_drafts import AUX, DEPTH, VOCAB, mixed_pack, random_draft, random_target, record_of

from hsformat.torch import pack
from hsformat_trainer import attention
from hsformat_trainer.attention import Visible, attend
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.objective import predictions, ttt_loss

pytestmark = pytest.mark.needs("torch")

LAST = f"d{DEPTH}"
OPTIONS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "all norms": {"norm_before_fc": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "partial rope, bias": {
        "rope": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.67},
        "attention_bias": True,
    },
    "one key head": {"num_kv_heads": 1, "num_heads": 3, "head_dim": 10},
    "two layers": {"num_layers": 2, "later_layers_norm": "input_layernorm"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_step_is_what_engines_compute(options):
    """SpecForge PR#879: without norm_output the head reads the norm and the next step the raw output, with it both read
    the norm; vllm PR#43482: fc_norm that was loaded and not applied.
    """
    target, steps = random_target(dtype=torch.float32), 4
    draft = random_draft(target, dtype=torch.float32, **options)
    record = record_of("r", [0, 0, 1, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float32, missing_state=True, offset=2)
    batch = TrainBatch.from_packed(pack([record]), aux=AUX, last=LAST, steps=steps)
    plain = PlainDraft(draft.spec, dict(draft.named_parameters()))
    captures = torch.stack([record.hidden[a] for a in AUX]).double()
    expected = plain.record(
        record.input_ids.tolist(), record.position_ids, captures, target.embed_weight.double(), steps
    )
    for k, (rows, out) in enumerate(zip(batch.steps, draft(batch, target), strict=True)):
        assert len(out) == 7 - k
        for i, t in enumerate(rows.rows.tolist()):
            torch.testing.assert_close(out[i].double(), expected[k, t], rtol=1e-5, atol=1e-5)


def test_rows_without_loss_are_computed_at_step_0_as_keys_alone():
    record = record_of("r", [0] * 20 + [1] * 6 + [0] * 10)
    batch = TrainBatch.from_packed(pack([record]), aux=AUX, last=LAST, steps=3)
    assert len(batch.keys) == 24  # rows 0..23: nothing behind the last row that carries loss
    assert [s.rows.tolist() for s in batch.steps] == [[19, 20, 21, 22, 23], [19, 20, 21, 22], [19, 20, 21]]
    assert batch.counts.tolist() == [5, 4, 3]
    # Row 19 carries no loss at step 0 under this rule, and does at step 1: its step 0 is computed for it.
    other = TrainBatch.from_packed(pack([record]), aux=AUX, last=LAST, steps=2, rule="input")
    assert other.steps[0].rows.tolist() == list(range(18, 25))
    assert other.steps[0].loss.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_record_does_not_see_its_neighbours():
    target = random_target()
    draft = random_draft(target)
    packed = mixed_pack()
    together = predictions(draft, target, TrainBatch.from_packed(packed, aux=AUX, last=LAST, steps=3), steps=3)
    alone = [
        predictions(draft, target, TrainBatch.from_packed(pack([r]), aux=AUX, last=LAST, steps=3), steps=3)
        for r in packed.unpack()
    ]
    for k in range(3):
        assert torch.equal(together.drafted[k], torch.cat([a.drafted[k] for a in alone]))


def dense(q, k, v, oks, ovs, visible):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    at = torch.arange(len(k))
    seen = (at >= visible.first[:, None]) & (at <= visible.own[:, None])
    scores = [torch.einsum("nqd,mqd->nqm", q, k).masked_fill(~seen[:, None], float("-inf"))]
    scores += [torch.einsum("nqd,nqd->nq", q, o.repeat_interleave(group, 1))[..., None] for o in oks]
    weights = torch.softmax(torch.cat(scores, -1) / q.shape[-1] ** 0.5, -1)
    out = torch.einsum("nqm,mqd->nqd", weights[..., : len(k)], v)
    for j, o in enumerate(ovs):
        out = out + weights[..., len(k) + j, None] * o.repeat_interleave(group, 1)
    return out


@pytest.mark.parametrize("later", [0, 1, 3])
@pytest.mark.parametrize("elements", [1, 300, 2**23])
def test_attention_in_blocks_equals_a_dense_mask(later, elements, monkeypatch):
    """SpecForge and others: records of a pack, GQA, the keys of step 0 and the row's own later ones."""
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", elements)
    made = torch.Generator().manual_seed(later)
    starts = [0, 5, 6, 47, 80]
    rows = sorted(torch.randperm(80, generator=made)[:50].tolist())
    visible = Visible.of(torch.tensor([max(s for s in starts if s <= r) for r in rows]), torch.tensor(rows))

    def some(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64, requires_grad=True)

    q, k, v = some(50, 6, 4), some(80, 2, 4), some(80, 2, 4)
    oks, ovs = [some(50, 2, 4) for _ in range(later)], [some(50, 2, 4) for _ in range(later)]
    out, expected = attend(q, k, v, oks, ovs, visible), dense(q, k, v, oks, ovs, visible)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=made, dtype=torch.float64)
    leaves = [q, k, v, *oks, *ovs]
    for a, b in zip(
        torch.autograd.grad(out, leaves, weights), torch.autograd.grad(expected, leaves, weights), strict=True
    ):
        torch.testing.assert_close(a, b)
    if elements < 2**23:
        assert len(attention._blocks(visible, 6)) > 1


def test_gradients_of_keys_are_added_up_in_float32(monkeypatch):
    """Of 1,024 blocks: in bfloat16 a sum stays where it is once a block's part is below half of its last bit."""
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1)
    n = 16 * 1024
    visible = Visible.of(torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64))
    q, k, v = (torch.zeros(rows, 1, 1, dtype=torch.bfloat16) for rows in (n, 1, 1))
    v.requires_grad_()
    empty = torch.zeros(n, 0, 1, 1, dtype=torch.bfloat16)
    # as on a GPU: attend() computes in float32 on CPUs
    out = attention._Attend.apply(q, k, v, empty, empty, visible)
    out.backward(torch.full_like(out, 2.0**-9))
    assert len(attention._blocks(visible, 1)) == 1024
    assert v.grad[0].item() == n * 2.0**-9
    assert v.grad.dtype == torch.bfloat16


def test_no_block_has_more_scores_than_the_bound():
    """Memory is bounded by the bound, or by 16 queries of one record: never rows by rows."""
    n = 70_000
    visible = Visible.of(torch.zeros(n, dtype=torch.int64), torch.arange(n))
    blocks = attention._blocks(visible, 8)
    assert [b[0] for b in blocks[1:]] == [b[1] for b in blocks[:-1]]
    assert blocks[-1][1] == n
    assert all(8 * (j - i) * (high - low) <= max(attention.BLOCK_ELEMENTS, 8 * 16 * n) for i, j, low, high in blocks)


def test_batches_with_nothing_supervised_have_a_loss_of_0_and_gradients_for_every_weight():
    """A process whose batch has no such row still has to take part in the reduction of gradients."""
    target = random_target()
    draft = random_draft(target)
    batch = TrainBatch.from_packed(pack([record_of("r", [0] * 6)]), aux=AUX, last=LAST, steps=2)
    result = ttt_loss(draft, target, batch, steps=2, decay=0.8, loss="kl")
    result.loss.backward()
    assert result.loss.item() == 0
    assert [n for n, p in draft.named_parameters() if p.grad is None or p.grad.any()] == []


def test_accuracy_counts_targets_outside_the_draft_vocabulary_as_misses():
    """SpecForge PR#492: 10 targets, 4 of them outside, 6 right: 0.6 and not 1.0."""
    target = random_target(sharpness=4.0)
    record = record_of("r", [0, 1] + [1] * 10)
    best = target.logits(record.hidden[LAST], normed=False).argmax(-1)[1:11]
    outside = set(best[:4].tolist())
    ids = [i for i in range(VOCAB) if i not in outside]
    missed = sum(int(b) in outside for b in best)
    draft = random_draft(target, target_ids=ids)
    batch = TrainBatch.from_packed(pack([record]), aux=AUX, last=LAST, steps=1)
    assert torch.equal(batch.distributions, torch.arange(1, 11))
    # A draft whose output is what the head needs: every target inside is hit.
    result = ttt_loss(Echo(draft, target, batch), target, batch, steps=1, decay=1.0, loss="kl")
    assert (result.hits.item(), result.counted.item(), result.covered.item()) == (10 - missed, 10, 10 - missed)
    assert missed >= 4
    assert result.loss_sums.item() == pytest.approx(0, abs=1e-9)


class Echo(torch.nn.Module):
    """A draft whose outputs are the target's own normed states."""

    def __init__(self, draft, target, batch):
        super().__init__()
        self.spec, self.lm_head, self.target_ids = draft.spec, draft.lm_head, draft.target_ids
        self.head_for, self._out = draft.head_for, target.final_norm(batch.last[batch.distributions])

    def forward(self, batch, target):
        return [self._out]


def test_two_layers_train_without_nan():
    """speculators#238: more than one layer gave NaN from the first step on."""
    target = random_target(dtype=torch.float32)
    draft = random_draft(target, dtype=torch.float32, num_layers=2, later_layers_norm="input_layernorm")
    batch = TrainBatch.from_packed(mixed_pack(torch.float32), aux=AUX, last=LAST, steps=3)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = ttt_loss(draft, target, batch, steps=3, decay=0.8, loss="kl").loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert losses[-1] < 0.5 * losses[0]
