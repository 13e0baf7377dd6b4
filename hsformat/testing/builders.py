"""Builders of small valid objects, and what compares them: a test changes the one thing that it is about.

May import everything of the core but the command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsformat.contract import Contract
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record
from hsformat.store import append, create

__all__ = [
    "assert_same_bytes",
    "assert_same_record",
    "build_store",
    "digest",
    "tiny_contract",
    "tiny_record",
    "tiny_target",
]


def digest(fill: str) -> str:
    """Return a digest of one repeated hex digit."""
    return f"sha256:{fill * 64}"


def tiny_contract(**changes: Any) -> Contract:
    """Return a contract: 4 layers, hidden size 8, vocabulary 100, captures d1, d2, d3, d4 in bfloat16.

    ``changes`` replace top-level fields, in JSON form or as models; ``target`` may be a dict of the target's fields
    to change.
    """
    data: dict[str, Any] = {
        "spec_version": "1.0",
        "target": {
            "name": "tiny",
            "revision": None,
            "architecture": "LlamaForCausalLM",
            "num_layers": 4,
            "hidden_size": 8,
            "vocab_size": 100,
            "dtype": "bfloat16",
            "quantization": None,
            "embedding": {"scale": 1.0, "tied": True},
            "head": {"bias": False, "softcap": None, "scale": 1.0, "padded_vocab": 100},
            "final_norm": {"kind": "rmsnorm", "eps": 1e-5, "unit_offset": False},
            "rope": [{"applies_to": "all", "kind": "default", "theta": 10000.0, "rotary_dim": 4, "parameters": {}}],
            "config_digest": digest("1"),
            "basis_digest": digest("2"),
            "weights_digest": None,
        },
        "tokenizer_digest": digest("3"),
        "captures": [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (1, 2, 3, 4)],
        "positions": "1d",
        "codec": "compact",
        "fields": [],
        "layout": {"aux": ["d1", "d2", "d3"], "last": "d4"},
    }
    if isinstance(changes.get("target"), dict):
        data["target"].update(changes.pop("target"))
    return Contract.model_validate({**data, **changes})


def tiny_record(
    contract: Contract,
    id: str = "r0",
    tokens: int = 7,
    seed: int = 0,
    **changes: Any,
) -> Record:
    """Return a valid record of random ids and states; the last half of its tokens (at least one) is supervised.

    ``changes`` replace arguments of :class:`Record`; ``hidden`` replaces single captures.
    """
    rng = np.random.default_rng(seed)
    target = contract.target
    mask = np.zeros(tokens, np.uint8)
    mask[tokens // 2 :] = 1
    arguments: dict[str, Any] = {
        "id": id,
        "input_ids": rng.integers(0, target.vocab_size, tokens, dtype=np.int32),
        "loss_mask": mask,
        "hidden": {
            c.key: rng.standard_normal((tokens, target.hidden_size)).astype(numpy_dtype(c.dtype))
            for c in contract.captures
        },
        "fields": {
            f.name: np.ones((tokens, *f.shape) if f.axis == "token" else f.shape, numpy_dtype(f.dtype))
            for f in contract.fields
        },
    }
    if "hidden" in changes:
        arguments["hidden"].update(changes.pop("hidden"))
    return Record(**{**arguments, **changes})


def tiny_target(folder: str | os.PathLike[str], **config: Any) -> Path:
    """Write a model folder of :func:`tiny_contract`'s target and return it: enough to be described, not to be run.

    It has a config of Llama, a tokenizer, and in bfloat16 the embedding, the final norm and lm_head, random ones. The
    values of ``config`` replace those of ``config.json``; None removes one.
    """
    import ml_dtypes
    from safetensors.numpy import save_file

    target = tiny_contract().target
    data: dict[str, Any] = {
        "architectures": [target.architecture],
        "model_type": "llama",
        "dtype": target.dtype,
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_attention_heads": 2,
        "num_hidden_layers": target.num_layers,
        "max_position_embeddings": 128,
        "rms_norm_eps": target.final_norm.eps,
        "rope_theta": target.rope[0].theta,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        **config,
    }
    rng = np.random.default_rng(0)
    matrix, h = (target.vocab_size, target.hidden_size), target.hidden_size
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal(matrix),
        "model.norm.weight": rng.uniform(0.5, 2, h),
        "lm_head.weight": rng.standard_normal(matrix),
    }
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}), encoding="utf-8")
    (path / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', encoding="utf-8"
    )
    save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}, path / "model.safetensors")
    return path


def build_store(
    path: str | os.PathLike[str],
    contract: Contract,
    records: Sequence[Record],
    segments: int = 1,
    *,
    writers: int = 1,
    chunk_tokens: int | None = None,
) -> Path:
    """Write records into a new store and return its path.

    Parameters
    ----------
    segments
        The records are cut, in order, into so many segments; empty ones are left out, as every writer does.
    writers
        Segments are dealt to so many writers in turn. Within a writer records keep their order; writers that open
        within one millisecond have no order among them, so that only one writer keeps the order of all records.
    chunk_tokens
        Rows of a chunk of states.

    Raises
    ------
    InvalidRecord
        A record breaks the contract.
    StoreError
        HS501: something is at the path.
    ValueError
        ``segments`` or ``writers`` is not positive.
    """
    if segments <= 0 or writers <= 0:
        raise ValueError(f"segments {segments} and writers {writers} must be above 0")
    opened = [create(path, contract, chunk_tokens=chunk_tokens)]
    opened += [append(path, chunk_tokens=chunk_tokens) for _ in range(writers - 1)]
    for i in range(segments):
        writer = opened[i % writers]
        for record in records[i * len(records) // segments : (i + 1) * len(records) // segments]:
            writer.append(record)
        writer.flush()
    for writer in opened:
        writer.close()
    return Path(path)


def assert_same_bytes(got: bytes | memoryview, wanted: bytes | memoryview, where: object = "") -> None:
    """Compare bytes of any number; pytest's own comparison of megabytes takes minutes to explain what differs.

    Raises
    ------
    AssertionError
        Another length or another byte; the message has both lengths, or the first place that differs.
    """
    if got == wanted:
        return
    if len(got) != len(wanted):
        raise AssertionError(f"{where}: {len(got)} bytes, not {len(wanted)}")
    first = int(np.argmax(np.frombuffer(got, np.uint8) != np.frombuffer(wanted, np.uint8)))
    raise AssertionError(f"{where}: byte {first} of {len(got)} is {got[first]:#04x}, not {wanted[first]:#04x}")


def assert_same_record(got: Record, wanted: Record) -> None:
    """Compare everything of two records, floats bit by bit; positions of 0..T-1 are the same as none.

    Raises
    ------
    AssertionError
        Something differs; the message names it.
    """
    for name in ("id", "provenance", "source_digest"):
        a, b = getattr(got, name), getattr(wanted, name)
        if a != b:
            raise AssertionError(f"{name}: {a!r}, not {b!r}")
    default = np.arange(wanted.num_tokens)
    for name in ("input_ids", "loss_mask", "position_ids"):
        a, b = (default if x is None else x for x in (getattr(got, name), getattr(wanted, name)))
        np.testing.assert_array_equal(a, b, err_msg=name)
    for kind in ("hidden", "fields"):
        mine, theirs = getattr(got, kind), getattr(wanted, kind)
        if list(mine) != list(theirs):
            raise AssertionError(f"{kind}: {list(mine)}, not {list(theirs)}")
        for key, array in mine.items():
            if (array.dtype, array.shape) != (theirs[key].dtype, theirs[key].shape):
                raise AssertionError(f"{kind}[{key!r}]: {array.dtype} {array.shape}")
            if array.tobytes() != theirs[key].tobytes():
                raise AssertionError(f"{kind}[{key!r}]: other bits")
