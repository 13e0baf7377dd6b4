"""The toy engine with a fault each: answers that are wrong.

They do what engines and extractors were seen to do (the threads are named), most of them only after the proof, so that
what comes later is looked at, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from toy_llama import Honest

from hsformat_extractors.hosted.wire import TOKENS, Answer, Fault

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


class FaultsInTheProof(Honest):
    """Gives the first request of all up, as a connection that was reset."""

    failed = False

    def run(self, asks):
        for found in super().run(asks):
            if self.failed:
                yield found
            else:
                self.failed = True
                yield Fault(request=found.request, message="connection reset", again=True)


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
