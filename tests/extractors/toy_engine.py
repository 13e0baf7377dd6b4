"""An engine made of NumPy, as a driver for the child process: honest, and with one fault a class.

States follow from the tokens up to them, depth 0 is the embedding's rows, and answers are the argmax of the target's own
norm and head, so that an honest driver passes the proof. Nothing here is a target's real computation between its ends.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hsformat.dtypes import numpy_dtype
from hsformat.layout import parse_capture_key
from hsformat.target import describe
from hsformat.target.ends import open_ends
from hsformat.target.rows import read_rows
from hsformat_extractors.hosted.wire import TOKENS, Answer, Ask, Fault, Launch

MAX_TOKENS = 1024
Rows = np.ndarray


class Honest:
    """A driver that does what it should; subclasses change one thing."""

    def start(self, launch: Launch) -> Mapping[str, Any]:
        self.launch = launch
        self.ends = open_ends(launch.model, describe(launch.model, dtype=launch.dtype).model)
        width = launch.hidden_size
        rng = np.random.default_rng(0)
        self.weights = rng.standard_normal((launch.num_layers, width, width), np.float32) / width**0.5
        self.ran = 0
        return {
            "versions": {"numpy": np.__version__}, "device": "cpu",
            "engine": json.loads(launch.options.get("engine_args", "{}")), "max_tokens": MAX_TOKENS,
        }  # fmt: skip

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        for ask, tokens, arrays in self.batch(asks):
            yield self.answer(ask.request, tokens, arrays)

    def batch(self, asks: Sequence[Ask]) -> Iterator[tuple[Ask, tuple[int, ...], dict[str, Rows]]]:
        for ask in asks:
            self.ran += 1
            tokens = self.write(ask)
            rows = len(tokens) - 1 if self.limit(ask) else len(tokens)
            arrays = {k: h[:rows] for k, h in self.states(tokens).items()}
            yield ask, tokens, {**arrays, TOKENS: np.array(tokens, np.int64)}

    def stop(self) -> None:
        pass

    # What subclasses use.

    def limit(self, ask: Ask) -> int:
        limit = self.launch.max_new_tokens
        return limit if ask.max_new_tokens is None else min(limit, ask.max_new_tokens)

    def write(self, ask: Ask) -> tuple[int, ...]:
        tokens = list(ask.prompt)
        for _ in range(self.limit(ask)):
            last = self.depths(tokens)[self.launch.num_layers][-1:]
            logits = np.concatenate([block for _, block in self.ends.logit_blocks(self.ends.normed(last))], axis=1)
            tokens.append(int(logits.argmax()))
            if tokens[-1] in self.launch.stop_token_ids:
                break
        return tuple(tokens)

    def depths(self, tokens: Sequence[int]) -> list[Rows]:
        """Return [T, H] a depth, as float32 that the dtype can hold."""
        h_TH = self.rounded(read_rows(self.ends.embedding, list(tokens)))
        out = [h_TH]
        for weights in self.weights:
            mean_TH = h_TH.cumsum(axis=0) / np.arange(1, len(h_TH) + 1)[:, None]
            h_TH = self.rounded(h_TH + np.tanh(10 * (mean_TH + h_TH) @ weights))
            out.append(h_TH)
        return out

    def rounded(self, x: Rows) -> Rows:
        return x.astype(numpy_dtype(self.launch.dtype)).astype(np.float32)

    def states(self, tokens: Sequence[int]) -> dict[str, Rows]:
        depths = self.depths(tokens)
        out = {}
        for key in self.launch.captures:
            depth, normed = parse_capture_key(key)
            h = self.ends.normed(depths[depth]) if normed else depths[depth]
            out[key] = h.astype(numpy_dtype(self.launch.dtype))
        return out

    def answer(self, request: str, tokens: Sequence[int], arrays: Mapping[str, Rows]) -> Answer:
        file = Path(self.launch.staging) / f"{request}.safetensors"
        part = file.with_suffix(".part")
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, part)
        part.replace(file)
        return Answer(request=request, tokens=tuple(int(t) for t in tokens), file=file.name)

    @property
    def proving(self) -> bool:
        """Whether what runs is the proof, of 28 requests."""
        return self.ran <= 28
