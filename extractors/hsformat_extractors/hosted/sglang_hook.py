"""Inside SGLang's scheduler: the hook that writes states to files. It imports nothing of hsformat but this package.

It stands on the logits processor and on the final norm (``sglang_args``). Each forward pass leaves:

- ``<rid>.<process>.<number>.<start>.<count>.part`` for each request of which it ran several tokens: tokens ``start`` to
  ``start + count`` of that request;
- ``<run>.<process>.<number>.step`` for the requests of which it ran one token (decoding), one row each; which row is
  whose stands in the file's metadata;
- ``<rid>.<process>.<number>.fault``, JSON, where states could not be had or written: ``message``, and ``errno`` where
  it was the disk; empty where not even that could be written.

The others are safetensors files with the captures' keys and ``token_ids``, written under another name and renamed.
``number`` counts the forward passes of a process. Only requests of :data:`RID` are of interest: not the engine's own
health checks, not those of other clients of a server.

The file of a pass is there before the engine answers for it: the hook runs in the thread that launches the pass.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsformat_extractors.hosted.wire import TOKENS

__all__ = ["FAULT", "PART", "RID", "SEGMENTS", "STEP", "HookConfig", "Writer", "hook_factory"]

RID = re.compile(r"(hs[0-9a-f]{8})-[0-9]+")
"""Request ids: of a run, then a number. Nothing else becomes part of a file name."""

PART, STEP, FAULT = ".part", ".step", ".fault"
SEGMENTS = "segments"
"""Member of a step's metadata: JSON, ``[[rid, position], ...]`` by row."""


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """What the hook is given; see ``sglang_args.Plan``."""

    staging: str
    aux: tuple[str, ...]
    before_norm: str | None
    after_norm: str | None
    hidden_size: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> HookConfig:
        """Return the config of JSON data."""
        return cls(**{**data, "aux": tuple(data["aux"])})


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """Tokens ``start`` to ``start + count`` of a request, which stand from row ``row`` on."""

    rid: str
    run: str
    row: int
    start: int
    count: int


