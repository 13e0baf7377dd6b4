"""A disk that is too small is found before the target is loaded; one that may do is warned of, and filled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.extraction import ExtractionReport, ExtractionRequest, extract_to_store, space
from hsformat.extraction.space import Needs, check_space
from hsformat.problems import Problem, Severity
from hsformat.record import Generation, Provenance, Record, TokenSample
from hsformat.store import local, places
from hsformat.store.arrays import Dimensions
from hsformat.store.size import LEAST_RATIO

FAST = tiny_contract(codec="fast")
COMPACT = tiny_contract()
ROW = 4 * 8 * 2
"""Bytes of one token's states: four captures, eight wide, bfloat16."""
GIVEN, GREEDY = Generation(mode="none"), Generation(mode="greedy", max_new_tokens=4)


def sample(i: int, tokens: int = 20) -> TokenSample:
    ids = np.random.default_rng(i).integers(0, 100, tokens, dtype=np.int32)
    return TokenSample(id=f"s{i}", input_ids=ids, loss_mask=np.ones(tokens, np.uint8))


class Fake:
    """An extractor; where it is to write answers, each has one token."""

    name = "fake"
    loaded = 0

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        return []

    def load(self, request: ExtractionRequest) -> None:
        self.loaded += 1
        self.generation = request.generation

    def extract(self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool]) -> Iterator[Record]:
        for s in samples:
            new = int(self.generation != GIVEN)
            ids = np.append(s.input_ids, np.full(new, 7, np.int32))
            mask = np.append(np.zeros(len(s), np.uint8), np.uint8(1)) if new else s.loss_mask
            yield tiny_record(FAST, id=s.id, tokens=len(ids), input_ids=ids, loss_mask=mask,
                              provenance=Provenance(generation=self.generation))  # fmt: skip

    def producer(self) -> dict[str, Any]:
        return {"name": "fake"}

    def close(self) -> None:
        pass


def run(extractor: Fake, samples: Iterable[TokenSample], out: Path, *, contract: hs.Contract,
        generation: Generation = GIVEN, **options: Any) -> ExtractionReport:  # fmt: skip
    request = ExtractionRequest(model=Path("nowhere"), target=contract.target, captures=contract.captures,
                                generation=generation, batch_tokens=64)  # fmt: skip
    return extract_to_store(extractor, samples, request=request, contract=contract, out=out, **options)


SAMPLES = [sample(i) for i in range(10)]
TOKENS = 200


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "data.hs.zarr"


@pytest.fixture
def disk(monkeypatch):
    """Return a function that makes every file system say that so much is free."""

    def free(nbytes: int, total: int = 10**12) -> None:
        usage = SimpleNamespace(total=total, used=0, free=nbytes)
        monkeypatch.setattr(local.shutil, "disk_usage", lambda path: usage)

    return free


def test_too_small_a_disk_is_refused_before_the_target_is_loaded(out, disk):
    disk(TOKENS * (ROW + 5) - 1)
    fake = Fake()
    with pytest.raises(hs.StoreError) as e:
        run(fake, SAMPLES, out, contract=FAST)
    (p,) = e.value.problems
    assert (p.code, p.severity, fake.loaded) == ("HS506", Severity.ERROR, 0)
    assert f"{TOKENS * (ROW + 5) - 1:,} bytes free" in p.got
    assert f"at least {TOKENS * (ROW + 5):,} bytes" in p.expected
    assert all(word in p.fix for word in ("another disk", "--codec compact", "fewer captures", "--ignore-disk-space"))
    assert not out.exists()


def test_a_disk_that_does_is_not_mentioned(out, disk):
    disk(TOKENS * (ROW + 5))
    report = run(Fake(), SAMPLES, out, contract=FAST)
    assert (report.written, report.problems) == (10, [])


def test_between_what_is_needed_at_least_and_likely_is_a_warning(out, disk):
    disk(int(TOKENS * ROW * LEAST_RATIO))
    seen = []
    report = run(Fake(), SAMPLES, out, contract=COMPACT, listener=lambda r: seen.append((r.written, len(r.problems))))
    (p,) = report.problems
    assert (p.code, p.severity, report.exit_code, report.written) == ("HS506", Severity.WARNING, 0, 10)
    assert "--codec compact" not in p.fix
    assert seen[0] == (0, 1)  # told before the first record
    shutil.rmtree(out)
    disk(int(TOKENS * ROW * LEAST_RATIO) - 1)
    with pytest.raises(hs.StoreError):
        run(Fake(), SAMPLES, out, contract=COMPACT)


def test_a_refusal_can_be_overruled(out, disk):
    disk(1)
    report = run(Fake(), SAMPLES, out, contract=FAST, ignore_disk_space=True)
    assert [(p.code, p.severity) for p in report.problems] == [("HS506", Severity.WARNING)]
    assert (report.written, report.exit_code) == (10, 0)


def test_what_is_stored_already_counts_nothing(out, disk):
    run(Fake(), SAMPLES[:8], out, contract=FAST)
    disk(40 * (ROW + 5))
    assert run(Fake(), SAMPLES, out, contract=FAST).written == 2
    disk(0)
    assert run(Fake(), SAMPLES, out, contract=FAST).skipped == 10
    with pytest.raises(hs.StoreError):
        run(Fake(), [*SAMPLES, sample(10)], out, contract=FAST)
    assert len(hs.open(out)) == 10


def test_one_sample_twice_counts_once(out, disk):
    disk(20 * (ROW + 5))
    report = run(Fake(), [SAMPLES[0], SAMPLES[0]], out, contract=FAST)
    assert report.written == 1


