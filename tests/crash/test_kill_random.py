"""Writers killed at any time, not at points that somebody has thought of: several times in one store, then finished.

One process imports the store once and forks a writer for each kill, which comes some segments later, at a random time.
Nightly (``HYPOTHESIS_PROFILE=nightly``) 200 kills, by a seed of the day; otherwise 20.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from factories import assert_same_record, tiny_contract, tiny_record

import hsformat.store as hs
from hsformat.problems import Severity
from hsformat.validate import validate_store

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
STORES, KILLS = (50 if NIGHTLY else 5), 4  # of each store
SEED = int(time.time()) // 86_400 if NIGHTLY else 4
CONTRACT = tiny_contract()
RECORDS = {f"r{i}": tiny_record(CONTRACT, f"r{i}", tokens=5 + i % 7, seed=i) for i in range(36)}
PER_SEGMENT = 3


def write_all(path: Path) -> None:
    """Write the records that are not there yet, a few a segment; make the store if need be."""
    options = {"chunk_tokens": 4, "threads": 2}
    with hs.append(path, **options) if hs.exists(path) else hs.create(path, CONTRACT, **options) as writer:
        for n, record in enumerate(r for r in RECORDS.values() if r.id not in writer.ids):
            writer.append(record)
            if n % PER_SEGMENT == PER_SEGMENT - 1:
                writer.flush()


def start(path: Path) -> int:
    pid = os.fork()
    if pid == 0:
        write_all(path)
        os._exit(0)
    return pid


def main(folder: Path) -> None:
    """Kill writers; after each kill print what a reader sees."""
    began = time.monotonic()
    os.waitpid(start(folder / "whole"), 0)
    a_segment, rng = (time.monotonic() - began) / (len(RECORDS) / PER_SEGMENT), np.random.default_rng(SEED)
    for n in range(STORES):
        for _ in range(KILLS):
            path = folder / str(n)
            begun = segments(path) + int(rng.integers(3))
            pid = start(path)
            while segments(path) < begun:  # a busy machine is slow: by its clock alone the kill would come anywhere
                time.sleep(0.001)
            time.sleep(float(rng.uniform(0, 1.5 * a_segment)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            print(json.dumps([n, os.WIFSIGNALED(status), look(path)]), flush=True)


def segments(path: Path) -> int:
    """Return how many segments were begun."""
    try:
        return len(os.listdir(path / "segments"))
    except FileNotFoundError:
        return 0


def look(path: Path) -> int:
    """Return how many records there are, all of them whole and in whole segments."""
    if not hs.exists(path):
        return 0
    store = hs.open(path)
    assert {p.code for p in store.problems} <= {"HS506"}
    assert {s.records for s in store.segments} <= {PER_SEGMENT}
    for record_id in store.ids:
        assert_same_record(store[record_id], RECORDS[record_id])
    return len(store)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, bool, int]]]:
    folder = tmp_path_factory.mktemp("killed")
    roots = [str(Path(__file__).parents[n]) for n in (1, 2)]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_readers_see_whole_segments_and_nothing_is_lost_again(killed: tuple[Path, list[tuple[int, bool, int]]]) -> None:
    _, seen = killed
    assert len(seen) == STORES * KILLS
    assert sum(was_killed for _, was_killed, _ in seen) > len(seen) / 2
    assert len({count for _, _, count in seen}) > 2, "every kill came before or after all of the work"
    for n in range(STORES):
        counts = [count for store, _, count in seen if store == n]
        assert counts == sorted(counts)


def test_every_record_is_there_once_after_the_last_run(killed: tuple[Path, list[tuple[int, bool, int]]]) -> None:
    folder, _ = killed
    for path in [folder / "whole", *(folder / str(n) for n in range(STORES))]:
        write_all(path)
        store = hs.open(path)
        assert sorted(store.ids) == sorted(RECORDS)
        for record_id in store.ids:
            assert_same_record(store[record_id], RECORDS[record_id])
        assert {p.code for p in validate_store(path) if p.severity is not Severity.NOTE} == set()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
