"""An engine made of NumPy, as a driver for the child process: an honest one, which runs a Llama, and one a fault.

The others do what engines and extractors were seen to do (the threads are named), most of them only after the proof, so
that what comes later is looked at, too.
"""

from __future__ import annotations

import errno
import functools
import itertools
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

    @functools.lru_cache(maxsize=64)  # noqa: B019
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


# States that are wrong from the start: found by the proof.


class SwapsNeighbours(Honest):  # speculators#279
    """States of two requests of one length are exchanged where they run together."""

    def spoil(self, batch):
        lengths = {}
        for i, (_, tokens, _) in enumerate(batch):
            lengths.setdefault(len(tokens), []).append(i)
        out = list(batch)
        for i, j in (v for v in lengths.values() if len(v) == 2):
            swapped = [{**batch[b][2], TOKENS: batch[a][2][TOKENS]} for a, b in ((i, j), (j, i))]
            out[i], out[j] = (*batch[i][:2], swapped[0]), (*batch[j][:2], swapped[1])
        yield from out


class LeaksBetweenCalls(Honest):  # speculators#279
    """States hold something of all calls before."""

    def depths(self, tokens):
        h = super().depths(tokens)
        return [h[0], *(x + 0.3 * self.ran * np.abs(x).mean() for x in h[1:])]


class RowOfNeighbour(Honest):  # sglang#26163
    """The last row is that of the request before."""

    def spoil(self, batch):
        before = None
        for ask, tokens, arrays in batch:
            out = dict(arrays)
            for key in self.launch.captures if before else ():
                out[key] = np.concatenate([arrays[key][:-1], before[key][-1:]])
            before = arrays
            yield ask, tokens, out


class ShiftedRows(Honest):
    def spoil(self, batch):
        for ask, tokens, arrays in batch:
            yield ask, tokens, {k: v if k == TOKENS else np.roll(v, 1, axis=0) for k, v in arrays.items()}


class CachedPrefix(Honest):  # sglang#4997, vllm#44485
    """Rows of a beginning that ran before are not computed."""

    seen: Sequence[tuple[int, ...]] = ()

    def spoil(self, batch):
        for ask, tokens, arrays in batch:
            cached = max((common(s, tokens[:-1]) for s in self.seen), default=0)
            self.seen = (*self.seen, tokens)
            yield ask, tokens, {k: v if k == TOKENS else v[cached:] for k, v in arrays.items()}


def common(a, b):
    """Return how many tokens two prompts have in common from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class ForgetsResidual(Honest):  # nnsight#337
    """What a layer adds is taken for what it gives."""

    def depths(self, tokens):
        h = super().depths(tokens)
        return [h[0], *(b - a for a, b in itertools.pairwise(h))]


class LayerBefore(Honest):  # vllm PR#43671
    """Every capture is one layer too early."""

    def depths(self, tokens):
        h = super().depths(tokens)
        return [h[0], *h[:-1]]


class RepeatsALayer(Honest):
    """A depth that is not captured gives another one's rows, silently, as ids beyond the layers do in vLLM 0.32.0."""

    def states(self, tokens):
        out = super().states(tokens)
        first, second, *_ = out
        return {**out, second: out[first]}


class NormedLast(Honest):  # transformers#13461
    def depths(self, tokens):
        *inner, last = super().depths(tokens)
        return [*inner, self.ends.normed(last)]


class ZeroRows(Honest):
    def spoil(self, batch):
        for ask, tokens, arrays in batch:
            yield ask, tokens, {k: v if k == TOKENS else v * (np.arange(len(v)) < 5)[:, None].astype(v.dtype)
                                for k, v in arrays.items()}  # fmt: skip


class NanRow(Honest):
    def depths(self, tokens):
        h = super().depths(tokens)
        h[4][-1, 0] = np.nan
        return h


class OtherDtype(Honest):
    def spoil(self, batch):
        for ask, tokens, arrays in batch:
            yield ask, tokens, {k: v if k == TOKENS else v.astype(np.float16) for k, v in arrays.items()}


class OneSlotOfThree(Honest):  # sglang PR#39644, vllm PR#45985
    """States of earlier stages of a pipeline are dropped."""

    def spoil(self, batch):
        for ask, tokens, arrays in batch:
            yield ask, tokens, {k: arrays[k] for k in (TOKENS, self.launch.captures[-1])}


# What goes wrong later, or with some requests: the others are not touched.


class Later(Honest):
    """Does ``after`` with what comes after the proof."""

    def spoil(self, batch):
        yield from map(self.after, batch) if self.proved else batch

    def after(self, found):
        return found


def fewer(found, rows):
    ask, tokens, arrays = found
    return ask, tokens, {k: v if k == TOKENS else v[rows] for k, v in arrays.items()}


class CachedLater(Later):  # sglang#4997, vllm#44485
    """Of a request of 7 tokens, 3 were cached: rows 5 and 4 for lengths 5 and 7."""

    def after(self, found):
        return fewer(found, slice(3, None)) if len(found[1]) == 7 else found


class FewerRowsOnce(Later):
    """Rows are missing at the first try."""

    failed: Sequence[tuple[int, ...]] = ()

    def after(self, found):
        if len(found[1]) != 7 or found[1] in self.failed:
            return found
        self.failed = (*self.failed, found[1])
        return fewer(found, slice(1, None))


