"""Training-time test against dense attention and plain losses in float64: values, gradients, counts."""

from __future__ import annotations

import pytest
import torch
from trainer.plain_draft import PlainDraft
from trainer.tiny_drafts import AUX, DEPTH, VOCAB, mixed_pack, random_draft, random_target

from hsformat.align import step_view, supervised
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
