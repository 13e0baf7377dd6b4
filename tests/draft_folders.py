"""Draft and target folders at tiny sizes, in the layouts of other projects, to be changed by a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hsformat.engines import inspect
from hsformat.problems import Severity

__all__ = [
    "BOTH",
    "IDS",
    "INNER",
    "SGLANG",
    "TOP",
    "VD",
    "VLLM",
    "H",
    "Look",
    "V",
    "d2t_of",
    "draft_config",
    "draft_weights",
    "target_config",
    "write_draft",
    "write_target",
]

VLLM, SGLANG = ("vllm", "0.32.0"), ("sglang", "0.5.23")
BOTH = pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=" ".join)
TOP = "eagle_aux_hidden_state_layer_ids"
H, V, VD, N = 16, 64, 24, 30
HEADS, HEAD_DIM, INNER = 4, 4, 32


def d2t_of(ids: list[int]) -> np.ndarray:
    """Return the offsets of ascending target ids."""
    return np.array([t - i for i, t in enumerate(ids)], np.int64)


IDS = sorted({0, 1, 2, 5, *range(10, 30)})
assert len(IDS) == VD


def target_config(**changes: Any) -> dict[str, Any]:
    """Return the config of a target."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": N, "hidden_size": H,
        "num_attention_heads": HEADS, "vocab_size": V, "intermediate_size": INNER, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def draft_config(**changes: Any) -> dict[str, Any]:
    """Return a draft's config in the plain layout, with ids for both engines; ``...`` removes a key."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "intermediate_size": INNER,
        "vocab_size": V, "draft_vocab_size": VD, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27], "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True},
    }  # fmt: skip
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def draft_weights(
    *,
    captures: int = 3,
    width: int = H,
    target_width: int = H,
    size: int = VD,
    layer: str = "midlayer",
    ids: list[int] | None = IDS,
    embedding: bool = False,
    layers: int = 1,
    **more: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Return a draft's weights by the names of both engines; names in ``more`` are added, or removed if None."""
    rng = np.random.default_rng(0)

    def w(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    out = {"fc.weight": w(width, captures * target_width), "norm.weight": w(width), "lm_head.weight": w(size, width)}
    for i in range(layers):
        p, wide = (layer, 2 * width) if i == 0 else (f"layers.{i}", width)
        out |= {f"{p}.{n}.weight": w(width) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
        out |= {f"{p}.self_attn.{n}_proj.weight": w(r, wide) for n, r in (("q", 16), ("k", 8), ("v", 8))}
        out |= {f"{p}.self_attn.o_proj.weight": w(width, 16), f"{p}.mlp.down_proj.weight": w(width, INNER)}
        out |= {f"{p}.mlp.{n}_proj.weight": w(INNER, width) for n in ("gate", "up")}
    if ids is not None:
        t2d = np.zeros(V, bool)
        t2d[[i for i in ids if i < V]] = True
        out |= {"d2t": d2t_of(ids), "t2d": t2d}
    if embedding:
        out["embed_tokens.weight"] = w(V, width)
    return {k: v for k, v in {**out, **more}.items() if v is not None}


def write_draft(
    folder: Path, config: dict[str, Any] | None = None, weights: dict[str, np.ndarray] | None = None
) -> Path:
    """Write a draft folder; without arguments one that both engines serve as [d2, d15, d27]."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config() if config is None else config))
    save_file(draft_weights() if weights is None else weights, folder / "model.safetensors")
    return folder


def write_target(folder: Path, config: dict[str, Any] | None = None, *, embedding: np.ndarray | None = None) -> Path:
    """Write a target folder: its config alone, or with an embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(target_config() if config is None else config))
    if embedding is not None:
        save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    return folder


class Look:
    """Inspects a folder and keeps what was found."""

    def __init__(self, folder: Path) -> None:
        self.draft, self.target = folder / "draft", write_target(folder / "target")
        self.layout, self.problems = None, []

    def __call__(self, engine=VLLM, *, config=None, weights=None, target=None) -> list[str]:
        if config is not None or weights is not None or not self.draft.exists():
            write_draft(self.draft, draft_config(**(config or {})), weights)
        name, version = engine
        self.layout, self.problems = inspect(name, draft=self.draft, target=target or self.target, version=version)
        return [p.code for p in self.problems if p.severity is Severity.ERROR]

    @property
    def warnings(self) -> list[str]:
        return [p.code for p in self.problems if p.severity is Severity.WARNING]
