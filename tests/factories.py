"""Builders of small valid objects: a test changes the one thing that it is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from hsformat.contract import Contract
from hsformat.dtypes import numpy_dtype
from hsformat.record import Record

__all__ = ["assert_same_record", "digest", "tiny_contract", "tiny_record"]


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


def assert_same_record(got: Record, wanted: Record) -> None:
    """Compare everything of two records, floats bit by bit; positions of 0..T-1 are the same as none."""
    assert (got.id, got.provenance, got.source_digest) == (wanted.id, wanted.provenance, wanted.source_digest)
    default = np.arange(wanted.num_tokens)
    for name in ("input_ids", "loss_mask", "position_ids"):
        a, b = (default if x is None else x for x in (getattr(got, name), getattr(wanted, name)))
        np.testing.assert_array_equal(a, b)
    for mine, theirs in ((got.hidden, wanted.hidden), (got.fields, wanted.fields)):
        assert list(mine) == list(theirs)
        for key, array in mine.items():
            assert (array.dtype, array.shape) == (theirs[key].dtype, theirs[key].shape), key
            assert array.tobytes() == theirs[key].tobytes(), key
