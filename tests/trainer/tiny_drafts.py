"""Tiny drafts, targets and packed batches."""

from __future__ import annotations

import pytest
import torch
from factories import digest

from hsformat.contract import TargetModel
from hsformat.record import Generation
from hsformat.torch import TensorRecord, pack
from hsformat_trainer.draft import Draft
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.target_head import TargetHead

pytestmark = pytest.mark.needs("torch")  # nothing imports this module without it

HIDDEN, VOCAB, DEPTH = 16, 40, 4
AUX = ("d1", "d2", "d3")
GREEDY, GIVEN = Generation(mode="greedy", max_new_tokens=9), Generation(mode="none")


class Map:
    """A draft vocabulary: some target ids, rising."""

    def __init__(self, target_ids, vocab=VOCAB):
        self.target_ids = torch.tensor(target_ids)
        self.d2t = (self.target_ids - torch.arange(len(target_ids))).numpy()
        self.t2d = torch.zeros(vocab, dtype=torch.bool).index_fill(0, self.target_ids, 1).numpy()


def spec_of(**changes):
    plain = {
        "target_hidden_size": HIDDEN,
        "num_aux": len(AUX),
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "later_layers_norm": None,
        "train_embedding": False,
        "train_head": True,
    }
    return DraftSpec(**{**plain, **changes})


def target_model(**changes):
    facts = {
        "name": "tiny",
        "revision": None,
        "architecture": "LlamaForCausalLM",
        "num_layers": DEPTH,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "dtype": "float32",
        "quantization": None,
        "embedding": {"scale": 1.0, "tied": False},
        "head": {"bias": False, "softcap": None, "scale": 1.0, "padded_vocab": VOCAB},
        "final_norm": {"kind": "rmsnorm", "eps": 1e-5, "unit_offset": False},
        "rope": (),
        "config_digest": digest("1"),
        "basis_digest": digest("2"),
        "weights_digest": None,
    }
    return TargetModel.model_validate({**facts, **changes})


def random_target(seed=0, *, dtype=torch.float64, sharpness=1.0, **changes):
    made = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)

    return TargetHead(
        target_model(**changes),
        embed_weight=some(VOCAB, HIDDEN),
        head_weight=some(VOCAB, HIDDEN) * sharpness,
        norm_weight=1 + 0.2 * some(HIDDEN),
        head_bias=some(VOCAB) if changes.get("head", {}).get("bias") else None,
    )


def random_draft(target, *, target_ids=None, dtype=torch.float64, seed=0, **changes):
    """Return a draft whose every weight is random and large enough to matter."""
    torch.manual_seed(seed)
    vocabulary = None if target_ids is None else Map(target_ids)
    rows = VOCAB if target_ids is None else len(target_ids)
    draft = Draft(spec_of(draft_vocab_size=rows, **changes), vocabulary=vocabulary, target=target)
    with torch.no_grad():
        for p in draft.parameters():
            if p is draft.lm_head.weight:
                continue
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.ndim == 1 else torch.randn_like(p) / p.shape[-1] ** 0.5)
    return draft.to(dtype)


def record_of(name, mask, *, seed=0, missing_state=False, dtype=torch.float64, offset=0, generation=GIVEN):
    made = torch.Generator().manual_seed(seed)
    tokens = len(mask)
    states = tokens - missing_state
    return TensorRecord(
        id=name,
        input_ids=torch.randint(0, VOCAB, (tokens,), generator=made),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        position_ids=torch.arange(tokens) + offset,
        hidden={
            key: torch.randn(states, HIDDEN, generator=made, dtype=torch.float64).to(dtype)
            for key in (*AUX, f"d{DEPTH}")
        },
        token_fields={},
        record_fields={},
        generation=generation,
    )


def on_policy(target, name, seed, *, dtype=torch.float32, missing_state=False):
    """Return a record whose answer is the argmax at each state: 2 tokens of a prompt, 9 of the answer."""
    mask = [0] * 2 + [1] * 9
    record = record_of(name, mask, seed=seed, dtype=dtype, missing_state=missing_state, generation=GREEDY)
    said = target.logits(record.hidden[f"d{DEPTH}"], normed=False).argmax(-1)
    record.input_ids[2:] = said[1:10]
    return record


def mixed_pack(dtype=torch.float64):
    """Records of different lengths and masks: one turn, two turns, T-1 states, nothing supervised, all supervised."""
    masks = [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0],
        [1] * 9,
        [0, 1],
        [0, 0, 1, 0, 0, 1, 1, 1],
    ]
    return pack(
        [
            record_of(f"r{i}", m, seed=i, missing_state=i in (2, 4), dtype=dtype, offset=3 * (i == 1))
            for i, m in enumerate(masks)
        ]
    )
