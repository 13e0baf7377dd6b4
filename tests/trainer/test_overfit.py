"""A tiny draft learns its data by heart, and the walk then says K + 1."""

from __future__ import annotations

import pytest
import torch
from trainer.tiny_drafts import AUX, DEPTH, VOCAB, on_policy, random_draft, random_target

from hsformat.layout import Layout
from hsformat.torch import pack
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.evaluate import evaluate, walk
from hsformat_trainer.objective import ttt_loss

pytestmark = pytest.mark.needs("torch")

STEPS = 3


@pytest.mark.parametrize(
    ("loss", "options"),
    [("kl", {}), ("ce", {"norm_output": True, "fc_norm": True}), ("lk", {"train_head": False})],
)
def test_a_draft_learns_its_data_by_heart(loss, options):
    target = random_target(dtype=torch.float32, sharpness=4.0)
    records = [on_policy(target, f"r{i}", i) for i in range(2)]
    draft = random_draft(target, dtype=torch.float32, intermediate_size=64, **options)
    packed = pack(records)
    batch = TrainBatch.from_packed(packed, aux=AUX, last=f"d{DEPTH}", steps=STEPS)
    layout = Layout(aux=AUX, last=f"d{DEPTH}")

    def found():
        return evaluate(draft, target, [packed], layout=layout, steps=STEPS)

    before = found()
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    for step in range(200):
        result = ttt_loss(draft, target, batch, steps=STEPS, decay=0.8, loss=loss)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and torch.equal(result.hits, result.counted):
            break
    after = found()
    assert before.acceptance_length < 2
    assert (after.accuracy, after.rounds) == ((1.0,) * STEPS, 2 * 2)
    assert after.acceptance_length == STEPS + 1
    assert not after.estimate


def test_a_draft_that_cannot_say_a_token_is_never_perfect():
    target = random_target(dtype=torch.float32)
    record = on_policy(target, "r", 0)
    ids = sorted(set(range(VOCAB)) - {int(record.input_ids[3])})  # the first one that is drafted
    missed = int((record.input_ids[3:] == record.input_ids[3]).sum())
    draft = random_draft(target, target_ids=ids, dtype=torch.float32)
    batch = TrainBatch.from_packed(pack([record]), aux=AUX, last=f"d{DEPTH}", steps=1)
    result = ttt_loss(draft, target, batch, steps=1, decay=1.0, loss="ce")
    assert result.covered.item() == result.counted.item() - missed
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(200):
        result = ttt_loss(draft, target, batch, steps=1, decay=1.0, loss="ce")
        if result.hits.item() == result.covered.item():
            break
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    layout = Layout(aux=AUX, last=f"d{DEPTH}")
    found = evaluate(draft, target, [pack([record])], layout=layout, steps=1)
    counted = result.counted.item()
    assert found.accuracy == found.coverage == ((counted - missed) / counted,)  # all that it can say, and no more
    right = torch.tensor([[int(i) in ids for i in record.input_ids[2:]]]).numpy()
    rounds, accepted_K = walk(right, 2, len(record.input_ids))
    assert (found.rounds, found.acceptance_length) == (rounds, 1 + accepted_K.sum() / rounds)
    assert 1 < found.acceptance_length < 2


def test_bfloat16_autocast_gives_nearly_the_same_loss_and_gradients():
    target = random_target(dtype=torch.float32)
    draft = random_draft(target, dtype=torch.float32, target_ids=[i for i in range(VOCAB) if i % 3])
    batch = TrainBatch.from_packed(
        pack([on_policy(target, f"r{i}", i) for i in range(3)]), aux=AUX, last=f"d{DEPTH}", steps=STEPS
    )

    def run(*, autocast, native):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            patch.setattr("hsformat_trainer.precision.slow_bfloat16", lambda: not native)
            result = ttt_loss(draft, target, batch, steps=STEPS, decay=0.8, loss="kl")
        result.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in draft.parameters()])
        draft.zero_grad()
        return result.loss.detach(), gradients

    exact, exact_gradients = run(autocast=False, native=True)
    loss, gradients = run(autocast=True, native=True)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(exact), rel=0.03)
    assert float(loss) != float(exact)
    assert torch.nn.functional.cosine_similarity(gradients, exact_gradients, dim=0) > 0.99
    # A processor without such instructions computes in float32, and the very same numbers.
    assert float(run(autocast=True, native=False)[0]) == float(exact)
