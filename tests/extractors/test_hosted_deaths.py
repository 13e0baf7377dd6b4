"""Engines that die, hang, print or fill the disk: the run ends with their last lines, and what was given stays."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_disk import small_disk
from toys import TINY_LLAMA, ToyExtractor, request_for, samples, toy

import hsformat as hs
from hsformat.extraction import extract_to_store, make_contract
from hsformat.problems import HsError
from hsformat.target import describe
from hsformat_extractors.hosted.staging import PREFIX, Staging

LENGTHS = (4, 5, 6, 7, 8, 9, 10, 11, 12, 13)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Let logs and staging be in a folder of the test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> set[int]:
    """Return the living children of a process."""
    out = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                out.add(int(path.parent.name))
    return out


def died(driver, *, given=5, **options):
    """Return what the run of a driver that ends after five answers ends with."""
    extractor = toy(driver)()
    before = children(os.getpid())  # of tests that ran in this process: multiprocessing keeps some
    extractor.load(request_for("d4", "d8", **options))
    (pid,) = children(os.getpid()) - before
    out = []
    with pytest.raises(HsError) as e:
        out.extend(extractor.extract(samples(*LENGTHS)))
    assert len(out) == given
    gone(pid)
    extractor.close()
    return e.value.problems


@pytest.mark.parametrize(
    ("driver", "got"),
    [
        ("Dies", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("IsKilled", "the engine died (SIGKILL)"),
        ("Exits", "SystemExit: 3"),
    ],
)
def test_an_engine_that_dies_is_quoted_and_its_log_stays(driver, got, temporary):
    (found,) = died(driver)
    assert found.code == "HS410"
    assert found.got.startswith(got)
    assert "about to end" in found.got
    (log,) = temporary.iterdir()  # and nothing is staged any more
    assert str(log) in found.got
    assert "about to end" in log.read_text()


def test_an_engine_that_hangs_is_ended(temporary):
    started = time.monotonic()
    (found,) = died("Hangs", timeout=1)
    assert found.code == "HS410"
    assert found.got.startswith("no progress for 1 s")
    assert time.monotonic() - started < 20


def test_a_long_answer_is_no_engine_that_hangs(temporary):
    extractor, wanted = toy("WorksOnOneAnswer")(), samples(*range(3, 12))
    extractor.load(request_for("d4", timeout=2))
    found = list(extractor.extract(wanted))
    extractor.close()
    assert [type(f).__name__ for f in found] == ["Record"] * len(wanted)


def test_an_engine_that_does_not_start_in_time_is_ended(temporary):
    extractor, before = toy("NeverStarts")(), children(os.getpid())
    with pytest.raises(HsError) as e:
        extractor.load(request_for("d4", start_timeout=1))
    assert e.value.problems[0].got.startswith("no progress for 1 s")
    assert children(os.getpid()) <= before


def test_the_engines_own_words_are_passed_on(temporary):  # vllm#51016, #53243, SpecForge#345, PR#290
    extractor = toy("FailsToStart")()
    with pytest.raises(HsError) as e:
        extractor.load(request_for("d4"))
    assert e.value.problems[0].got.startswith("AssertionError: 581 GiB of KV cache are needed, 40 GiB are there")


def test_a_problem_of_a_driver_is_as_bad_as_the_driver_says(temporary):
    with pytest.raises(HsError) as e:
        toy("Refuses")().load(request_for("d4"))
    assert [(p.code, p.where, p.severity) for p in e.value.problems] == [("HS506", "staging", "error")]


def test_a_driver_that_cannot_be_imported_is_named(temporary):
    with pytest.raises(HsError) as e:
        toy("NoSuchDriver")().load(request_for("d4"))
    assert "NoSuchDriver" in e.value.problems[0].got


def test_what_an_engine_prints_and_reads_changes_nothing(temporary):
    extractor = toy("Prints")()
    extractor.load(request_for("d4"))
    assert len(list(extractor.extract(samples(*LENGTHS)))) == len(LENGTHS)
    extractor.close()
    assert list(temporary.iterdir()) == []


def test_nothing_of_an_engine_stays_behind(temporary):
    extractor = toy("LeavesAChild")()
    extractor.load(request_for("d4"))
    pid = extractor.producer()["engine"]["pid"]
    assert alive(pid)
    extractor.close()
    gone(pid)


def gone(*pids: int) -> None:
    """Wait until processes are gone that were killed."""
    until = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_an_engine_ends_with_whoever_started_it(temporary):
    """Killed while the engine starts: nobody is left to close anything."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from toys import request_for, toy\n"
        "toy('NeverStarts')().load(request_for('d4'))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temporary)})
    until = time.monotonic() + 30
    while not (found := [p for p in children(parent.pid) if p != parent.pid]) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)
    parent.kill()
    parent.wait()
    assert found
    gone(*found)
    (left,) = temporary.glob(f"{PREFIX}*")
    other = Staging(temporary)
    assert other.removed == [left]
    assert not left.exists()
    other.close()


