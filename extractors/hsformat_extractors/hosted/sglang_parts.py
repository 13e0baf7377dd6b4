"""What the hook left in the staging folder, by request: found, joined, removed. The other side of ``sglang_hook``.

A request's tokens may come in several forward passes: chunks of a long prompt, then one token each while the target
writes. A pass that begins at token 0 begins anew (an engine short of memory takes a request back and runs it again);
any other has to go on where the last one ended. A gap, an overlap or an end too early is never bridged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hsformat_extractors.hosted.sglang_hook import FAULT, PART, SEGMENTS, STEP
from hsformat_extractors.hosted.wire import TOKENS

if TYPE_CHECKING:
    import torch

__all__ = ["Incomplete", "Parts"]


class Incomplete(Exception):
    """A request's states are not all there; the message says which."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Tokens ``start`` to ``start + count`` in a file from ``row`` on; ``number`` orders the pieces of a request."""

    file: str
    number: int
    start: int
    count: int
    row: int


class Parts:
    """The pieces of one run.

    Parameters
    ----------
    folder
        That the hook writes to.
    run
        Prefix of the run's request ids.
    keys
        Captures wanted; the files may hold more.
    """

    def __init__(self, folder: Path, run: str, keys: tuple[str, ...]) -> None:
        self.run = run
        self._folder, self._keys = folder, keys
        self._pieces: dict[str, list[_Piece]] = {}
        self._faults: dict[str, str] = {}
        self._uses: Counter[str] = Counter()
        self._wanted: set[str] = set()
        self._steps: dict[str, dict[str, torch.Tensor]] = {}

    def expect(self, rid: str) -> None:
        """Keep what comes of a request from now on; anything else of the run is removed."""
        self._wanted.add(rid)

    def look(self) -> bool:
        """Take note of new files; return whether there were any."""
        known = self._uses.keys() | self._faults.keys()
        new = sorted(n for n in os.listdir(self._folder) if n.startswith(self.run) and n not in known)
        for name in new:
            if name.endswith(FAULT):
                self._note_fault(name)
            elif name.endswith(PART):
                self._note_part(name)
            elif name.endswith(STEP):
                self._note_step(name)
        return bool(new)

    def take(self, rid: str, rows: int, into: Path) -> list[int]:
        """Write the first ``rows`` states of a request to a file; return the tokens that were run.

        Raises
        ------
        Incomplete
            There are fewer, or some twice.
        OSError
            The hook could not write them.
        RuntimeError
            The hook could not have them: nor will it of any other request.
        """
        self.look()
        for name, text in self._faults.items():
            if name.startswith(f"{rid}."):
                _raise_fault(text)
        pieces = _continuous(self._pieces.get(rid, []), rows)
        if len(pieces) == 1 and pieces[0].count == rows and pieces[0].file.endswith(PART):
            arrays, _ = self._open(pieces[0].file)
            if set(arrays) == {*self._keys, TOKENS}:
                tokens: list[int] = arrays[TOKENS].tolist()
                del arrays
                shutil.move(self._folder / pieces[0].file, into)
                return tokens
        import torch
        from safetensors.torch import save_file

        opened = [self._rows(p) for p in pieces]
        joined = {k: torch.cat([o[k] for o in opened])[:rows] for k in (*self._keys, TOKENS)}
        part = into.with_name(f".{into.name}")
        save_file(joined, str(part))
        part.replace(into)
        return [int(t) for t in joined[TOKENS].tolist()]

    def drop(self, rid: str) -> None:
        """Forget a request and remove what is left of it."""
        self._wanted.discard(rid)
        for piece in self._pieces.pop(rid, []):
            self._release(piece.file)
        for name in [n for n in self._faults if n.startswith(f"{rid}.")]:
            del self._faults[name]
            self._remove(name)

    def clear(self) -> None:
        """Remove all files of the run."""
        for name in os.listdir(self._folder):
            if name.lstrip(".").startswith(self.run):
                self._remove(name)
        self._pieces, self._faults, self._uses, self._steps = {}, {}, Counter(), {}

    def _note_part(self, name: str) -> None:
        rid, _, number, start, count = name.removesuffix(PART).split(".")
        self._note(rid, _Piece(file=name, number=int(number), start=int(start), count=int(count), row=0))
        self._settle(name)

    def _note_step(self, name: str) -> None:
        """Note the rows of a step, whose file stays mapped: each of its requests takes one row of it."""
        number = int(name.removesuffix(STEP).split(".")[2])
        self._steps[name], metadata = self._open(name)
        for row, (rid, start) in enumerate(json.loads(metadata[SEGMENTS])):
            self._note(rid, _Piece(file=name, number=number, start=start, count=1, row=row))
        self._settle(name)

    def _note_fault(self, name: str) -> None:
        rid = name.split(".", 1)[0]
        if rid in self._wanted:
            self._faults[name] = (self._folder / name).read_text("utf-8")
        else:
            self._remove(name)

    def _note(self, rid: str, piece: _Piece) -> None:
        if rid in self._wanted:
            self._pieces.setdefault(rid, []).append(piece)
            self._uses[piece.file] += 1

    def _settle(self, name: str) -> None:
        """Remove a file of which nothing is wanted: a request that was given up, a step after its last."""
        if not self._uses[name]:
            del self._uses[name]
            self._steps.pop(name, None)
            self._remove(name)

    def _open(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return a file's tensors, mapped into memory, and its metadata."""
        from safetensors import safe_open

        with safe_open(str(self._folder / name), framework="pt") as f:
            return {key: f.get_tensor(key) for key in list(f.keys())}, f.metadata() or {}

    def _rows(self, piece: _Piece) -> dict[str, torch.Tensor]:
        arrays = self._steps[piece.file] if piece.file in self._steps else self._open(piece.file)[0]
        return {k: arrays[k][piece.row : piece.row + piece.count] for k in (*self._keys, TOKENS)}

    def _release(self, name: str) -> None:
        self._uses[name] -= 1
        self._settle(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / name).unlink()


def _raise_fault(text: str) -> NoReturn:
    """Raise what the hook had to say; nothing: its disk was full."""
    told = json.loads(text) if text else {"message": "the staging folder took nothing more", "errno": errno.ENOSPC}
    if "errno" in told:
        raise OSError(told["errno"], told["message"])
    raise RuntimeError(told["message"])


def _continuous(pieces: list[_Piece], rows: int) -> list[_Piece]:
    """Return the pieces that hold tokens 0 to ``rows``, each once."""
    out: list[_Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda p: p.number):
        if piece.start == 0:
            out, end = [], 0
        if piece.start != end:
            what = "are missing" if piece.start > end else "came twice"
            low, high = sorted((piece.start, end))
            raise Incomplete(f"rows {low} to {high - 1} {what}")
        out.append(piece)
        end += piece.count
    if end < rows:
        raise Incomplete(f"{end} rows came, not {rows}")
    while out and end - out[-1].count >= rows:
        end -= out.pop().count
    return out