def hook_factory(config: Mapping[str, Any]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """Return the forward hook (called once in each process of a scheduler, by SGLang)."""
    return Writer(HookConfig.of(config), writes=_writes()).hook


def _writes() -> bool:
    """Return whether this process is rank 0 of its attention; the others of its data-parallel rank have the same."""
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return int(parallel.attn_tp_rank) == 0 and int(parallel.attn_cp_rank) == 0


@dataclass
class Writer:
    """Writes the states of each forward pass.

    Attributes
    ----------
    config
        What to write and where.
    writes
        False: do nothing.
    """

    config: HookConfig
    writes: bool
    _process: str = field(default_factory=lambda: secrets.token_hex(4))
    _number: int = 0
    _norm: tuple[Any, Any] | None = None

    def hook(self, _module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Take what a module was given and returned; of the logits processor, or of a norm."""
        if not self.writes:
            return
        if not hasattr(output, "next_token_logits"):
            self._norm = _normed_and_residual(inputs, output)
            return
        norm, self._norm = self._norm, None
        input_ids, hidden, _, batch = inputs[:4]
        segments = [s for s in _segments(batch) if s is not None]
        if not segments:
            return
        self._number += 1
        states, reason = self._states(hidden, inputs[4] if len(inputs) > 4 else None, norm)
        reason = reason or _unfit([*states.values(), input_ids], segments)
        if reason is not None:
            self._tell({"message": reason}, segments)
            return
        try:
            self._write({**states, TOKENS: input_ids}, segments)
        except OSError as e:
            self._tell({"message": f"cannot write to {self.config.staging}: {e}", "errno": e.errno}, segments)

    def _states(self, hidden_TH: Any, aux: Any, norm: tuple[Any, Any] | None) -> tuple[dict[str, Any], str | None]:
        """Return each capture on the device, [T, H], and why there are none."""
        config, states = self.config, {}
        width = config.hidden_size
        if config.aux:
            parts = [] if aux is None else _unpacked(aux, width)
            widths = [int(p.shape[-1]) for p in parts]
            if widths != [width] * len(config.aux):
                return {}, f"the engine gave aux states of widths {widths}, not {len(config.aux)} of {width}"
            states = dict(zip(config.aux, parts, strict=True))
        if config.before_norm is not None:
            if norm is None or not _same(norm[0], hidden_TH):
                return {}, "no final norm was seen whose output the logits processor was given"
            states[config.before_norm] = norm[1]
        if config.after_norm is not None:
            states[config.after_norm] = hidden_TH
        return states, None

    def _write(self, arrays: Mapping[str, Any], segments: Sequence[_Segment]) -> None:
        rows = max(s.row + s.count for s in segments)
        host = {key: a[:rows].contiguous().cpu() for key, a in arrays.items()}
        host[TOKENS] = host[TOKENS].long()
        singles: dict[str, list[_Segment]] = {}
        for s in segments:
            if s.count == 1:
                singles.setdefault(s.run, []).append(s)
            else:
                name = f"{s.rid}.{self._process}.{self._number:09d}.{s.start}.{s.count}{PART}"
                self._save(name, {k: a[s.row : s.row + s.count] for k, a in host.items()}, {})
        for run, alone in singles.items():
            chosen = [s.row for s in alone]
            meta = {SEGMENTS: json.dumps([[s.rid, s.start] for s in alone])}
            name = f"{run}.{self._process}.{self._number:09d}{STEP}"
            self._save(name, {k: a[chosen] for k, a in host.items()}, meta)

    def _save(self, name: str, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
        from safetensors.torch import save_file

        path = Path(self.config.staging) / name
        part = path.with_name(f".{name}")
        try:
            save_file(arrays, str(part), metadata=metadata)
            part.replace(path)
        except BaseException as e:  # raised again: half a file does not stay
            with contextlib.suppress(OSError):
                part.unlink()
            if type(e).__name__ == "SafetensorError":  # what the system said stands in its text
                raise OSError(errno.ENOSPC if "StorageFull" in str(e) else errno.EIO, str(e)) from e
            raise

    def _tell(self, reason: Mapping[str, Any], segments: Sequence[_Segment]) -> None:
        print(f"hsformat: {reason['message']}", flush=True)
        for s in segments:
            path = Path(self.config.staging) / f"{s.rid}.{self._process}.{self._number:09d}{FAULT}"
            with contextlib.suppress(OSError):
                part = path.with_name("." + path.name)  # so that no reader sees half of it
                part.write_text(json.dumps(reason), encoding="utf-8")
                part.replace(path)


def _normed_and_residual(inputs: tuple[Any, ...], output: Any) -> tuple[Any, Any] | None:
    """Return what a norm made, and the residual stream before it: it returns both, or was given the latter."""
    if isinstance(output, tuple):
        return (output[0], output[1]) if len(output) == 2 else None
    return (output, inputs[0]) if inputs else None


def _same(a: Any, b: Any) -> bool:
    """Return whether two tensors are the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


def _unpacked(aux: Any, width: int) -> list[Any]:
    """Return a list of [T, H], given as such or as one [T, K * H]."""
    if isinstance(aux, list | tuple):
        return list(aux)
    return list(aux.split(width, dim=-1))


def _segments(batch: Any) -> Iterator[_Segment | None]:
    """Yield which rows are whose; None: of a request that is not ours. Padding stands behind all of them."""
    mode = getattr(batch, "_original_forward_mode", None) or batch.forward_mode
    if mode.is_idle():
        return
    rids = batch.rids or []
    if mode.is_decode():
        # Under attention data parallelism a decode step may be run as an extension by one token each, with padding.
        starts = [int(p) for p in batch.positions[: len(rids)].tolist()]
        counts = [1] * len(rids)
    else:
        starts, counts = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
    row = 0
    for rid, start, count in zip(rids, starts, counts, strict=False):
        if count:
            m = RID.fullmatch(rid)
            yield None if m is None else _Segment(rid=rid, run=m[1], row=row, start=int(start), count=int(count))
        row += int(count)


def _unfit(arrays: Sequence[Any], segments: Sequence[_Segment]) -> str | None:
    """Return why there are not the rows that there should be."""
    needed = max(s.row + s.count for s in segments)
    if short := [int(a.shape[0]) for a in arrays if int(a.shape[0]) < needed]:
        return (
            f"the forward pass ran {needed} tokens, and gave {min(short)} rows: "
            "states are shared among ranks (context or sequence parallelism), which is not supported"
        )
    return None
