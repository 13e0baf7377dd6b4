"""Object stores: the conformance suite on obstore's memory and folder, and on a server of S3's protocol."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading

import numpy as np
import pytest
from factories import assert_same_record, tiny_contract, tiny_record
from obstore.store import LocalStore, MemoryStore, S3Store
from s3_server import request

import hsformat as hs
from hsformat.problems import StoreError
from hsformat.store import objects
from hsformat.store.objects import ObjectBackend, parse_address
from hsformat.store.uploads import PART_BYTES
from hsformat.testing import StoreConformance, assert_same_bytes


class TestMemoryStore(StoreConformance):
    examples = 5

    @pytest.fixture(autouse=True)
    def _stores(self):
        self.stores: dict[str, MemoryStore] = {}

    def place(self, name):
        return ObjectBackend(f"memory:{name}", store=self.stores.setdefault(name, MemoryStore()))


class TestLocalStore(StoreConformance):
    examples = 5

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path):
        self.root = tmp_path

    def place(self, name):
        store = LocalStore(self.root / name, mkdir=True, automatic_cleanup=True)
        return ObjectBackend(f"file:{self.root / name}", store=store)


class TestS3(StoreConformance):
    """moto's server, which honours If-None-Match."""

    examples = 3
    kill_step = 19

    @pytest.fixture(autouse=True)
    def _bucket(self, s3):
        self.bucket = s3

    def place(self, name):
        return ObjectBackend(f"s3://{self.bucket}/{name}")


CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, id=f"r{i}", tokens=9, seed=i) for i in range(4)]


@pytest.fixture
def stored(s3):
    """Return the address of a store of four records in two segments."""
    address = f"s3://{s3}/a b/data.hs.zarr"
    with hs.create(address, CONTRACT, chunk_tokens=4) as writer:
        for i, record in enumerate(RECORDS):
            writer.append(record)
            if i == 1:
                writer.flush()
    return address


def refused(action) -> hs.Problem:
    with pytest.raises(StoreError) as e:
        action()
    return e.value.problems[0]


def test_a_store_at_an_address(stored):
    for decoder in ("native", "zarr"):
        store = pickle.loads(pickle.dumps(hs.open(stored, decoder=decoder)))
        for record in RECORDS:
            assert_same_record(store[record.id], record)
    assert hs.validate_store(stored, level="full") == []
    with hs.append(f"{stored}/") as writer:
        assert sorted(writer.ids) == ["r0", "r1", "r2", "r3"]
        writer.append(tiny_record(CONTRACT, id="r4"))
    assert len(hs.open(stored)) == 5
    assert refused(lambda: hs.create(stored, CONTRACT)).code == "HS501"


def test_what_is_lost_or_changed_is_named(stored, s3):
    backend = ObjectBackend(stored)
    name = hs.open(stored).segments[0].name
    for key, code in (("hidden/d2/c/0/0", "HS503"), ("hidden/d3/c/0/0", "HS504")):
        data = bytearray(backend.read(f"segments/{name}/{key}"))
        backend.remove(f"segments/{name}/{key}")
        if code == "HS504":
            data[0] ^= 1
            backend.write(f"segments/{name}/{key}", bytes(data))
    for decoder in ("native", "zarr"):
        store = hs.open(stored, decoder=decoder)
        assert refused(lambda store=store: store.read("r0", captures=["d2"])).code == "HS503"
        assert refused(lambda store=store: store.read("r0", captures=["d3"])).code == "HS504"
        assert_same_record(store["r3"], RECORDS[3])
    assert {p.code for p in hs.validate_store(stored, level="full")} == {"HS503", "HS504"}


def read_one(address: str) -> None:
    """Read a record in another process, and give its ids' sum as the exit code; 99: refused."""
    try:
        sys.exit(int(hs.open(address)["r1"].input_ids.sum()) % 50)
    except StoreError as e:
        sys.exit(99 if "spawn" in e.problems[0].got else 98)


@pytest.mark.parametrize(("method", "code"), [("spawn", int(RECORDS[1].input_ids.sum()) % 50), ("fork", 99)])
def test_other_processes(stored, method, code):
    """A forked one has none of obstore's threads: it says so, and does not wait for ever."""
    process = multiprocessing.get_context(method).Process(target=read_one, args=(stored,))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == code


