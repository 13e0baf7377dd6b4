"""What an extraction says of itself while it runs: the time left counts neither loading nor what was there before."""

from __future__ import annotations

from collections import Counter

import pytest

from hsformat.cli import progress
from hsformat.cli.progress import Pace, extraction_progress
from hsformat.extraction import ExtractionReport


def test_the_time_left_does_not_count_the_start_of_the_engine():
    """Ten minutes of loading, then two records a second."""
    pace = Pace()
    assert pace.left(ExtractionReport(), 101) is None  # told of problems, before anything is loaded
    assert pace.left(ExtractionReport(written=1, tokens=100, seconds=600), 101) is None
    report = ExtractionReport(written=41, tokens=4100, seconds=620)
    assert pace.left(report, 101) == pytest.approx(30)
    assert pace.rate(report).startswith("200 tokens/s")


def test_records_that_were_there_do_not_count():
    pace = Pace()
    pace.left(ExtractionReport(skipped=900, written=1, seconds=60), 1000)
    report = ExtractionReport(skipped=900, written=40, quarantined=Counter(HS201=11), seconds=110)
    assert pace.left(report, 1000) == pytest.approx(49)
    assert "11 quarantined" in pace.rate(report)


def test_records_that_are_skipped_later_make_it_no_faster():
    """Half of the samples are stored already, one in two of those that come."""
    pace = Pace()
    pace.left(ExtractionReport(written=1, tokens=10, seconds=60), 200)
    report = ExtractionReport(written=51, skipped=50, tokens=510, seconds=110)
    assert pace.left(report, 200) == pytest.approx(99)


def test_lines_of_a_batch_log(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with extraction_progress(12, lambda: 2) as show:
        show(ExtractionReport(written=1, tokens=10, nbytes=2**20, seconds=60))
        show(ExtractionReport(written=6, tokens=60, nbytes=2**20, seconds=70))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "extract: 1 of 10 records, 1.0 MB"  # one record says nothing of a rate
    assert second.startswith("extract: 6 of 10 records, 5 tokens/s")
    assert second.endswith("about 8 s left")
