"""Rotary embedding against Transformers' Llama module, over the types that are served."""

from __future__ import annotations

import pytest
import torch
from trainer.tiny_drafts import spec_of
from transformers import GlmConfig, LlamaConfig
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hsformat_trainer.rope import Rotary, rotate

pytestmark = pytest.mark.needs("torch")

HEAD_DIM, MOST = 32, 256
TYPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def rotary(rope):
    return Rotary(spec_of(rope=rope, head_dim=HEAD_DIM, max_position_embeddings=MOST))


@pytest.mark.parametrize("rope", TYPES.values(), ids=TYPES)
def test_heads_are_rotated_as_transformers_rotates_them(rope):
    """NeMo Automodel PR#2399: yarn fell back to another schedule without a word."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MOST,
        rope_parameters=dict(rope),
    )
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 7, 63, 64, 200, MOST - 1])
    x = torch.randn(len(positions), 3, HEAD_DIM)
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    ours = rotary(rope)
    torch.testing.assert_close(rotate(x, *ours(positions)), expected[0].transpose(0, 1))
    assert ours.rotary_dim == HEAD_DIM


@pytest.mark.parametrize(("factor", "dim"), [(0.25, 8), (0.5, 16)])
def test_partial_rotary_factor_is_heeded(factor, dim):
    """speculators#613, #738, PR#733: all dimensions were rotated in training, and a quarter of them when served."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": factor}
    ours = rotary(rope)
    assert ours.rotary_dim == dim
    positions = torch.arange(5)
    x = torch.randn(5, 2, HEAD_DIM)
    out = rotate(x, *ours(positions))
    torch.testing.assert_close(out[..., dim:], x[..., dim:])
    assert (out[1:, :, :dim] - x[1:, :, :dim]).abs().min(-1).values.max() > 0
    # Transformers' GLM rotates a part of each head.
    config = GlmConfig(hidden_size=64, num_attention_heads=2, head_dim=HEAD_DIM, rope_parameters=dict(rope))
    cos, sin = GlmRotaryEmbedding(config)(x, positions[None])
    mine = ours(positions)
    torch.testing.assert_close(mine[0], cos[0])
    torch.testing.assert_close(mine[1], sin[0])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "spiral", "rope_theta": 1.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.1},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.0},
    ],
)
def test_what_is_not_known_is_refused(rope):
    """NeMo Automodel PR#2399."""
    with pytest.raises(ValueError, match=r"rope_type|partial_rotary_factor"):
        rotary(rope)


def test_theta_has_no_default():
    """sfllm PR#32, Model-Optimizer PR#917: a base of 10000 was used where another one was meant."""
    with pytest.raises(ValueError, match="no default"):
        spec_of(rope={"rope_type": "default"})
