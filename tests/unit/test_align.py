"""Shifts and mask rules, on the cases that trainers have got wrong in public."""

from __future__ import annotations

import numpy as np
import pytest

from hsformat.align import step_view, supervised


def where(mask: list[int], step: int, rule: str) -> list[int]:
    return np.flatnonzero(supervised(np.array(mask), step, rule=rule)).tolist()


def test_loss_mask_shifted_with_ids_and_target():  # SpecForge#885, PR#895
    mask = [0, 0, 0, 1, 1, 0]  # assistant span [3, 5) of T = 6
    assert where(mask, 0, "input") == [2, 3]
    assert where(mask, 0, "serving") == [2]
    assert where(mask, 0, "target") == [1, 2]
    assert where(mask, 0, "feature") == [3]


def test_no_loss_on_the_padded_target():  # SafeAILab/EAGLE#317, PR#341, #325: the left shift pads the last place
    ids = np.array([201, 202, 203, 204, 205])
    view = step_view(len(ids), 0)
    assert ids[view.target].tolist() == [203, 204, 205]
    for rule in ("serving", "input", "target", "feature"):
        assert supervised(np.ones(5, np.uint8), 0, rule=rule).tolist() == [True, True, True, False, False]


def test_first_drafted_token_is_the_second_of_the_answer():
    # With the span [a, b) an engine first drafts a + 1, from h[a-1] and ids[a].
    a, b = 4, 9
    mask = np.zeros(12, bool)
    mask[a:b] = True
    view = step_view(12, 0)
    drafted = np.arange(12)[view.target][supervised(mask, 0)[: view.count]]
    assert drafted.tolist() == list(range(a + 1, b))


def test_last_state_row_is_never_needed():
    # A generated record has T ids and T - 1 states.
    for tokens in range(12):
        for step in range(8):
            view = step_view(tokens, step)
            assert view.distribution.stop <= max(tokens - 1, view.distribution.start)
            assert view.feature.stop <= max(tokens - 1, 0)


@pytest.mark.needs("torch")
def test_torch_and_numpy_agree():
    import torch

    mask = np.array([0, 1, 1, 1, 0, 1, 1, 0], np.uint8)
    for rule in ("serving", "input", "target", "feature"):
        for step in range(5):
            expected = supervised(mask, step, rule=rule)
            assert supervised(torch.from_numpy(mask), step, rule=rule).numpy().tolist() == expected.tolist()


def test_bad_arguments():
    with pytest.raises(ValueError, match="unknown mask rule"):
        supervised(np.ones(4, int), 0, rule="guess")
    for mask in (np.ones((2, 8), int), np.ones(8), np.array(1)):
        with pytest.raises(ValueError, match="a mask is"):
            supervised(mask, 0)
    with pytest.raises(ValueError, match="not negative"):
        step_view(4, -1)
