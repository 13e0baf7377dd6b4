"""EAGLE-3's draft and its training-time test written plainly in float64: dense masks, every row, every step.

From the description of what both engines do at inference (docs/engines.md) alone; it shares no code with the trainer.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.needs("torch")  # nothing imports this module without it


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, position, theta, width):
    """Rotate the first ``width`` of [heads, D] by a position, in halves."""
    half = width // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    a, b = x[:, :half], x[:, half:width]
    parts = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[:, width:])
    return torch.cat(parts, -1)


class PlainDraft:
    """One draft by its weights' serving names; ``default`` RoPE."""

    def __init__(self, spec, weights):
        self.spec, self.w = spec, {k: v.double() for k, v in weights.items() if v.is_floating_point()}

    def combine(self, captures):
        """[K, H] captures of one token -> [H]."""
        s, x = self.spec, captures.reshape(-1)
        if s.norm_before_fc:
            x = rms(x, self.w["input_norm.weight"], s.rms_norm_eps)
        if s.fc_norm:
            chunks = x.reshape(s.num_aux, -1)
            x = torch.cat([rms(c, self.w[f"fc_norm.{i}.weight"], s.rms_norm_eps) for i, c in enumerate(chunks)])
        return self.w["fc.weight"] @ x

    def row(self, feature, embedded, position, caches):
        """Run one row that sees the keys and values of ``caches`` (a list a layer) and its own, added to them.

        Returns what the head reads and what the next step is fed.
        """
        s, w = self.spec, self.w
        residual = hidden = feature
        for i, cache in enumerate(caches):
            name = f"layers.{i}."
            if i == 0:
                normed = rms(feature, w[name + "hidden_norm.weight"], s.rms_norm_eps)
                residual = normed if s.norm_before_residual else feature
                x = torch.cat([rms(embedded, w[name + "input_layernorm.weight"], s.rms_norm_eps), normed])
            else:
                residual = hidden
                x = rms(hidden, w[f"{name}{s.later_layers_norm}.weight"], s.rms_norm_eps)
            q, k, v = (self.project(name, p, x) for p in "qkv")
            theta, width = s.rope["rope_theta"], int(s.head_dim * s.rope.get("partial_rotary_factor", 1.0))
            q, k = (turn(y, position, theta, width) for y in (q, k))
            cache.append((k, v))
            group = s.num_heads // s.num_kv_heads
            heads = []
            for h in range(s.num_heads):
                keys = torch.stack([key[h // group] for key, _ in cache])
                values = torch.stack([value[h // group] for _, value in cache])
                heads.append(torch.softmax(keys @ q[h] / s.head_dim**0.5, 0) @ values)
            residual = residual + w[name + "self_attn.o_proj.weight"] @ torch.cat(heads)
            x = rms(residual, w[name + "post_attention_layernorm.weight"], s.rms_norm_eps)
            gate, up = w[name + "mlp.gate_proj.weight"] @ x, w[name + "mlp.up_proj.weight"] @ x
            hidden = residual + w[name + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        normed = rms(hidden, w["norm.weight"], s.rms_norm_eps)
        return normed, (normed if s.norm_output else hidden)

    def project(self, layer, name, x):
        y = self.w[f"{layer}self_attn.{name}_proj.weight"] @ x
        if self.spec.attention_bias:
            y = y + self.w[f"{layer}self_attn.{name}_proj.bias"]
        return y.reshape(-1, self.spec.head_dim)

    def record(self, ids, positions, captures, embedding, steps):
        """Return, a step and row t, what the head reads: ``{(k, t): [H]}`` for all rows with a target.

        ``captures`` [K, S, H], ``embedding`` [V, H].
        """
        out, fed, first = {}, {}, []
        rows = range(len(ids) - 2)
        for t in rows:  # step 0: a row sees the keys of the rows up to it
            caches = [list(c) for c in first] if first else [[] for _ in range(self.spec.num_layers)]
            feature = self.combine(captures[:, t])
            out[0, t], fed[t] = self.row(feature, embedding[ids[t + 1]], float(positions[t]), caches)
            first = caches
        own = {t: [[] for _ in first] for t in rows}
        for k in range(1, steps):
            for t in rows:
                if t + 2 + k >= len(ids):
                    continue
                caches = [[*layer[: t + 1], *mine] for layer, mine in zip(first, own[t], strict=True)]
                token, position = embedding[ids[t + 1 + k]], float(positions[t + k])
                out[k, t], fed[t] = self.row(fed[t], token, position, caches)
                for mine, cache in zip(own[t], caches, strict=True):
                    mine.append(cache[-1])
        return out
