"""What was proved by running the engines (tests/data/profiles, by ``hsformat engines probe``), and the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsformat.engines.profile import load_profile
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.engines.table import capture_row, draft_row

PROFILES = sorted((Path(__file__).parents[1] / "data" / "profiles").glob("*.json"))
FREE = {"source", "evidence", "versions", "architectures"}


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_tables_say_what_was_proved(path):
    profile = load_profile(path)
    assert path.stem == f"{profile.engine}-{profile.version}-{profile.architecture}"
    known = capture_row(profile.engine, profile.version, profile.architecture)
    for name in set(CaptureRow.model_fields) - FREE:
        assert getattr(known, name) == getattr(profile.captures, name), name
    for proved in profile.drafts:
        row = draft_row(profile.engine, profile.version, proved.layout, proved.architectures[0])
        assert proved.loading is None  # no probe tries it: the tables alone say it
        for name in set(DraftRow.model_fields) - FREE - {"readers", "loading"}:
            assert getattr(row, name) == getattr(proved, name), name
        assert set(proved.readers) <= set(row.readers)
        served = draft_row(profile.engine, profile.version, proved.layout, proved.architectures[0], profile)
        assert served.readers == proved.readers
        assert served.loads == row.loads


def test_both_engines_were_proved():
    assert {p.engine for p in map(load_profile, PROFILES)} == {"vllm", "sglang"}


def test_an_edited_profile_is_refused(tmp_path):
    text = PROFILES[0].read_text().replace("ascending", "as_given")
    assert text != PROFILES[0].read_text()
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match="HS504"):
        load_profile(tmp_path / "p.json")