class LastChunkAlone(Later):  # vllm PR#39949, vLLM-Hook#22, PR#52074
    """Of a prompt that was run in chunks of 128, the last one's rows."""

    def after(self, found):
        return fewer(found, slice((len(found[1]) - 1) // 128 * 128, None))


class TruncatesAnswers(Later):  # sglang#26163, PR#28496
    """One row a step of speculative decoding, which gave several tokens."""

    def after(self, found):
        return fewer(found, slice(0, len(found[0].prompt) + (len(found[1]) - len(found[0].prompt)) // 3))


class NoRows(Later):
    def after(self, found):
        return fewer(found, slice(0, 0)) if len(found[1]) == 7 else found


class OtherIds(Later):  # vllm#56417, PR#56442
    """States are those of other ids than the answer has."""

    def after(self, found):
        ask, tokens, arrays = found
        ids = arrays[TOKENS].copy()
        ids[-1] += len(tokens) == 7
        return ask, tokens, {**arrays, TOKENS: ids}


class CutsPrompts(Later):
    """A long prompt is cut, without a word."""

    def after(self, found):
        ask, tokens, arrays = found
        return ask, tokens[:6], {k: v[:6] for k, v in arrays.items()}


class EndsEarly(Later):
    """An answer stops before its end, as where a request was pre-empted."""

    def after(self, found):
        ask, tokens, arrays = found
        n = len(ask.prompt) + 1
        return ask, tokens[:n], {k: v[:n] for k, v in arrays.items()}


class GoesOn(Later):
    """Tokens come after the end of the turn."""

    def after(self, found):
        ask, tokens, arrays = found
        tokens = (*tokens[:-2], self.launch.stop_token_ids[0], tokens[-1])
        return ask, tokens, {**arrays, TOKENS: np.array(tokens, np.int64)}


class SaysNothing(Later):
    """Ends its turn at once."""

    def after(self, found):
        ask, _, arrays = found
        tokens = (*ask.prompt, self.launch.stop_token_ids[0])
        return ask, tokens, {k: v[: len(tokens)] for k, v in arrays.items()} | {TOKENS: np.array(tokens, np.int64)}


class ByNameOfRequest(Honest):  # speculators PR#365
    """Answers come in the order of their ids as text."""

    def spoil(self, batch):
        yield from sorted(batch, key=lambda found: found[0].request)


class MatchedByName(Honest):  # speculators PR#365
    """States are given to requests in the order of the requests' ids as text."""

    def spoil(self, batch):
        order = sorted(range(len(batch)), key=lambda i: batch[i][0].request)
        for (ask, tokens, arrays), i in zip(batch, order, strict=True):
            yield ask, tokens, {**batch[i][2], TOKENS: arrays[TOKENS]}


class OnlyThirtyTwo(Honest):  # speculators PR#365
    """Of a window, 32 are answered."""

    def spoil(self, batch):
        yield from batch[:32]


class AnswersTwice(Later):
    def spoil(self, batch):
        for found in batch:
            yield found
            if self.proved:
                yield found


class AnswersOthers(Later):
    """Answers what nobody asked."""

    def answer(self, ask, tokens, arrays):
        found = super().answer(ask, tokens, arrays)
        if not self.proved:
            return found
        return Answer(request="hs-other-1", tokens=found.tokens, file=found.file)


class FaultsOnce(Honest):
    """Gives requests up, and says that another try may help."""

    again = True
    failed: frozenset[tuple[int, ...]] = frozenset()

    def run(self, asks):
        for found in super().run(asks):
            ask = next(a for a in asks if a.request == found.request)
            if self.proved and len(ask.prompt) == 7 and ask.prompt not in self.failed:
                self.failed |= {ask.prompt} if self.again else set()
                yield Fault(request=ask.request, message="aborted by the engine", again=self.again)
            else:
                yield found


class Faults(FaultsOnce):
    again = False


class BreaksAFile(Later):
    """A file is cut by a disk."""

    def answer(self, ask, tokens, arrays):
        found = super().answer(ask, tokens, arrays)
        if self.proved and len(tokens) == 7:
            path = Path(self.launch.staging, found.file)
            path.write_bytes(path.read_bytes()[:-10])
        return found


class NamesAnotherPlace(Later):
    def answer(self, ask, tokens, arrays):
        found = super().answer(ask, tokens, arrays)
        return Answer(request=found.request, tokens=found.tokens, file=f"../{found.file}") if self.proved else found


# Engines that end.


class Dies(Honest):
    """Ends in the middle of the first window after the proof, after five answers."""

    def run(self, asks):
        for i, found in enumerate(super().run(asks)):
            if self.proved and i == 5:
                print("about to end", flush=True)
                self.end()
            yield found

    def end(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class IsKilled(Dies):
    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Dies):
    def end(self):
        sys.exit(3)


class Hangs(Dies):
    def end(self):
        time.sleep(600)


class NoSpace(Dies):
    def end(self):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise RuntimeError("states cannot be written") from e


class NeverStarts(Honest):
    def start(self, launch):
        time.sleep(600)


class FailsToStart(Honest):  # vllm#51016, #53243, SpecForge#345, PR#290
    def start(self, launch):
        raise AssertionError("581 GiB of KV cache are needed, 40 GiB are there")


class LeavesAChild(Honest):
    """An engine's own process, which heeds no SIGTERM, and has the log open."""

    def start(self, launch):
        told = dict(super().start(launch))
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
            os._exit(0)
        return {**told, "engine": {"pid": pid}}


class Prints(Honest):
    """Prints what looks like messages, reads stdin, and closes what it did not open."""

    def start(self, launch):
        print('{"kind": "answer", "request": "x"}\n' * 1000, flush=True)
        os.system("echo from a shell; cat")
        return super().start(launch)

    def run(self, asks):
        sys.stderr.write("\xff\x00 not a message\r\n" * 100)
        for found in super().run(asks):
            os.write(1, b'{"kind": "done", "window": 99}\n\xfe')
            yield found


class Slow(Honest):
    """Takes its time after the proof."""

    def run(self, asks):
        for found in super().run(asks):
            time.sleep(0.05 if self.proved else 0)
            yield found