def extract(extractor, out, **options):
    described = describe(request_for().model, dtype="float32")
    contract = make_contract(
        described.model, tokenizer_digest=described.tokenizer_digest, aux=(2, 4), last="pre", codec="fast"
    )
    request = request_for(*contract.keys, **options)
    return extract_to_store(extractor, samples(*LENGTHS), request=request, contract=contract, out=out)


@pytest.mark.parametrize("driver", ["Dies", "IsKilled"])
def test_what_was_given_is_committed_and_the_next_run_asks_for_the_rest(driver, tmp_path):
    out = tmp_path / "data.hs.zarr"
    with pytest.raises(HsError):
        extract(toy(driver)(), out)
    assert len(hs.open(out)) == 5
    report = extract(ToyExtractor(), out)
    assert (report.written, report.skipped, report.exit_code) == (5, 5, 0)
    whole = tmp_path / "whole.hs.zarr"
    extract(ToyExtractor(), whole)
    a, b = hs.open(out), hs.open(whole)
    assert sorted(a.ids) == sorted(b.ids)
    for i in a.ids:
        for key, h in a[i].hidden.items():
            np.testing.assert_array_equal(h, b[i].hidden[key])


@pytest.mark.needs("torch")
def test_the_command_says_what_the_engine_died_of_and_goes_on(tmp_path, monkeypatch, cli):
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hsformat.extractors]\ntoy = toys:ToyExtractor\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"id": s.id, "input_ids": s.input_ids.tolist(), "loss_mask": [1] * len(s)} for s in samples(*LENGTHS)]
    data, out = tmp_path / "data.jsonl", tmp_path / "data.hs.zarr"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (
        "extract",
        "--engine",
        "toy",
        "--layers",
        "2,4",
        "--last",
        "post",
        "--dtype",
        "float32",
        "--format",
        "json",
    )

    def run(driver):
        monkeypatch.setenv("TOY_DRIVER", f"toy_engine:{driver}")
        return cli(*words, "--model", TINY_LLAMA, "--data", data, "--out", out)

    code, told, shown = run("IsKilled")
    assert code == 2
    assert "the engine died (SIGKILL)" in told + shown
    assert len(hs.open(out)) == 5
    code, told, _ = run("Honest")
    assert code == 0
    found = json.loads(told)
    assert (found["written"], found["skipped"]) == (5, 5)


def test_an_engine_that_says_that_the_disk_is_full_is_understood(tmp_path):
    out = tmp_path / "data.hs.zarr"
    with pytest.raises(HsError) as e:
        extract(toy("NoSpace")(), out)
    (found,) = e.value.problems
    assert (found.code, found.severity) == ("HS506", "error")
    assert "staging_mib" in found.fix
    assert len(hs.open(out)) == 5


