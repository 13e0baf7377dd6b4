"""Any valid records, cut into any segments and chunks, come back bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from factories import assert_same_record, digest, tiny_contract
from hypothesis import given
from hypothesis import strategies as st

import hsformat.store as hs
from hsformat.contract import Contract
from hsformat.dtypes import numpy_dtype
from hsformat.record import Generation, Provenance, Record

FIELD_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64")
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    return tiny_contract(
        target={"hidden_size": draw(st.integers(1, 9))},
        captures=[
            {"depth": d, "norm": norm, "dtype": draw(st.sampled_from(("bfloat16", "float16", "float32")))}
            for d, norm in ((2, "none"), (4, "final"))
        ],
        layout={"aux": ["d2"], "last": "d4n"},
        codec=draw(st.sampled_from(("compact", "fast"))),
        fields=[
            {
                "name": f"f{i}",
                "axis": draw(st.sampled_from(("token", "record"))),
                "dtype": draw(st.sampled_from(FIELD_DTYPES)),
                "shape": draw(st.lists(st.integers(1, 3), max_size=2)),
                "must_understand": False,
            }
            for i in range(draw(st.integers(0, 2)))
        ],
    )


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return any bit patterns of a type: signed zeros, subnormal numbers, NaN payloads."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def states(rng: np.random.Generator, shape: tuple[int, int], name: str) -> np.ndarray[Any, Any]:
    """Return finite bit patterns without a row of zeros."""
    array = random_bits(rng, shape, numpy_dtype(name)).copy()
    array[~np.isfinite(array.astype(np.float32))] = 1
    array[(array == 0).all(axis=1)] = 1
    return array


@st.composite
def records(draw: st.DrawFn, contract: Contract, record_id: str) -> Record:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    t = draw(st.integers(1, 30))
    generated = t > 1 and draw(st.booleans())
    s = t - 1 if generated else t
    mask = rng.integers(0, 2, t)
    mask[-1] = 1
    positions = np.sort(rng.integers(0, 2**40, t)) if draw(st.booleans()) else None
    return Record(
        id=record_id,
        input_ids=rng.integers(0, contract.target.vocab_size, t).astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        hidden={c.key: states(rng, (s, contract.target.hidden_size), c.dtype) for c in contract.captures},
        position_ids=positions,
        fields={
            f.name: random_bits(rng, (t, *f.shape) if f.axis == "token" else f.shape, numpy_dtype(f.dtype))
            for f in contract.fields
        },
        provenance=Provenance(generation=Generation(mode="greedy", max_new_tokens=t)) if generated else None,
        source_digest=draw(st.none() | st.just(digest("7"))),
    )


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    contract = data.draw(contracts())
    ids = data.draw(st.lists(IDS, unique=True, max_size=4))
    written = [data.draw(records(contract, i)) for i in ids]
    segment_bytes = data.draw(st.sampled_from((1, 2_000, 10**6)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        chunk_tokens = data.draw(st.sampled_from((1, 7, 256)))
        with hs.create(path, contract, segment_bytes=segment_bytes, chunk_tokens=chunk_tokens) as writer:
            for record in written:
                writer.append(record)
        store = hs.open(path)
        assert store.ids == ids
        for i, record in enumerate(written):
            assert_same_record(store[i], record)
