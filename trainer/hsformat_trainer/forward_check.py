"""Whether a folder that was written computes what the checkpoint does: bit by bit, on records of random states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from hsformat.engines.drafts import read_draft
from hsformat.layout import Layout
from hsformat.problems import Problem, problem
from hsformat.torch import TensorRecord, pack
from hsformat_trainer.batch import TrainBatch
from hsformat_trainer.draft import Draft
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.target_head import TargetHead
from hsformat_trainer.vocabulary import DraftVocabulary

__all__ = ["forward_differs", "random_batch"]

STEPS = 3


def forward_differs(
    spec: DraftSpec,
    layout: Layout,
    head: TargetHead,
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype,
) -> list[Problem]:
    """Return HS411 if the draft in a folder gives other logits than the checkpoint's weights.

    Parameters
    ----------
    head
        The target's ends, in float32.
    tensors
        Of the checkpoint, under the names that the draft has in training.
    dtype
        To which the folder's weights were rounded: so are the checkpoint's here.
    """
    trained = Draft(spec, vocabulary=_vocabulary(tensors.get("d2t"), tensors.get("t2d")), target=head)
    rounded = {k: v.to(dtype).float() if v.is_floating_point() else v for k, v in tensors.items()}
    trained.load_state_dict(rounded)
    read, _ = read_draft(folder)
    d2t = None if read is None or read.d2t is None else torch.from_numpy(read.d2t)
    t2d = None if read is None or read.t2d is None else torch.from_numpy(read.t2d)
    served = Draft(spec, vocabulary=_vocabulary(d2t, t2d), target=head, init=folder)
    batch = random_batch(spec, layout)
    problems = []
    with torch.no_grad():
        for k, (a, b) in enumerate(zip(trained(batch, head), served(batch, head), strict=True)):
            x, y = (draft.lm_head(h) for draft, h in ((trained, a), (served, b)))
            ids = (trained.to_target(x.argmax(-1)), served.to_target(y.argmax(-1)))
            if not (torch.equal(a, b) and torch.equal(x, y) and torch.equal(*ids)):
                got = f"logits of step {k} that differ by up to {float((x - y).abs().max()):.3g}"
                fix = "this is a defect of the export: nothing was written"
                expected = "the same bits as the checkpoint's"
                problems.append(problem("HS411", where=f"{folder}: forward pass", got=got, expected=expected, fix=fix))
    return problems


def random_batch(spec: DraftSpec, layout: Layout) -> TrainBatch:
    """Return a batch of two records of random states, all supervised but the first tokens."""
    rng = torch.Generator().manual_seed(0)
    records = []
    for i, tokens in enumerate((7, 11)):
        mask = torch.ones(tokens, dtype=torch.bool)
        mask[:2] = False
        hidden = {key: torch.randn(tokens, spec.target_hidden_size, generator=rng) for key in layout.keys}
        records.append(
            TensorRecord(
                id=f"random {i}",
                input_ids=torch.randint(0, spec.vocab_size, (tokens,), generator=rng),
                loss_mask=mask,
                position_ids=torch.arange(tokens),
                hidden=hidden,
                token_fields={},
                record_fields={},
            )
        )
    last = layout.last
    if last is None:
        raise ValueError("a layout that was trained on has a last capture")
    return TrainBatch.from_packed(pack(records), aux=layout.aux, last=last, steps=STEPS)


def _vocabulary(d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> DraftVocabulary | None:
    if d2t is None or t2d is None:
        return None
    return DraftVocabulary(d2t=np.asarray(d2t), t2d=np.asarray(t2d), coverage=1.0)