def test_an_answer_needs_one_token_at_least_and_all_at_most(out, disk):
    disk(TOKENS * (ROW + 5) + 10 * 5)
    report = run(Fake(), SAMPLES, out, contract=FAST, generation=GREEDY)
    assert [p.severity for p in report.problems] == [Severity.WARNING]
    assert f"up to {(TOKENS + 40) * (ROW + 5):,} bytes" in report.problems[0].expected
    shutil.rmtree(out)
    disk(TOKENS * (ROW + 5) + 10 * 5 - 1)
    with pytest.raises(hs.StoreError):
        run(Fake(), SAMPLES, out, contract=FAST, generation=GREEDY)


def test_a_shared_beginning_counts_once_with_compact():
    shared = np.arange(64, dtype=np.int32)

    def needs(contract: hs.Contract) -> Needs:
        out = Needs(Dimensions.of(contract), max_new_tokens=0)
        for i in range(5):
            ids = np.concatenate([shared, np.full(40, i, np.int32)])
            out.add(TokenSample(id=f"s{i}", input_ids=ids, loss_mask=np.ones(104, np.uint8)))
        return out

    assert needs(FAST).least == 5 * 104 * (ROW + 5)
    assert needs(COMPACT).least == int(LEAST_RATIO * (64 + 5 * 40) * ROW)


def test_samples_that_can_be_read_once_are_not_counted(out, disk):
    disk(0)
    assert run(Fake(), iter(SAMPLES), out, contract=FAST).written == 10


def test_places_that_do_not_say_what_is_free(out, disk, monkeypatch):
    disk(0, total=0)  # a mounted object store
    assert run(Fake(), SAMPLES[:1], out, contract=FAST).written == 1
    monkeypatch.setattr(local.shutil, "disk_usage", lambda path: (_ for _ in ()).throw(PermissionError))
    assert places.free_bytes(out) is None
    assert places.free_bytes(SimpleNamespace(location="memory")) is None  # not a folder at all


def test_free_space_is_that_of_the_folder_that_is_there(tmp_path):
    free = places.free_bytes(tmp_path / "new" / "deeper" / "s")
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, abs=1 << 30)
    with pytest.raises(hs.StoreError):
        places.free_bytes("ftp://bucket/x")


def test_counting_ends_and_says_so(out, disk, monkeypatch):
    monkeypatch.setattr(space, "COUNT_SECONDS", -1.0)
    disk(100)
    (p,) = check_space(out, Dimensions.of(FAST), SAMPLES, known=(), max_new_tokens=0)
    assert (p.code, p.severity) == ("HS506", Severity.NOTE)
    assert check_space(out, Dimensions.of(FAST), SAMPLES, known=(), max_new_tokens=0, stopping=lambda: True) == []


def test_a_refusal_is_for_all_samples(out, disk):
    whole = Needs(Dimensions.of(FAST), max_new_tokens=0)
    for s in SAMPLES:
        whole.add(s)
    disk(100)  # the first sample alone is too much
    (p,) = check_space(out, Dimensions.of(FAST), SAMPLES, known=(), max_new_tokens=0)
    assert p.severity is Severity.ERROR
    assert f"at least {whole.least:,} bytes for {len(SAMPLES)} sample(s)" in p.expected
    disk(whole.least)
    assert check_space(out, Dimensions.of(FAST), SAMPLES, known=(), max_new_tokens=0) == []


def test_counting_ends_when_time_is_out_and_says_of_how_many(out, disk, monkeypatch):
    class Endless:
        def __iter__(self) -> Iterator[TokenSample]:
            i = 0
            while True:
                i += 1
                yield sample(i)

    monkeypatch.setattr(space, "COUNT_SECONDS", 0.05)
    disk(10_000)
    p, note = check_space(out, Dimensions.of(FAST), Endless(), known=(), max_new_tokens=0)
    assert (p.severity, note.severity) == (Severity.ERROR, Severity.NOTE)
    assert "missing samples" in note.got


SMALL_DISK = """
    import sys
    sys.path[:0] = {paths!r}
    from pathlib import Path
    from test_disk_space import FAST, Fake, run, sample
    import hsformat as hs

    out, many = Path({out!r}) / "data.hs.zarr", [sample(i, tokens=1000) for i in range(40)]
    fake = Fake()
    try:
        run(fake, many, out, contract=FAST)
    except hs.StoreError as e:
        assert [p.code for p in e.problems] == ["HS506"], e
        assert "bytes free" in e.problems[0].got, e
    else:
        raise SystemExit("not refused")
    assert not fake.loaded and not out.exists()
    assert run(fake, many[:3], out, contract=FAST).written == 3
    try:
        run(fake, many, out, contract=FAST, ignore_disk_space=True, segment_bytes=100_000)
    except hs.StoreError as e:
        assert "No space left" in e.problems[0].got, e
    else:
        raise SystemExit("not full")
    stored = hs.open(out)
    assert len(stored) > 3 and not stored.problems
    assert hs.validate_store(out, level="full") == []
    print("as it should be")
"""


def test_a_real_small_disk(tmp_path):
    """Refused; then, overruled, filled: what is committed stays whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(disk)]
    if shutil.which("unshare") is None or subprocess.run([*alone, *mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    code = textwrap.dedent(SMALL_DISK.format(paths=paths, out=str(disk)))
    words = [*alone, "sh", "-c", '"$@" && exec "$0" -c "$CODE"', sys.executable, *mount]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "CODE": code}, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "as it should be"), done.stderr
