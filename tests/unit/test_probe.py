"""Probes on engines that are fakes in a child process: what is proved, what is refused, and what an engine dies of."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from fake_engines import FakeProbe, random_states

from hsformat.engines.probing import ProbeRequest
from hsformat.engines.profile import EngineProfile, load_profile, save_profile
from hsformat.problems import HsError
from hsformat_extractors.probes.analysis import Slot, Tried, identify, prove_captures
from hsformat_extractors.probes.trials import DEPTHS, capture_trials

pytestmark = pytest.mark.needs("torch")  # the fakes run a model, as engines do


def probe(engine: str, *, seconds: float = 60, lines: list[str] | None = None) -> EngineProfile:
    said = [] if lines is None else lines
    request = ProbeRequest(
        architecture="FakeForCausalLM", dtype="float32", drafts=False, seconds=seconds, report=said.append
    )
    return FakeProbe(engine).probe(request)


def refused(engine: str, *codes: str, seconds: float = 60) -> str:
    with pytest.raises(HsError) as e:
        probe(engine, seconds=seconds)
    assert [p.code for p in e.value.problems] == list(codes)
    return str(e.value)


VLLM = {
    "rule": "shift", "shift": 0, "lowest": 0, "deepest": "N", "default": ("2", "N//2", "N-3"), "order": "ascending",
    "duplicates": "once", "norm": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "differs"),
    [
        ("Vllm", {}),
        ("Sglang", {"shift": 1, "lowest": 1, "deepest": "N-1"}),
        ("FirstIsOne", {"rule": "shift_if_first_is_one", "shift": 1}),  # sglang PR#25454
        ("MaxIsN", {"rule": "shift_unless_max_is_n", "shift": 1, "lowest": 1}),  # sglang PR#32334
        ("BeforeEachLayer", {"lowest": 1, "deepest": "N-1"}),  # vllm#48124
        ("AsGiven", {"order": "as_given", "duplicates": "repeated", "norm": "final", "default": ()}),
        ("OtherDefault", {"shift": 1, "lowest": 1, "deepest": "N-1", "default": ("2", "N//2+1", "N-3")}),
        ("Noisy", {}),
        ("Forked", {}),
    ],
)
def test_what_an_engine_does_is_proved(engine, differs, tmp_path):
    profile = probe(engine)
    row = profile.captures
    assert {name: getattr(row, name) for name in VLLM} == {**VLLM, **differs}
    assert (row.evidence, row.versions, row.architectures) == ("proved", (np.__version__,), ("FakeForCausalLM",))
    errors = [m.relative_error for m in profile.measurements if m.relative_error is not None]
    assert max(errors) < 1e-6 < 0.5 < min(m.runner_up for m in profile.measurements if m.runner_up is not None)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


def test_an_id_that_kills_the_engine_is_recorded_with_what_it_said_last():
    lines: list[str] = []
    profile = probe("Sglang", lines=lines)
    (killed, _) = (m for m in profile.measurements if m.outcome is not None and "SIGKILL" in m.outcome)
    assert killed.asked == f"ids [2, 5, {DEPTHS[0] - 1}], 3 slots, {DEPTHS[0]} layers"
    assert killed.outcome == "the engine died (SIGKILL): IndexError: list index out of range"
    assert killed.depths == ()
    assert any("d2, d3, d4, d5, d6, d7, d8" in line for line in lines)


@pytest.mark.parametrize(
    ("engine", "outcome"),
    [
        ("ForkedSglang", "the engine died (SIGKILL): IndexError: list index out of range"),
        ("ForkedAndGone", "the engine died (exit code 0)"),
    ],
)
def test_a_fork_that_ends_leaves_the_process_and_nothing_else(engine, outcome, tmp_path, monkeypatch):
    """Imports of an engine are most of what a trial costs; they are made once, whatever a trial dies of."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG_FILE", str(log))
    profile = probe(engine)
    assert [m.outcome for m in profile.measurements if m.outcome] == [outcome] * 2
    assert log.read_text().split().count("prepared") == 1
    assert not any(_runs(int(pid)) for pid in log.read_text().split() if pid.isdigit())


