"""Writers that end without having been closed: in a forked process, forgotten, abandoned."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from factories import tiny_contract, tiny_record
from failing_writes import code_of

import hsformat.store as hs
from hsformat.problems import StoreError

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", seed=i) for i in range(3)]


def test_a_forked_process_cannot_write_for_its_parent(tmp_path: Path) -> None:
    with hs.create(tmp_path / "s", CONTRACT) as out:
        out.append(RECORDS[0])
        pid = os.fork()
        if not pid:  # in the child: nothing of pytest may run
            status = 1
            try:
                out.append(RECORDS[1])
            except StoreError as e:
                out.close()
                status = 0 if "another process" in str(e) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    assert hs.open(tmp_path / "s").ids == ["r0"]


def test_a_writer_that_is_never_closed_says_what_it_loses(tmp_path: Path) -> None:
    def forget(records: int) -> None:
        write(records)
        gc.collect()

    def write(records: int) -> None:
        writer = hs.create(tmp_path / f"{records}", CONTRACT)
        writer.append(tiny_record(CONTRACT, "kept"))
        writer.flush()
        for i in range(records):
            writer.append(tiny_record(CONTRACT, f"r{i}", seed=i))

    with pytest.warns(RuntimeWarning, match=r"never closed, and 3 record\(s\)") as caught:
        forget(3)
    assert caught[0].filename == __file__
    assert hs.open(tmp_path / "3").ids == ["kept"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forget(0)
        for end in ("close", "abandon"):
            writer = hs.create(tmp_path / end, CONTRACT)
            writer.append(tiny_record(CONTRACT))
            getattr(writer, end)()
            del writer
            gc.collect()
    assert [w for w in seen if w.category is RuntimeWarning] == []


def test_a_program_that_closes_no_writer_says_so(tmp_path: Path) -> None:
    """By default, at its end, once; a process that it forked says nothing."""
    code = f"""
        import os, hsformat as hs
        from hsformat.testing import tiny_contract, tiny_record
        writer = hs.create({str(tmp_path / "s")!r}, tiny_contract())
        for i in range(2):
            writer.append(tiny_record(tiny_contract(), f"r{{i}}"))
        if (pid := os.fork()) == 0:
            raise SystemExit
        os.waitpid(pid, 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stderr.count("RuntimeWarning") == 1
    assert "2 record(s) that were appended are not committed" in done.stderr


def test_what_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    with hs.create(tmp_path / "s", CONTRACT) as out:
        out.append(RECORDS[0])
        out.flush()
        out.append(RECORDS[1])
        out.abandon()
        out.abandon()
    assert code_of(lambda: out.append(RECORDS[2])) == "HS506"
    assert set(out.ids) == {"r0"}
    store = hs.open(tmp_path / "s")
    assert (store.ids, store.problems) == (["r0"], [])