def test_a_staging_folder_that_becomes_full_ends_the_run_and_what_was_given_stays(tmp_path):
    out = tmp_path / "data.hs.zarr"
    with small_disk(tmp_path / "disk", "4m") as disk:
        extractor = ToyExtractor()

        class Filling(ToyExtractor):
            def extract(self, found, *, stopping=lambda: False):
                for i, record in enumerate(super().extract(found, stopping=stopping)):
                    yield record
                    if i == 2:
                        with contextlib.suppress(OSError):
                            (disk / "other").write_bytes(bytes(8 << 20))

        extractor = Filling()
        with pytest.raises(HsError) as e:
            extract(extractor, out, staging=disk / "staging", staging_mib=1, window=1)
        (found,) = e.value.problems
        assert (found.code, found.severity) == ("HS506", "error")
        assert "No space left on device" in found.got
        assert list((disk / "staging").iterdir()) == []
    written = len(hs.open(out))
    assert 3 <= written < len(LENGTHS)
    assert extract(ToyExtractor(), out).skipped == written


def test_the_log_of_an_engine_that_does_not_stand_the_proof_is_removed(temporary):
    with pytest.raises(HsError):
        toy("ZeroRows")().load(request_for("d4"))
    assert list(temporary.iterdir()) == []


def test_windows_that_are_not_begun_are_not_run_once_stopping():
    extractor = toy("Slow")()
    extractor.load(request_for("d4", window=5))
    found = []
    for record in extractor.extract(samples(*[4] * 100), stopping=lambda: bool(found)):
        found.append(record.id)
    assert found == [f"s{i}" for i in range(5)]
    assert len(list(extractor.extract(samples(4, 5)))) == 2  # and nothing of the others comes later
    extractor.close()


def test_a_caller_that_goes_away_leaves_nothing_for_the_next():
    extractor = ToyExtractor()
    extractor.load(request_for("d4", window=2))
    first = extractor.extract(samples(*LENGTHS))
    next(first)
    first.close()
    found = list(extractor.extract(samples(*LENGTHS, seed=1)))
    assert len(found) == len(LENGTHS)
    assert [r.input_ids.tolist() for r in found] == [s.input_ids.tolist() for s in samples(*LENGTHS, seed=1)]
    extractor.close()


def test_what_is_staged_at_once_is_bounded(tmp_path):
    """States of all requests in flight fit the bound; a sample that does not is rejected, not cut."""
    seen, done = [], threading.Event()

    def watch():
        while not done.wait(0.001):
            with contextlib.suppress(FileNotFoundError):  # consumed between the listing and the look
                seen.append(sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors")))

    extractor = ToyExtractor()
    keys = [f"d{i}" for i in range(9)]
    extractor.load(request_for(*keys, staging=tmp_path, staging_mib=1, batch_tokens=4096))
    per_token = 9 * 64 * 4 + 8
    watcher = threading.Thread(target=watch)
    watcher.start()
    found = list(extractor.extract(samples(*[100] * 12, 300, 600, 5)))
    done.set()
    watcher.join()
    assert len(found) == 15
    assert 600 * per_token > 1 << 20 > 300 * per_token > 1 << 19
    (rejected,) = [f for f in found if not isinstance(f, hs.Record)]
    assert (rejected.sample.id, rejected.problems[0].code) == ("s13", "HS506")
    assert 0 < max(seen) <= 1 << 20
    extractor.close()


def test_the_log_of_a_run_that_was_good_is_removed(temporary):
    extractor = ToyExtractor()
    extractor.load(request_for("d4"))
    assert len(list(temporary.iterdir())) == 2
    extractor.close()
    extractor.close()
    assert list(temporary.iterdir()) == []


def test_a_living_runs_folder_is_left_alone(tmp_path):
    first = Staging(tmp_path / "staging")
    second = Staging(tmp_path / "staging")
    assert second.removed == []
    assert first.folder.is_dir()
    first.close()
    second.close()
    assert list((tmp_path / "staging").iterdir()) == []