def test_large_objects_are_uploaded_in_parts_and_given_up_whole(s3, s3_address):
    backend, data = ObjectBackend(f"s3://{s3}/x"), np.arange(PART_BYTES // 8 * 5 // 2).view(np.uint8)
    whole, given_up = backend.create("whole"), backend.create("given-up")
    for sink in (whole, given_up):
        sink.write(data)
    assert backend.size("whole") is None
    whole.close()
    given_up.abort()
    given_up.abort()
    assert_same_bytes(backend.read("whole"), data.tobytes())
    assert_same_bytes(backend.read("whole", 5, 2 * PART_BYTES + 1), data[5 : 2 * PART_BYTES + 6].tobytes())
    assert backend.size("given-up") is None
    assert b"<UploadId>" not in request(s3_address, "GET", f"/{s3}?uploads"), "parts that are paid for and not seen"
    late = backend.create("late")
    late.write(data)
    backend.write("late", b"first")
    with pytest.raises(FileExistsError):
        late.close()
    assert backend.read("late") == b"first"


def test_reading_on_fetches_ahead(s3, monkeypatch):
    backend, data = ObjectBackend(f"s3://{s3}/x"), np.random.default_rng(0).integers(0, 256, 400_000, np.uint8)
    backend.write("k", data)
    asked: list[tuple[int, int]] = []
    real = ObjectBackend.ranges

    def ranges(self, key, start, stop):
        asked.append((start, stop))
        return real(self, key, start, stop)

    monkeypatch.setattr(ObjectBackend, "ranges", ranges)
    opened = backend.open_object("k")
    for start in range(1000, 390_000, 1000):
        part = np.empty(1000, np.uint8)
        assert opened.read_into(start, [part[:300], part[300:]]) == 1000
        assert np.array_equal(part, data[start : start + 1000])
    assert len(asked) < 12
    assert sum(stop - start for start, stop in asked) <= 400_000  # nothing twice
    asked.clear()
    opened.read_into(7, [np.empty(9, np.uint8)])
    assert asked == [(7, 16)]


def test_commit_records_are_read_at_once():
    """A store of a thousand segments would otherwise take a thousand answers, one after another, to be opened."""

    class Waits(ObjectBackend):
        barrier = threading.Barrier(4)

        def read(self, key, start=0, length=None):
            if key.count("/") == 2:
                self.barrier.wait(timeout=60)
            return super().read(key, start, length)

    backend = Waits("memory", store=MemoryStore())
    with hs.create(backend, CONTRACT, segment_bytes=1) as writer:
        for record in RECORDS:
            writer.append(record)
    assert hs.open(backend).ids == [r.id for r in RECORDS]


def test_what_a_service_says_is_passed_on(s3, monkeypatch):
    p = refused(lambda: hs.create("s3://no-such-bucket/x", CONTRACT))
    assert p.code == "HS501"
    assert "bucket does not exist (NoSuchBucket)" in p.got
    assert "\n" not in p.got
    assert refused(lambda: hs.open("s3://no-such-bucket/x")).code == "HS501"
    assert "nothing" in refused(lambda: hs.open(f"s3://{s3}/x")).got
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 0})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "listing" in refused(lambda: hs.open(f"s3://{s3}/x")).got


def test_a_service_that_fails_in_the_middle_costs_nothing_committed(stored, monkeypatch):
    writer = hs.append(stored)
    writer.append(tiny_record(CONTRACT, id="more"))
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 0})
    monkeypatch.setattr(writer._backend, "_built", S3Store("gone", client_options={"allow_http": True}))
    p = refused(writer.close)
    assert p.code == "HS506"
    assert "bucket does not exist" in p.got
    assert len(hs.open(stored)) == 4


@pytest.mark.parametrize(
    "address",
    ["s3://", "s3:///x", "s3://u:p@b/x", "s3://b/../x", "s3://b/a//c", "ftp://b/x", "memory://b", "http://b/x"],
)
def test_addresses_that_are_none(address):
    p = refused(lambda: hs.open(address))
    assert p.code == "HS501"
    assert "s3://BUCKET/PREFIX" in p.expected
    with pytest.raises(ValueError, match=r"address|bucket|prefix"):
        parse_address(address)


def test_addresses_of_every_scheme(monkeypatch):
    assert parse_address("gs://b") == ("gs", "b", "")
    assert parse_address("az://my-container/a/b/") == ("az", "my-container", "a/b")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(OSError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectBackend("az://c/x").size("k")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert 'container_name="c"' in repr(ObjectBackend("az://c/x").store)
    assert 'prefix="x"' in repr(ObjectBackend("gs://b/x").store)


def test_without_obstore(monkeypatch):
    for name in [m for m in sys.modules if m == "obstore" or m.startswith("obstore.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "hsformat.store.objects")
    p = refused(lambda: hs.open("s3://bucket/x"))
    assert p.code == "HS501"
    assert "pip install 'hsformat[objectstore]'" in p.fix
