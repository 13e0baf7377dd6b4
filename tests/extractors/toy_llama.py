"""An engine made of NumPy, as a driver for the child process: it runs a Llama, and is honest."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hsformat.dtypes import numpy_dtype, to_float32
from hsformat.layout import parse_capture_key
from hsformat.target import describe
from hsformat.target.checkpoint import read_checkpoint, read_tensor
from hsformat.target.ends import open_ends
from hsformat.target.rows import read_rows
from hsformat_extractors.hosted.wire import TOKENS, Answer, Ask, Fault, Launch

MAX_TOKENS = 1024
PROOF = 32
"""Requests of the proof."""
Rows = np.ndarray


class Honest:
    """A driver that does what it should; subclasses change one thing."""

    def start(self, launch: Launch) -> Mapping[str, Any]:
        self.launch = launch
        self.ends = open_ends(launch.model, describe(launch.model, dtype=launch.dtype).model)
        self.config = json.loads(Path(launch.model, "config.json").read_text())
        tensors = read_checkpoint(Path(launch.model)).tensors
        self.layers = [
            {
                k.removeprefix(f"model.layers.{i}."): to_float32(read_tensor(v))
                for k, v in tensors.items()
                if f"layers.{i}." in k
            }
            for i in range(launch.num_layers)
        ]
        self.ran = 0
        return {
            "versions": {"numpy": np.__version__}, "device": "cpu",
            "engine": json.loads(launch.options.get("engine_args", "{}")), "max_tokens": MAX_TOKENS,
        }  # fmt: skip

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        for ask, tokens, arrays in self.spoil(list(self.batch(asks))):
            yield self.answer(ask, tokens, arrays)

    def stop(self) -> None:
        pass

    # What subclasses replace.

    def spoil(self, batch: list[tuple[Ask, tuple[int, ...], dict[str, Rows]]]) -> Iterator[Any]:
        yield from batch

    def depths(self, tokens: Sequence[int]) -> list[Rows]:
        """Return [T, H] a depth, in float32."""
        return [h.copy() for h in self.computed(tuple(tokens))]

    # The engine.

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one driver a process
    def computed(self, tokens: tuple[int, ...]) -> list[Rows]:
        h_TH = read_rows(self.ends.embedding, list(tokens))
        out = [h_TH]
        for layer in self.layers:
            h_TH = h_TH + self.attention(self.normed(h_TH, layer["input_layernorm.weight"]), layer)
            x_TH = self.normed(h_TH, layer["post_attention_layernorm.weight"])
            gate = x_TH @ layer["mlp.gate_proj.weight"].T
            inner = gate / (1 + np.exp(-gate)) * (x_TH @ layer["mlp.up_proj.weight"].T)
            h_TH = h_TH + inner @ layer["mlp.down_proj.weight"].T
            out.append(h_TH)
        return out

    def batch(self, asks: Sequence[Ask]) -> Iterator[tuple[Ask, tuple[int, ...], dict[str, Rows]]]:
        for ask in asks:
            self.ran += 1
            tokens = self.write(ask)
            rows = len(tokens) - 1 if self.limit(ask) else len(tokens)
            arrays = {k: h[:rows] for k, h in self.states(tokens).items()}
            yield ask, tokens, {**arrays, TOKENS: np.array(tokens, np.int64)}

    def limit(self, ask: Ask) -> int:
        limit = self.launch.max_new_tokens
        return limit if ask.max_new_tokens is None else min(limit, ask.max_new_tokens)

    def write(self, ask: Ask) -> tuple[int, ...]:
        tokens = list(ask.prompt)
        for _ in range(self.limit(ask)):
            tokens.append(self.next_token(tokens))
            if tokens[-1] in self.launch.stop_token_ids:
                break
        return tuple(tokens)

    def next_token(self, tokens: Sequence[int]) -> int:
        last = self.computed(tuple(tokens))[-1][-1:]
        return int(np.concatenate([b for _, b in self.ends.logit_blocks(self.ends.normed(last))], axis=1).argmax())

    def normed(self, x: Rows, weight: Rows) -> Rows:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config["rms_norm_eps"])) * weight

    def attention(self, x_TH: Rows, layer: Mapping[str, Rows]) -> Rows:
        width, heads = self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (
            (x_TH @ layer[f"self_attn.{n}_proj.weight"].T).reshape(len(x_TH), -1, width).swapaxes(0, 1) for n in "qkv"
        )
        k, v = (np.repeat(self.rotated(a) if a is k else a, heads // len(a), axis=0) for a in (k, v))
        scores = self.rotated(q) @ k.swapaxes(1, 2) / np.sqrt(np.float32(width))
        scores = np.where(np.tri(len(x_TH), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = (scores / scores.sum(-1, keepdims=True)) @ v
        return out.swapaxes(0, 1).reshape(len(x_TH), -1) @ layer["self_attn.o_proj.weight"].T

    def rotated(self, x: Rows) -> Rows:
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)[None]
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def states(self, tokens: Sequence[int]) -> dict[str, Rows]:
        depths = self.depths(tokens)
        out = {}
        for key in self.launch.captures:
            depth, normed = parse_capture_key(key)
            h = self.ends.normed(depths[depth]) if normed else depths[depth]
            out[key] = h.astype(numpy_dtype(self.launch.dtype))
        return out

    def answer(self, ask: Ask, tokens: Sequence[int], arrays: Mapping[str, Rows]) -> Answer:
        file = Path(self.launch.staging) / f"{ask.request}.safetensors"
        part = file.with_suffix(".part")
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, part)
        part.replace(file)
        token = None if self.limit(ask) else self.next_token(ask.prompt)
        return Answer(request=ask.request, tokens=tuple(int(t) for t in tokens), file=file.name, next_token=token)

    @property
    def proved(self) -> bool:
        """Whether the proof is over."""
        return self.ran > PROOF
