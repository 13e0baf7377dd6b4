"""Invariants of the mask rules on multi-turn masks, against a definition written with plain loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsformat.align import step_view, supervised

turns = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5)
steps = st.integers(0, 7)


def mask_of(spans: list[tuple[int, int]], tail: int = 0) -> np.ndarray:
    """Return the mask of a conversation: each turn is so many prompt tokens, then so many of the answer."""
    return np.array([bit for prompt, answer in spans for bit in [0] * prompt + [1] * answer] + [0] * tail, np.uint8)


@given(turns, st.integers(0, 4), steps)
def test_rules_are_their_definitions(spans, tail, step):
    m = mask_of(spans, tail)
    t_max = len(m) - 3 - step
    expected = {
        "serving": [t for t in range(t_max + 1) if all(m[t + 1 : t + 3 + step])],
        "input": [t for t in range(t_max + 1) if m[t + 1 + step]],
        "target": [t for t in range(t_max + 1) if m[t + 2 + step]],
        "feature": [t for t in range(t_max + 1) if m[t + step]],
    }
    for rule, indexes in expected.items():
        assert np.flatnonzero(supervised(m, step, rule=rule)).tolist() == indexes


@given(turns, st.integers(0, 4), steps)
def test_serving_is_inside_input_and_target_and_shrinks(spans, tail, step):
    m = mask_of(spans, tail)
    serving = supervised(m, step)
    assert not (serving & ~supervised(m, step, rule="input")).any()
    assert not (serving & ~supervised(m, step, rule="target")).any()
    assert not (supervised(m, step + 1) & ~serving).any()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=5), steps)
def test_serving_counts_the_chains_an_engine_drafts(spans, step):
    # A span of n tokens after a prompt holds n - 1 - k drafts of k + 1 tokens, none across turns.
    m = mask_of(spans)
    assert supervised(m, step).sum() == sum(max(0, n - 1 - step) for _, n in spans)


@given(st.integers(0, 40), steps)
def test_slices_have_one_length_and_stay_inside(tokens, step):
    view = step_view(tokens, step)
    for s in (view.token, view.feature, view.position, view.distribution, view.target):
        assert s.stop - s.start == view.count
        assert view.count == 0 or s.stop <= tokens
