"""The batches of an epoch: every record once, whoever reads them, and the same ones from any place on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsformat.torch.plan import Batching, by_tokens, record_order, segment_order

pytestmark = pytest.mark.needs("torch")


@st.composite
def plans(draw):
    """(batching, tokens, segments, epoch)."""
    segments = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    count = sum(segments)
    tokens = np.array(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)), np.int64)
    by_size = draw(st.booleans())
    batching = Batching(
        batch_size=draw(st.integers(1, 8)) if by_size else None,
        max_tokens=None if by_size else draw(st.integers(50, 200)),
        shuffle=draw(st.sampled_from([None, "record", "segment"])),
        buffer=draw(st.integers(1, 14)),
        seed=draw(st.integers(0, 2**63)),
        drop_last=draw(st.booleans()),
        world_size=draw(st.integers(1, 5)),
    )
    return batching, tokens, np.repeat(np.arange(len(segments)), segments), draw(st.integers(0, 1000))


@given(plans())
def test_every_record_comes_once_and_each_rank_has_as_many_batches(drawn):
    batching, tokens, segments, epoch = drawn
    try:
        plan = batching.plan(len(tokens), tokens=tokens, segments=segments, epoch=epoch)
    except ValueError:  # only where batches of one record are too few
        assert not batching.drop_last
        assert len(tokens) % batching.world_size or len(tokens) < batching.world_size
        return
    assert len(plan) % batching.world_size == 0
    batches = [plan.rows(i) for i in range(len(plan))]
    assert all(batches)
    rows = [row for rows in batches for row in rows]
    assert sorted(rows + plan.dropped.tolist()) == list(range(len(tokens)))
    if not batching.drop_last:
        assert not len(plan.dropped)
    for rows in batches:
        if batching.max_tokens is None:
            assert len(rows) == batching.batch_size or (not batching.drop_last and len(rows) < batching.batch_size)
        else:
            assert tokens[rows].sum() <= batching.max_tokens
    again = batching.plan(len(tokens), tokens=tokens, segments=segments, epoch=epoch)
    assert (again.order == plan.order).all()
    assert (again.ends == plan.ends).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 10), st.integers(0, 99), st.integers(0, 9))
def test_few_segments_are_open_and_none_is_opened_twice(counts, buffer, seed, epoch):
    segments = np.repeat(np.arange(len(counts)), counts)
    order = segment_order(segments, buffer=buffer, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(segments)))
    read = segments[order].tolist()
    first, last = {}, {}
    for i, s in enumerate(read):
        first.setdefault(s, i)
        last[s] = i
    open_ = [sum(first[s] <= i <= last[s] for s in first) for i in range(len(read))]
    assert max(open_) <= buffer


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(100, 400))
def test_batches_by_tokens_are_as_full_as_first_fit_makes_them(tokens, most):
    counts = np.array(tokens)
    batches = by_tokens(np.arange(len(tokens)), counts, most)
    sums = [int(counts[b].sum()) for b in batches]
    assert max(sums) <= most
    assert sum(s <= most / 2 for s in sums) <= 1  # two of them would have been one


@pytest.mark.parametrize("shuffle", ["record", "segment"])
def test_an_order_is_the_same_in_all_versions(shuffle):
    """Bits of PCG64, sorted: written down, so that no version of NumPy or of this changes an epoch half read."""
    if shuffle == "record":
        assert record_order(10, seed=7, epoch=3).tolist() == RECORD
    else:
        segments = np.repeat(np.arange(5), 2)
        assert segment_order(segments, buffer=2, seed=7, epoch=3).tolist() == SEGMENT


RECORD = [2, 4, 7, 3, 5, 1, 8, 9, 0, 6]
SEGMENT = [8, 5, 4, 6, 7, 9, 2, 0, 3, 1]


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_epochs_and_seeds_differ(seed, epoch):
    orders = [
        record_order(50, seed=s, epoch=e).tolist() for s, e in ((seed, epoch), (seed, epoch + 1), (seed + 1, epoch))
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_a_full_shuffle_when_all_segments_are_open():
    """With a buffer of all segments no place prefers a segment: means over 200 epochs, within five standard errors."""
    segments = np.repeat(np.arange(4), 25)
    places = np.zeros(4)
    for epoch in range(200):
        order = segment_order(segments, buffer=4, seed=0, epoch=epoch)
        for s in range(4):
            places[s] += np.flatnonzero(segments[order] == s).mean() / 200
    assert np.abs(places - 49.5).max() < 5 * 28.9 / np.sqrt(25 * 200)
