"""Our own decoder and zarr-python give equal bytes, whatever is asked for and wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_contract
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hsformat.store as hs
from hsformat.digests import Checksum
from hsformat.problems import StoreError
from hsformat.store.backend import CountedSource, RangedObject
from hsformat.store.local import LocalBackend, LocalFile
from hsformat.store.segment import SegmentReader
from hsformat.testing.builders import assert_same_bytes, assert_same_record, tiny_record

FIELDS = [
    {"name": "logprob", "axis": "token", "dtype": "float32", "shape": [], "must_understand": False},
    {"name": "top", "axis": "token", "dtype": "bfloat16", "shape": [3], "must_understand": False},
    {"name": "weight", "axis": "record", "dtype": "float64", "shape": [2], "must_understand": False},
]


@pytest.mark.parametrize("codec", ["compact", "fast"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_both_decoders_give_equal_bytes(tmp_path_factory: pytest.TempPathFactory, codec: Any, data: Any) -> None:
    contract = tiny_contract(fields=FIELDS)
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    positions = data.draw(st.booleans())
    records = [
        tiny_record(contract, f"r{i}", tokens=n, seed=i, position_ids=np.arange(n) + 3 if positions else None)
        for i, n in enumerate(lengths)
    ]
    path = tmp_path_factory.mktemp("s") / "s"
    with hs.create(path, contract, codec=codec, chunk_tokens=data.draw(st.integers(1, 70))) as writer:
        for record in records:
            writer.append(record)
    stores = [hs.open(path), hs.open(path, verify=False), hs.open(path, decoder="zarr")]
    for i in data.draw(st.permutations(range(len(records)))):
        for store in stores:
            assert_same_record(store[i], records[i])
    readers = [SegmentReader(LocalBackend(str(path)), contract, s.segments[0], decoder=d) for s, d in
               ((stores[0], "native"), (stores[0], "zarr"))]  # fmt: skip
    rows = sum(lengths)
    for _ in range(5):
        first = data.draw(st.integers(0, rows))
        last = data.draw(st.integers(first, rows))
        for name in ("hidden/d2", "input_ids", "fields/top"):
            one, other = (r.rows(name, slice(first, last)) for r in readers)
            assert one.tobytes() == other.tobytes()
            assert one.dtype == other.dtype
            assert one.shape == other.shape


@pytest.mark.parametrize("codec", ["compact", "fast"])
def test_a_stream_reads_every_byte_once_and_every_row(tmp_path: Path, codec: Any) -> None:
    contract = tiny_contract(target={"hidden_size": 512})
    records = [tiny_record(contract, f"r{i}", tokens=400 + i, seed=i) for i in range(6)]  # 2.4 MB: several blocks
    with hs.create(tmp_path / "s", contract, codec=codec) as writer:
        for record in records:
            writer.append(record)
    commit = hs.open(tmp_path / "s").segments[0]
    reader = SegmentReader(LocalBackend(str(tmp_path / "s")), contract, commit)
    for name in ("hidden/d3", "input_ids"):
        total = Checksum()
        blocks = reader.stream(name, total.update)
        assert blocks is not None
        rows = b"".join(block.tobytes() for block in blocks)
        arrays = [r.hidden["d3"] if name == "hidden/d3" else np.asarray(r.input_ids, np.int32) for r in records]
        assert_same_bytes(rows, b"".join(a.tobytes() for a in arrays), name)
        (file,) = (f for key, f in commit.files.items() if key.startswith(f"{name}/c/"))
        assert str(total) == file.checksum


@pytest.fixture
def path(tmp_path: Path) -> Path:
    contract = tiny_contract()
    with hs.create(tmp_path / "s", contract, codec="fast", chunk_tokens=16) as writer:
        for i in range(6):
            writer.append(tiny_record(contract, f"r{i}", tokens=20, seed=i))
    return tmp_path / "s"


def test_without_verification_rows_alone_are_read(path: Path) -> None:
    """Of each capture the bytes of the rows, in one call."""
    contract = hs.open(path).contract
    calls: list[tuple[int, int]] = []

    class Noted(LocalBackend):
        def open_object(self, key: str) -> Any:
            real = super().open_object(key)

            class Object:
                def read_into(self, start: int, parts: Any) -> int:
                    if "hidden/d2" in key:
                        calls.append((start, sum(map(len, parts))))
                    return real.read_into(start, parts)

            return Object()

    store = hs.open(Noted(str(path)), verify=False)
    store.read(2, captures=["d2"])  # rows 40 to 59: chunks 2 and 3, which have 4 bytes of checksum each
    row = contract.target.hidden_size * 2
    index, states = calls
    assert index[1] == 16 * 8 + 4
    assert states == (40 * row + 2 * 4, 20 * row + 4)


def test_a_flipped_bit_is_seen_with_verification_alone(path: Path) -> None:
    (shard,) = path.glob("segments/*/hidden/d2/c/0/0")
    data = bytearray(shard.read_bytes())
    data[1] ^= 1
    shard.write_bytes(data)
    for decoder in ("native", "zarr"):
        with pytest.raises(StoreError, match="HS504"):
            hs.open(path, decoder=decoder)[0]  # type: ignore[arg-type]  # text
    assert hs.open(path, verify=False)[0].id == "r0"
    assert_same_record(hs.open(path)[3], tiny_record(tiny_contract(), "r3", tokens=20, seed=3))


def test_files_stay_open_and_few(path: Path) -> None:
    """A record after the first opens no file; what is counted goes through the same objects."""
    seen: list[int] = []
    source = CountedSource(LocalBackend(str(path)), seen.append)
    reader = SegmentReader(source, hs.open(path).contract, hs.open(path).segments[0])
    reader.record(0, ("d2",))
    before = source.bytes_read
    reader.record(1, ("d2",))
    assert source.bytes_read > before
    assert seen == sorted(seen)


def test_ranges_are_as_good_as_open_files(path: Path) -> None:
    local = LocalBackend(str(path))
    (key,) = [e.key for e in local.listing("segments") if e.key.endswith("hidden/d2/c/0/0")]
    assert isinstance(local.open_object(key), LocalFile)
    for start, sizes in ((0, (3, 5)), (7, (100,)), (10**6, (4,))):
        one, other = ([np.zeros(n, np.uint8) for n in sizes] for _ in range(2))
        assert local.open_object(key).read_into(start, one) == RangedObject(local, key).read_into(start, other)
        assert np.array_equal(np.concatenate(one), np.concatenate(other))
