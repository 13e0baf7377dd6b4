"""Sizes computed before a store is written, against the files that the writer makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from factories import tiny_contract, tiny_record
from hypothesis import given, settings
from hypothesis import strategies as st

import hsformat.store as hs
from hsformat.contract import Contract
from hsformat.record import Generation, Provenance, Record
from hsformat.store import Store
from hsformat.store.arrays import Dimensions, array_specs, encode_array
from hsformat.store.size import (
    COMPACT_RATIO,
    LEAST_RATIO,
    MetadataSizes,
    Plan,
    PlannedRecord,
    StoreSize,
    Totals,
    fits,
    least_bytes,
    likely_bytes,
    segment_size,
)

FIELDS = [
    {"name": "logprob", "axis": "token", "dtype": "float32", "shape": [], "must_understand": False},
    {"name": "top", "axis": "token", "dtype": "bfloat16", "shape": [3], "must_understand": False},
    {"name": "label", "axis": "record", "dtype": "int64", "shape": [2], "must_understand": False},
]
DIGEST = f"sha256:{'a' * 64}"


def planned(record: Record) -> PlannedRecord:
    positions = record.position_ids is not None
    return PlannedRecord(record.id, record.num_tokens, record.num_states, positions)


def plan(contract: Contract, records: Sequence[PlannedRecord], **options: Any) -> StoreSize:
    out = Plan(Dimensions.of(contract), **{"segment_bytes": 1 << 28, **options})
    for record in records:
        out.add(record)
    return out.finish()


def files_of(path: Path) -> dict[str, int]:
    return {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}


def written(path: Path, contract: Contract, records: Sequence[Record], **options: Any) -> Store:
    with hs.create(path, contract, **{"segment_bytes": 1 << 28, **options}) as writer:
        for record in records:
            writer.append(record)
    return hs.open(path, understands=[f.name for f in contract.fields])


def with_positions(record: Record) -> Record:
    record.position_ids = np.arange(record.num_tokens) + 5
    return record


SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "one token": ({}, [{"tokens": 1}]),
    "one record": ({}, [{"tokens": 300}]),
    "wide": ({"target": {"hidden_size": 2880}}, [{"tokens": 700}, {"tokens": 9}]),
    "float32": ({"captures": [{"depth": 1, "norm": "none", "dtype": "float16"},
                              {"depth": 4, "norm": "final", "dtype": "float32"}],
                 "layout": {"aux": ["d1"], "last": "d4n"}}, [{"tokens": 40}] * 5),
    "fields": ({"fields": FIELDS}, [{"tokens": 5 + i} for i in range(9)]),
    "generated": ({}, [{"tokens": 12, "one_less": True}, {"tokens": 3}]),
    "positions": ({}, [{"tokens": 7, "positions": True}, {"tokens": 8}]),
}  # fmt: skip


@pytest.mark.parametrize("chunk_tokens", [None, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_fast_is_computed_to_the_byte(tmp_path: Path, name: str, chunk_tokens: int | None) -> None:
    changes, shapes = SHAPES[name]
    contract = tiny_contract(codec="fast", **changes)
    records = []
    for i, shape in enumerate(shapes):
        record = tiny_record(contract, f"é{i}", tokens=shape["tokens"], seed=i, source_digest=DIGEST)
        if shape.get("one_less"):
            record.hidden = {k: h[:-1] for k, h in record.hidden.items()}
            record.provenance = Provenance(generation=Generation(mode="greedy", max_new_tokens=4))
        records.append(with_positions(record) if shape.get("positions") else record)
    store = written(tmp_path / "s", contract, records, chunk_tokens=chunk_tokens)
    (segment,) = store.segments
    found = segment_size(Dimensions.of(contract), [planned(r) for r in records], chunk_tokens=chunk_tokens)
    files, made = dict(found.files), files_of(tmp_path / "s" / segment.prefix)
    commit = made.pop("zarr.json")
    if name != "generated":  # provenance is the run's
        assert commit == files["zarr.json"]
    del files["zarr.json"]
    assert files == made
    assert found.arrays == {name: s.nbytes for name, s in segment.array_specs(contract).items()}
    size = plan(contract, [planned(r) for r in records], chunk_tokens=chunk_tokens)
    files = files_of(tmp_path / "s")
    assert (size.segments, size.files) == (1, len(files))
    contract_and_provenance = files["zarr.json"] + commit - found.files["zarr.json"]
    assert size.stored == sum(files.values()) - contract_and_provenance
    assert size.raw == sum(found.arrays.values())


def test_an_estimate_of_a_long_context() -> None:  # SpecForge#426: 1.17 GB a sample, 35 TB for 30,000
    dimensions = Dimensions.of(tiny_contract(codec="fast", target={"hidden_size": 2880}))
    for times in (1, 30_000):
        out = Plan(dimensions, segment_bytes=256 << 20)
        out.add(PlannedRecord("c-0123456789abcdef", 65_536, 65_536), times=times)
        size = out.finish()
        states = sum(n for name, n in size.arrays.items() if name.startswith("hidden/"))
        assert states == 65_536 * 2880 * 4 * 2 * times == 1_509_949_440 * times
        assert size.stored == pytest.approx(1.51e9 * times, rel=0.01)
        assert (size.records, size.segments, size.files) == (times, times, 31 * times + 2)


@pytest.mark.parametrize("tokens", [4096, 1000])
def test_a_real_store_agrees_with_its_estimate(tmp_path: Path, tokens: int) -> None:  # SpecForge#426
    contract = tiny_contract(codec="fast", target={"hidden_size": 2880})
    one = np.ones((1, 2880), ml_dtypes.bfloat16)
    record = tiny_record(contract, tokens=1)
    record.input_ids, record.loss_mask = np.ones(tokens, np.int32), np.ones(tokens, np.uint8)
    record.hidden = dict.fromkeys(contract.keys, np.broadcast_to(one, (tokens, 2880)))
    written(tmp_path / "s", contract, [record])
    size, files = plan(contract, [planned(record)]), files_of(tmp_path / "s")
    assert size.stored == pytest.approx(sum(files.values()), rel=1e-3)
    assert size.files == len(files)
    if tokens == 4096:  # a sixteenth of 65,536
        assert size.stored * 16 == pytest.approx(1.51e9, rel=0.02)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    bound=st.integers(500, 20_000),
    codec=st.sampled_from(["fast", "compact"]),
)
def test_records_are_dealt_into_segments_as_the_writer_does(
    tmp_path_factory: Any, lengths: list[int], bound: int, codec: str
) -> None:
    contract, path = tiny_contract(codec=codec, fields=FIELDS), tmp_path_factory.mktemp("plan") / "s"
    records = [tiny_record(contract, f"r{i}", tokens=n, seed=i, source_digest=DIGEST) for i, n in enumerate(lengths)]
    store = written(path, contract, records, segment_bytes=bound)
    size, files = plan(contract, [planned(r) for r in records], segment_bytes=bound), files_of(path)
    assert (size.segments, size.records, size.tokens) == (len(store.segments), len(store), store.tokens)
    assert size.files == len(files)
    if codec == "fast":
        assert size.stored == sum(files.values()) - files["zarr.json"]


@settings(max_examples=15)
@given(
    runs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4),
    bound=st.integers(500, 20_000),
)
def test_records_alike_are_counted_as_one_by_one(runs: list[tuple[int, int]], bound: int) -> None:
    dimensions = Dimensions.of(tiny_contract(codec="fast"))
    at_once, one_by_one = (Plan(dimensions, segment_bytes=bound) for _ in range(2))
    for tokens, times in runs:
        at_once.add(PlannedRecord("r0", tokens, tokens), times=times)
        for _ in range(times):
            one_by_one.add(PlannedRecord("r0", tokens, tokens))
    a, b = at_once.finish(), one_by_one.finish()
    assert (a.records, a.tokens, a.segments, a.files, a.arrays, a.encoded) == (
        b.records, b.tokens, b.segments, b.files, b.arrays, b.encoded,
    )  # fmt: skip
    assert a.metadata == pytest.approx(b.metadata, abs=2 * a.segments)  # digits of the segment's number


def test_offsets_count_beyond_32_bits() -> None:  # datasets#7821, #615, #6206
    contract, many = tiny_contract(), 3_000_000_000
    specs = array_specs(contract, tokens=many, states=many, records=1, id_bytes=many, positions=False)
    assert all(s.dtype == np.int64 for name, s in specs.items() if name.endswith("offsets"))
    assert specs["hidden/d1"].nbytes == many * 16
    size = plan(contract, [PlannedRecord("r0", many, many)])
    assert (size.tokens, size.arrays["input_ids"]) == (many, many * 4)
    totals = Totals(records=1, tokens=many, states=many)
    # Its arrays are cut into chunks; but readers may hold whole what is not in hidden/ (rule G-7).
    assert not fits(Dimensions.of(contract), totals, segment_bytes=1 << 60)
    assert fits(Dimensions.of(contract), Totals(records=1, tokens=10**8, states=many), segment_bytes=1 << 60)


def test_files_follow_from_segments_not_from_records() -> None:  # napari#2012, SpecForge PR#282: a file a sample
    contract = tiny_contract(target={"hidden_size": 64})
    each = segment_size(Dimensions.of(contract), [PlannedRecord("r0", 100, 100)]).files
    for bound in (64 << 10, 1 << 20, 256 << 20):
        out = Plan(Dimensions.of(contract), segment_bytes=bound)
        out.add(PlannedRecord("r0", 100, 100), times=10_000)
        size = out.finish()
        fit = max(1, bound // (100 * (64 * 8 + 5) + 32))
        assert size.segments == -(-10_000 // fit)
        assert size.files == size.segments * len(each) + 2


@pytest.mark.parametrize("codec", ["compact", "fast"])
def test_metadata_is_sized_without_an_array(codec: Any) -> None:
    specs = array_specs(tiny_contract(fields=FIELDS), tokens=300, states=299, records=7, id_bytes=20, positions=True)
    for spec in specs.values():
        files = dict(encode_array(np.zeros(spec.shape, spec.dtype), spec, codec=codec))
        assert MetadataSizes(codec, chunk_tokens=None).of(spec) == len(files["zarr.json"])


def test_compact_is_an_estimate_by_ratio(tmp_path: Path) -> None:
    contract = tiny_contract(target={"hidden_size": 2880})
    record = tiny_record(contract, tokens=400)  # of normal numbers: their entropy is not far from that of real states
    store = written(tmp_path / "s", contract, [record])
    size = plan(contract, [planned(record)])
    assert size.stored == pytest.approx(store.nbytes, rel=0.15)
    assert size.encoded == pytest.approx(COMPACT_RATIO["bfloat16"] * 400 * 2880 * 8, rel=0.01)
    least = least_bytes(Dimensions.of(contract), tokens=400, states=400)
    assert least == int(LEAST_RATIO * 400 * 2880 * 8) < store.nbytes


def test_what_is_needed_at_least() -> None:
    def least(codec: str, *captures: tuple[int, str]) -> int:
        made = [{"depth": d, "norm": "none", "dtype": t} for d, t in captures]
        layout = {"aux": [f"d{d}" for d, _ in captures], "last": None}
        contract = tiny_contract(codec=codec, captures=made, layout=layout)
        return least_bytes(Dimensions.of(contract), tokens=100, states=99)

    assert least("fast", (1, "bfloat16"), (2, "float32")) == 99 * 8 * (2 + 4) + 100 * 5
    assert least("compact", (2, "bfloat16")) == int(LEAST_RATIO * 99 * 8 * 2)
    assert least("compact", (2, "float32")) == least("compact", (2, "bfloat16"))  # the target runs in bfloat16
    assert least("compact", (0, "bfloat16")) == 0  # rows of an embedding
    assert min(COMPACT_RATIO.values()) > LEAST_RATIO


def test_states_that_are_stored_wider_than_they_are(tmp_path: Path) -> None:
    capture = [{"depth": 2, "norm": "none", "dtype": "float32"}]
    contract = tiny_contract(captures=capture, layout={"aux": ["d2"], "last": None}, target={"hidden_size": 512})
    narrow = tiny_record(contract, tokens=300).hidden["d2"].astype(ml_dtypes.bfloat16)
    store = written(tmp_path / "s", contract, [tiny_record(contract, tokens=300, hidden={"d2": narrow})])
    likely = likely_bytes(Dimensions.of(contract), tokens=300, states=300)
    assert likely == pytest.approx(store.nbytes, rel=0.15)
    assert least_bytes(Dimensions.of(contract), tokens=300, states=300) < store.nbytes


@pytest.mark.needs("torch")
def test_a_view_of_a_batch_is_stored_alone(tmp_path: Path) -> None:  # pytorch#33101: the whole batch was saved
    import torch

    contract = tiny_contract(codec="fast", target={"hidden_size": 128})
    batch = torch.randn(64, 256, 128).to(torch.bfloat16)
    views = {key: batch[i, :256] for i, key in enumerate(contract.keys)}
    assert all(v.untyped_storage().nbytes() == batch.nbytes for v in views.values())
    record = tiny_record(contract, tokens=256, hidden=views)
    written(tmp_path / "s", contract, [record])
    tensors = sum(v.nbytes for v in views.values())
    assert tensors <= sum(files_of(tmp_path / "s").values()) < 1.15 * tensors < batch.nbytes / 12
