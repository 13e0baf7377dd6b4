"""Speed of preparation: conversations a CPU second, and where the time goes. Bounds: 2,000 a second, 30% outside.

OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python benchmarks/prepare_speed.py --model build/demo/target

``prepare`` is run as ``hsformat extract`` runs it, on JSON Lines of English prose (the language reference that comes
with Python). *Tokenizer* is the CPU time inside the Rust encoder, *template* that inside ``apply_chat_template``, the
rest is everything else: reading, checks, digests, masks, arrays. With TOKENIZERS_PARALLELISM=false all of it is one
thread. ``--alone`` encodes the same texts with the Rust encoder and nothing else: the ceiling.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.table import Table

from hsformat.prepare import load_tokenizer, prepare
from hsformat.prepare.pieces import Pieces

SHAPES = {"short": (1, 20, 120), "chat": (2, 40, 150), "long": (4, 60, 250)}
"""Exchanges of a conversation, words of a question, words of an answer (both medians)."""


class Clock:
    """Adds up the CPU time inside of calls."""

    seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


class TimedBackend:
    """A Rust tokenizer whose encoding is timed."""

    def __init__(self, backend: Any, clock: Clock) -> None:
        self.encode_batch_fast = clock.wrap(backend.encode_batch_fast)


def conversations(count: int, exchanges: int, question: int, answer: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    words = " ".join(topics.values()).split(" ")

    def prose(median: int) -> str:
        n = max(3, int(rng.lognormvariate(0, 0.6) * median))
        start = rng.randrange(len(words) - n)
        return " ".join(words[start : start + n]).strip() or "Yes"

    for i in range(count):
        turns = [("user", question), ("assistant", answer)] * exchanges
        yield {"id": f"c{i}", "messages": [{"role": role, "content": prose(n)} for role, n in turns]}


@contextmanager
def timed(tokenizer: Any) -> Iterator[tuple[Clock, Clock]]:
    """Time the encoder and the template of every preparation made inside."""
    encoder, template, of = Clock(), Clock(), Pieces.of

    def timed_of(tok: Any) -> Pieces | None:
        pieces = of(tok)
        if pieces is not None:
            pieces._backend = TimedBackend(pieces._backend, encoder)
            tok.apply_chat_template = template.wrap(tok.apply_chat_template)
        return pieces

    Pieces.of = timed_of  # type: ignore[method-assign]  # timed in its place
    try:
        yield encoder, template
    finally:
        Pieces.of = of  # type: ignore[method-assign]  # put back
        vars(tokenizer).pop("apply_chat_template", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--explode-turns", action="store_true")
    parser.add_argument("--alone", action="store_true", help="the Rust encoder alone, whole texts")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    table = Table(title=f"{args.count} conversations a row; CPU seconds")
    names = ["shape", "tokens each", "conv/s", "tokens/s", "tokenizer", "template", "rest"]
    for name in [*names, "encoder alone, tokens/s"] if args.alone else names:
        table.add_column(name, justify="right")
    for shape, sizes in SHAPES.items():
        rows = list(conversations(args.count, *sizes))
        with tempfile.TemporaryDirectory() as folder, timed(tokenizer) as (encoder, template):
            path = Path(folder) / "data.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            samples = prepare(
                path, tokenizer, vocab_size=len(tokenizer), max_length=8192, for_generation=False,
                explode_turns=args.explode_turns,
            )  # fmt: skip
            next(iter(samples))
            encoder.seconds = template.seconds = 0.0
            start = time.process_time()
            for _ in samples:
                pass
            total = time.process_time() - start
        s = samples.summary
        assert not s.dropped, s.dropped
        parts = [encoder.seconds, template.seconds, total - encoder.seconds - template.seconds]
        row = [shape, f"{s.tokens / s.rows:.0f}", f"{s.rows / total:,.0f}", f"{s.tokens / total:,.0f}"]
        row += [f"{part / total:.0%}" for part in parts]
        if args.alone:
            texts = [tokenizer.apply_chat_template(r["messages"], tokenize=False) for r in rows]
            start = time.process_time()
            tokens = sum(len(e.ids) for e in tokenizer.backend_tokenizer.encode_batch_fast(texts))
            row.append(f"{tokens / (time.process_time() - start):,.0f}")
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
