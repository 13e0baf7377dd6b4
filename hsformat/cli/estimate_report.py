"""What ``hsformat estimate`` prints: every figure with what it rests on, as JSON-able data and as text.

May import everything below ``cli``, and ``estimate`` for its types.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from hsformat.cli.output import human_bytes
from hsformat.dtypes import numpy_dtype
from hsformat.store.array_json import ArraySpec
from hsformat.store.arrays import Dimensions, encode_array
from hsformat.store.places import free_bytes
from hsformat.store.size import COMPACT_RATIO, LEAST_RATIO, StoreSize

if TYPE_CHECKING:
    from hsformat.cli.estimate import Found

__all__ = ["report_facts", "report_lines"]

_MEASURED_MIB = 8
_WIDTH = 100
_UNIT_TFLOPS = 100
"""A rate in which time can be told where none is given: a run takes more or less in proportion."""
_SHOWN_CAPTURES = 8


def report_facts(
    found: Found, out: str | None, *, segment_mib: int, commit_seconds: float, rate: float | None, tflops: float | None
) -> dict[str, Any]:
    """Return all figures, and under ``basis`` what they rest on."""
    d, size = found.dimensions, found.plan.finish()
    kinds, encoding = _kinds(d, size), _encoding_rate(d)
    operations = None if isinstance(found.cost, str) else found.operations
    basis = _basis(found, commit_seconds, rate, tflops)
    if rate is None and tflops is not None and operations:
        rate = size.tokens / (operations / (tflops * 1e12))
    return {
        "records": size.records,
        "tokens": size.tokens,
        "tokens_of_prompts": found.needs.tokens if found.generate else None,
        "already_stored": found.there,
        "hidden_size": d.hidden_size,
        "dtype": d.target_dtype,
        "captures": [c.key for c in d.captures],
        "codec": d.codec,
        "bytes": {
            **kinds,
            "raw": size.raw,
            "metadata": size.metadata,
            "on_disk": size.stored,
            "at_least": found.needs.least,
        },
        "segments": size.segments,
        "segment_mib": segment_mib,
        "files": size.files if found.stored is None else size.files - 2,  # a store that is there has its root
        "out": out,
        "free": None if out is None else free_bytes(out),
        "operations": operations,
        "seconds": None if rate is None else size.tokens / rate,
        "more_segments_by_time": None if rate is None else _by_time(size, commit_seconds, rate),
        "encoding_bytes_per_second": round(encoding),
        "encoding_seconds": sum(kinds["states"].values()) / encoding,
        "basis": basis,
        "preparation": None if found.summary is None else found.summary.to_dict(),
    }


def _kinds(dimensions: Dimensions, size: StoreSize) -> dict[str, Any]:
    """Return the bytes of arrays by what they are, before they are encoded."""
    states = {c.key: size.arrays[f"hidden/{c.key}"] for c in dimensions.captures}
    tokens = size.arrays["input_ids"] + size.arrays["loss_mask"]
    return {"states": states, "tokens": tokens, "indexes": size.raw - tokens - sum(states.values())}


def _by_time(size: StoreSize, commit_seconds: float, rate: float) -> int:
    """Return how many segments there may be besides: each commit by time ends one early."""
    most = size.records - size.segments
    return min(int(size.tokens / rate / commit_seconds), most) if commit_seconds else most


def _encoding_rate(dimensions: Dimensions) -> float:
    """Return how many bytes of states are encoded a second, here and now: of random ones, and without the disk."""
    dtype = numpy_dtype(dimensions.captures[0].dtype)
    width = min(dimensions.hidden_size, _MEASURED_MIB * 2**20 // dtype.itemsize)
    rows = max(_MEASURED_MIB * 2**20 // (width * dtype.itemsize), 1)
    states = np.random.default_rng(0).standard_normal((rows, width), np.float32).astype(dtype)
    spec = ArraySpec(name="hidden/d1", shape=states.shape, dtype=dtype, axis="state")
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        list(encode_array(states, spec, codec=dimensions.codec))
        best = min(best, time.perf_counter() - started)
    return states.nbytes / best


def _basis(found: Found, commit_seconds: float, rate: float | None, tflops: float | None) -> dict[str, str]:
    d, generate = found.dimensions, found.generate
    tokens = "given" if found.summary is None else "counted, by preparing the data as a run does"
    if d.codec == "fast":
        on_disk = "computed; without the contract, provenance and the engine's description, some kilobytes"
        least = "computed: the arrays alone"
    else:
        on_disk = (
            f"an estimate: states at {COMPACT_RATIO[d.target_dtype]} of their bytes, measured on real states in "
            f"{d.target_dtype} (docs/benchmarks.md; less where records begin alike), all else uncompressed"
        )
        least = f"states at {LEAST_RATIO} of their bytes, below their entropy (docs/benchmarks.md)"
        least += ", each shared beginning once" if found.summary else ""
    return {
        "tokens": f"{tokens}; an upper bound, with {generate} new tokens a record" if generate else tokens,
        "raw": "computed from the tokens",
        "on_disk": on_disk,
        "at_least": f"{least}, with one new token a record" if generate else least,
        "segments": f"computed by size, in the order of the data; a run also commits every {commit_seconds:g} s",
        "free": "what the file system says now",
        "time": _basis_of_time(found, rate, tflops),
        "encoding": f"measured now on {_MEASURED_MIB} MiB of random states; what the disk takes is not measured",
    }


def _basis_of_time(found: Found, rate: float | None, tflops: float | None) -> str:
    measured = "--tokens-per-second, as the progress of a short run shows it"
    if rate is not None:
        return f"at {rate:g} tokens/s, as given"
    if isinstance(found.cost, str):
        return f"not estimated: {found.cost}; give {measured}"
    counted = (
        f"computed from the config: {found.operations:.3g} operations, 2 for each of {found.cost.layers:,} parameters "
        "that a token goes through, and attention; padding, reading weights and writing states are left out"
    )
    if tflops is None:
        return f"for each {_UNIT_TFLOPS} TFLOP/s that the engine sustains (--tflops): {counted}; or give {measured}"
    return f"at {tflops:g} TFLOP/s sustained, as given: {counted}"


def report_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the figures as lines of text, each with what it rests on."""
    there = f", {facts['already_stored']:,} more are stored already" if facts["already_stored"] else ""
    yield f"estimate: {facts['records']:,} records, {facts['tokens']:,} tokens{there}"
    for name, figure, basis in _rows(facts):
        head = f"  {name:<9} {figure:>10}  "
        yield textwrap.fill(
            basis, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, figure and basis of each line."""
    basis, nbytes, keys = facts["basis"], facts["bytes"], facts["captures"]
    shown = keys if len(keys) <= _SHOWN_CAPTURES else [*keys[:3], "...", keys[-1]]
    of_each = human_bytes(nbytes["states"][keys[0]], digits=2)
    yield "tokens", f"{facts['tokens']:,}", basis["tokens"]
    yield (
        "states",
        human_bytes(sum(nbytes["states"].values()), digits=2),
        f"{len(keys)} captures of {of_each} ({', '.join(shown)}), {facts['hidden_size']:,} wide, {facts['dtype']}",
    )
    yield "ids, mask", human_bytes(nbytes["tokens"], digits=2), "of all tokens"
    yield "indexes", human_bytes(nbytes["indexes"], digits=2), "offsets, record ids, statistics"
    yield "raw", human_bytes(nbytes["raw"], digits=2), basis["raw"]
    yield "on disk", human_bytes(nbytes["on_disk"], digits=2), f"with {facts['codec']}: {basis['on_disk']}"
    yield "at least", human_bytes(nbytes["at_least"], digits=2), basis["at_least"]
    if facts["out"] is not None:
        free = "not known" if facts["free"] is None else human_bytes(facts["free"], digits=2)
        yield "free", free, f"at {facts['out']}: {basis['free']}"
    yield (
        "segments",
        f"{facts['segments']:,}",
        f"of at most {facts['segment_mib']:,} MiB, or one record: {basis['segments']}",
    )
    yield "files", f"{facts['files']:,}", "in all"
    if facts["seconds"] is None:
        hours = None if facts["operations"] is None else facts["operations"] / (_UNIT_TFLOPS * 1e12) / 3600
        yield "time", "not known" if hours is None else f"{hours:.3g} hours", basis["time"]
    else:
        more = facts["more_segments_by_time"]
        by_time = f"; up to {more:,} segments more by time" if more else ""
        yield "time", _duration(facts["seconds"]), f"{basis['time']}{by_time}"
    speed = f"{human_bytes(facts['encoding_bytes_per_second'])}/s"
    yield "encoding", _duration(facts["encoding_seconds"]), f"of it, at {speed}: {basis['encoding']}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    try:
        return str(timedelta(seconds=round(seconds)))
    except OverflowError:  # more than three million years
        return f"{seconds:.3g} s"
