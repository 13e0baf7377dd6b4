"""Signals as wishes, and progress away from a terminal."""

from __future__ import annotations

import signal

import pytest

from hsformat_trainer import progress, stop
from hsformat_trainer.progress import training_progress
from hsformat_trainer.stop import Stop


def test_the_first_signal_is_a_wish_and_a_later_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as wish:
        assert not wish.asked()
        signal.raise_signal(signal.SIGTERM)
        assert wish.signal == signal.SIGTERM
        now += stop.AGAIN_SECONDS / 2
        signal.raise_signal(signal.SIGINT)  # what a launcher passes on is the same wish
        assert wish.signal == signal.SIGTERM
        now += stop.AGAIN_SECONDS
        with pytest.raises(KeyboardInterrupt) as e:
            signal.raise_signal(signal.SIGTERM)
        assert e.value.args == (signal.SIGTERM,)  # of which the exit code is made
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as wish:
            signal.raise_signal(signal.SIGINT)
            assert not wish.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_batch_log_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with training_progress(100, done=10, shows=True) as show:
        for step in range(11, 72):
            now += 1.0
            show(step, 2.5, 1234.0, 0.012)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "train: step 40 of 100, loss 2.5000, 1,234 tokens/s, loader 1.2%, about 60 s left"
    assert second.startswith("train: step 70 of 100")
    with training_progress(100, done=0, shows=False) as show:
        show(1, 2.5, 1234.0, 0.012)
    assert capsys.readouterr().err == ""
