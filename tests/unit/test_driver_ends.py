"""The driver that is stopped, by a signal or a full disk: what is whole is committed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from fake_extractor import Fake, answer, run, sample

import hsformat as hs

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "data.hs.zarr"


@pytest.fixture
def handlers():
    """Handlers as an interactive shell leaves them: a background job inherits an ignored SIGINT."""
    before = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for s, handler in before.items():
        signal.signal(s, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_commits_what_is_whole(out, number):
    class Signalled(Fake):
        def one(self, s):
            if s.id == "s2":
                os.kill(os.getpid(), number)
            return answer(s)

    report = run(Signalled(), map(sample, range(6)), out)
    assert report.interrupted == number
    assert report.exit_code == 128 + number
    assert list(hs.open(out).ids) == ["s0", "s1", "s2"]
    assert run(Fake(), map(sample, range(6)), out).written == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_engine_loads_ends_the_run_at_once(out, number):
    """It was noted, and nothing looked at it before the engine had started, which may take an hour."""

    class Loads(Fake):
        def load(self, request):
            os.kill(os.getpid(), number)
            raise AssertionError("it went on loading")

    with pytest.raises(KeyboardInterrupt) as e:
        run(Loads(), map(sample, range(3)), out)
    assert e.value.args == (number,)
    assert run(Fake(), map(sample, range(3)), out).written == 3


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_is_answered(out, capfd):
    class Signalled(Fake):
        def one(self, s):
            os.kill(os.getpid(), signal.SIGINT)
            return answer(s)

    run(Signalled(), map(sample, range(3)), out)
    assert capfd.readouterr().err.count("stopping after what is in hand; once more: at once") == 1


@pytest.mark.usefixtures("handlers")
def test_ignored_signal_stays_ignored(out):  # nohup
    class Signalled(Fake):
        def one(self, s):
            os.kill(os.getpid(), signal.SIGINT)
            return answer(s)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = run(Signalled(), map(sample, range(3)), out)
    assert (report.written, report.interrupted) == (3, None)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("late", [False, True])
def test_the_exit_code_is_that_of_the_signal_that_stopped_the_command(out, number, late, cli, monkeypatch):
    """SIGTERM while an engine loads, or as the second signal, was told as Ctrl-C."""

    class Signalled(Fake):
        def load(self, request):
            if not late:
                os.kill(os.getpid(), number)

        def one(self, s):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), number)
            return answer(s)

    monkeypatch.setattr("hsformat.extraction.find_extractor", lambda name: Signalled())
    data = out.with_name("data.jsonl")
    data.write_text(json.dumps({"id": "a", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}) + "\n")
    code, _, err = cli("extract", "--model", TINY, "--data", data, "--out", out, "--layers", "2,4,5")
    assert code == 128 + number
    assert f"stopped by {number.name}" in err
    assert "the same command goes on" in err


@pytest.mark.usefixtures("handlers")
def test_second_signal_stops_at_once(out):
    class Stuck(Fake):
        def one(self, s):
            if s.id == "s2":
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return answer(s)

    with pytest.raises(KeyboardInterrupt):
        run(Stuck(), map(sample, range(6)), out)
    assert len(hs.open(out)) == 0
    assert hs.validate_store(out) == []


def test_disk_full_keeps_what_is_committed(out, monkeypatch):
    from hsformat.store.local import LocalBackend

    class Fills(Fake):
        def one(self, s):
            if s.id == "s3":
                monkeypatch.setattr(LocalBackend, "write", full)
            return answer(s)

    def full(self, key, data):
        raise OSError(28, "No space left on device")

    with pytest.raises(hs.StoreError) as e:
        run(Fills(), map(sample, range(6)), out, commit_seconds=0)
    assert "No space left" in e.value.problems[0].got
    assert list(hs.open(out).ids) == ["s0", "s1", "s2"]