@pytest.mark.parametrize(
    "engine", ["OffByOneInTheUpperHalf", "ClampsToTheLastButOne", "DefaultThatFollowsNothing", "AnotherStream"]
)
def test_what_no_rule_describes_is_refused_and_shown(engine):
    text = refused(engine, "HS410")
    assert "[" in text


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("MissingLast", "fc was given [11, 128], not [11, 192]"),
        ("MissingRows", "fc was given [3, 192], not [11, 192]"),
        ("NotANumber", "relative error inf"),
        ("RunsNoDraft", "fc was not run"),
        ("Dead", "exit code 3): RuntimeError: no device here"),
        ("Killed", "SIGKILL"),
        ("ForkedAndKilled", "SIGKILL): RuntimeError: no scheduler"),
        ("ForkedAndDead", "exit code 4"),
        ("NoSuchEngine", "no attribute 'NoSuchEngine'"),
    ],
)
def test_an_engine_that_feeds_nothing_whole_is_refused_with_its_words(engine, said):
    assert said in refused(engine, "HS410")


def test_an_engine_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PID_FILE", str(tmp_path / "pid"))
    began = time.monotonic()
    assert "no answer within 3 s" in refused("Hanging", "HS410", seconds=3)
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    probe("Vllm")
    refused("Dead", "HS410")
    assert os.listdir(tmp_path) == []


# The pure parts.


def test_a_slot_is_the_capture_that_it_equals():
    states = random_states(9)
    features = np.stack([states["d4"] * (1 + 1e-5), states["d9n"], states["d9"]], axis=1)
    slots = identify(features, states, tolerance=1e-3)
    assert [s.key for s in slots] == ["d4", "d9n", "d9"]
    assert slots[0].error == pytest.approx(1e-5, rel=0.1)
    assert all(s.runner_up > 1 for s in slots)


@pytest.mark.parametrize("near", [0.0, 1e-5, 9e-4])
def test_two_captures_that_are_equal_are_no_answer(near):
    states = random_states(9)
    states["d5"] = states["d4"] * (1 + near)
    with pytest.raises(HsError) as e:
        identify(states["d4"][:, None], states, tolerance=1e-3)
    assert [p.code for p in e.value.problems] == ["HS204"]
    assert "d5" in str(e.value)


def test_every_slot_that_is_unclear_is_named():
    states = random_states(9)
    other = random_states(12)
    features = np.stack([states["d1"], other["d1"], states["d2"] * 1.01], axis=1)
    with pytest.raises(HsError) as e:
        identify(features, states, tolerance=1e-3)
    assert [p.where for p in e.value.problems] == ["probe: slot 1", "probe: slot 2"]


def tried(**depths: tuple[int, ...] | None) -> list[Tried]:
    """Return the trials with these depths, by name; those of ``vllm`` where nothing is said."""
    out = []
    for trial in capture_trials():
        if trial.instead_of is not None:
            continue
        n = trial.num_layers
        usual = tuple(sorted(set(trial.ids))) or (2, n // 2, n - 3)
        seen = depths.get(trial.name.replace("-", "_"), usual)
        slots = None if seen is None else tuple(Slot(key=f"d{d}", error=0.0, runner_up=1.0) for d in seen)
        out.append(Tried(trial=trial, slots=slots, outcome=None if slots else "died"))
    return out


def prove(trials: list[Tried]):
    return prove_captures(trials, architecture="FakeForCausalLM", version="1", source="test")


def test_trials_tell_the_rules_apart():
    assert prove(tried()).rule == "shift"
    without = [t for t in tried() if t.trial.name != "one-first-and-one-twice"]
    with pytest.raises(HsError) as e:  # nothing was asked twice, and no list began with 1
        prove(without)
    assert "duplicates" in str(e.value)
    assert [p.code for p in e.value.problems] == ["HS410"]


def test_a_default_that_holds_for_one_number_of_layers_alone_is_refused():
    with pytest.raises(HsError) as e:
        prove(tried(no_ids_12=(2, 6, 7)))
    assert [p.where for p in e.value.problems] == ["probe: a draft without ids"]
    with pytest.raises(HsError):
        prove(tried(no_ids_12=None))
    assert prove(tried(no_ids_9=None, no_ids_12=None)).default == ()


def test_depth_n_captured_in_two_ways_is_refused():
    trials = tried()
    mixed = [
        Tried(trial=t.trial, slots=(*(t.slots or ())[:-1], Slot(key=key, error=0.0, runner_up=1.0)))
        for t, key in zip([t for t in trials if t.trial.name.startswith("last")], ("d9n", "d9"), strict=True)
    ]
    with pytest.raises(HsError) as e:
        prove([t for t in trials if not t.trial.name.startswith("last")] + mixed)
    assert [p.code for p in e.value.problems] == ["HS205"]
