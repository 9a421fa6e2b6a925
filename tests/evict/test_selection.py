"""Selection against a scalar reference, and its invariants."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.config import EvictConfig
from mlx_tq.evict.selection import Span, select


def by_hand(worth, positions, count, span, mode, segments):
    """The published rule, token by token: the positions that leave."""
    tokens = list(zip(worth, positions, strict=True))
    eligible = [(w, p) for w, p in tokens if span.start <= p < span.stop]
    count = min(count, len(eligible))
    gone = []
    if mode != "v1" and count > 0:
        stop = max(span.stop, span.start + 1)
        width = (stop - span.start) / segments
        buckets = {}
        for w, p in eligible:
            buckets.setdefault(min(max(int((p - span.start) / width), 0), segments - 1), []).append((w, p))
        for _, bucket in sorted(buckets.items()):
            share = min(math.floor(len(bucket) * count / len(eligible)), len(bucket), count - len(gone))
            gone += [p for _, p in sorted(bucket)[:share]]
    rest = sorted((w, p) for w, p in eligible if p not in gone)
    return sorted(gone + [p for _, p in rest[: count - len(gone)]])


@st.composite
def bodies(draw):
    """Live positions with gaps, few distinct worths so that ties abound, a count and a span."""
    levels = draw(st.sampled_from([1, 3, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    live = rng.random(draw(st.integers(1, 300))) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    positions = draw(st.integers(0, 50)) + np.flatnonzero(live)
    worth = rng.integers(0, levels, len(positions)).astype(np.float64)
    first = draw(st.integers(0, 80))
    return worth, positions, draw(st.integers(0, 320)), Span(first, first + draw(st.integers(0, 320)))


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(bodies(), st.sampled_from(["v1", "v2", "v3"]), st.integers(1, 12))
def test_equals_the_rule_by_hand(body, mode, segments):
    worth, positions, count, span = body
    found = select(worth, positions, count, span, EvictConfig(mode=mode, segments=segments))
    assert positions[found].tolist() == by_hand(worth, positions, count, span, mode, segments)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    bodies(),
    st.sampled_from(["v1", "v2", "v3"]),
    st.integers(0, 5),
    st.sampled_from([0, 7, 100]),
    st.sampled_from([1, 8, 16, 64]),
    st.sampled_from(["mean", "max", "top"]),
)
def test_invariants(body, mode, skip, width, granularity, pooling):
    worth, positions, count, span = body
    config = EvictConfig(
        mode=mode, boundary_skip=skip, segment_tokens=width, granularity=granularity, pooling=pooling, segments=4
    )
    found = select(worth, positions, count, span, config)
    assert np.all(np.diff(found) > 0)
    gone = positions[found]
    assert np.all((gone >= span.start) & (gone < span.stop))
    eligible = int(((positions >= span.start) & (positions < span.stop)).sum())
    if granularity == 1 and (mode == "v1" or not skip):
        assert len(gone) == min(count, eligible)
    else:
        assert len(gone) < count + granularity
    blocks = set((gone // granularity).tolist())
    assert set(gone.tolist()) == {p for p in positions.tolist() if p // granularity in blocks}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(bodies())
def test_one_segment_from_the_start_is_v1(body):
    worth, positions, count, span = body
    one = select(worth, positions, count, span, EvictConfig(mode="v3", segments=1))
    assert np.array_equal(one, select(worth, positions, count, span, EvictConfig(mode="v1")))


def test_older_first_where_equal():
    positions = np.arange(10, 20)
    found = select(np.zeros(10), positions, 3, Span(0, 100), EvictConfig(mode="v1"))
    assert positions[found].tolist() == [10, 11, 12]


def test_each_segment_gives_its_share():
    """The worst tokens all lie in the last quarter; segments spread the loss, v1 does not."""
    positions = np.arange(400)
    worth = np.where(positions >= 300, 0.0, 1.0)
    spread = select(worth, positions, 40, Span(0, 400), EvictConfig(mode="v3", segments=4))
    assert np.bincount(spread // 100).tolist() == [10, 10, 10, 10]
    assert (select(worth, positions, 40, Span(0, 400), EvictConfig(mode="v1")) >= 300).all()


@pytest.mark.parametrize(("pooling", "leaves"), [("mean", 0), ("max", 1), ("top", 1)])
def test_pooling(pooling, leaves):
    """A block with one peak among zeros, and one that is even: their mean and their maximum disagree."""
    worth = np.concatenate([[1.0, 0.8], np.zeros(14), np.full(16, 0.5)])
    config = EvictConfig(mode="v1", granularity=16, pooling=pooling)
    found = select(worth, np.arange(32), 1, Span(0, 32), config)
    assert found.tolist() == list(range(16 * leaves, 16 * leaves + 16))


def test_a_block_that_is_not_complete_stays():
    """One at the end grows on; one that reaches into the prefix or the window is protected."""
    positions = np.arange(4, 60)
    config = EvictConfig(mode="v3", granularity=8)
    gone = positions[select(np.zeros(56), positions, 100, Span(4, 59), config)]
    assert gone.tolist() == list(range(4, 56))
    inside = positions[select(np.zeros(56), positions, 100, Span(10, 52), config)]
    assert inside.tolist() == list(range(16, 48))


def test_boundary_skip():
    positions = np.arange(80)
    config = EvictConfig(mode="v2", segments=4, boundary_skip=2)
    left = np.setdiff1d(positions, select(np.zeros(80), positions, 80, Span(0, 80), config))
    assert left.tolist() == [19, 20, 21, 39, 40, 41, 59, 60, 61]
