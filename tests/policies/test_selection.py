"""Selection against a scalar reference, and its invariants."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.policies import KeyNorm, Published, Recency
from mlx_tq.policies.selection import PositionRange, select


def by_hand(scores, positions, count, span, mode, segments):
    """Apply the published rule token by token, and return the evicted positions."""
    tokens = list(zip(scores, positions, strict=True))
    eligible = [(w, p) for w, p in tokens if span.start <= p < span.stop]
    count = min(count, len(eligible))
    evicted = []
    if mode != "v1" and count > 0:
        stop = max(span.stop, span.start + 1)
        width = (stop - span.start) / segments
        buckets = {}
        for w, p in eligible:
            buckets.setdefault(min(max(int((p - span.start) / width), 0), segments - 1), []).append((w, p))
        for _, bucket in sorted(buckets.items()):
            share = min(math.floor(len(bucket) * count / len(eligible)), len(bucket), count - len(evicted))
            evicted += [p for _, p in sorted(bucket)[:share]]
    rest = sorted((w, p) for w, p in eligible if p not in evicted)
    return sorted(evicted + [p for _, p in rest[: count - len(evicted)]])


@st.composite
def cases(draw):
    """Draw live positions with gaps, few distinct scores so that ties abound, a count and a range."""
    levels = draw(st.sampled_from([1, 3, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    live = rng.random(draw(st.integers(1, 300))) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    positions = draw(st.integers(0, 50)) + np.flatnonzero(live)
    scores = rng.integers(0, levels, len(positions)).astype(np.float64)
    first = draw(st.integers(0, 80))
    return scores, positions, draw(st.integers(0, 320)), PositionRange(first, first + draw(st.integers(0, 320)))


@pytest.mark.parametrize("examples", [150, pytest.param(1500, marks=pytest.mark.full)])
def test_equals_the_rule_by_hand(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(cases(), st.sampled_from(["v1", "v2", "v3", "recency"]), st.integers(1, 12))
    def check(case, mode, segments):
        scores, positions, count, span = case
        options = {"segments": segments, "granularity": 1}
        policy = Recency(**options) if mode == "recency" else Published(mode=mode, **options)
        indices = select(scores, positions, count, span, policy)
        mode = "v1" if mode == "recency" else mode  # which ignores segments too
        assert positions[indices].tolist() == by_hand(scores, positions, count, span, mode, segments)

    check()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    cases(),
    st.sampled_from(["v1", "v2", "v3"]),
    st.sampled_from([0, 7, 100]),
    st.sampled_from([1, 8, 16, 64]),
    st.sampled_from(["mean", "max", "top"]),
)
def test_invariants(case, mode, width, granularity, pooling):
    scores, positions, count, span = case
    policy = Published(mode=mode, segment_tokens=width, granularity=granularity, pooling=pooling, segments=4)
    indices = select(scores, positions, count, span, policy)
    assert np.all(np.diff(indices) > 0)
    evicted = positions[indices]
    assert np.all((evicted >= span.start) & (evicted < span.stop))
    eligible = int(((positions >= span.start) & (positions < span.stop)).sum())
    if granularity == 1:
        assert len(evicted) == min(count, eligible)
    else:
        assert len(evicted) < count + granularity
    blocks = set((evicted // granularity).tolist())
    assert set(evicted.tolist()) == {p for p in positions.tolist() if p // granularity in blocks}


@pytest.mark.parametrize(("pooling", "evicted"), [("mean", 0), ("max", 1), ("top", 1)])
def test_pooling(pooling, evicted):
    """The mean and the maximum of a block with one peak among zeros, and of an even one, disagree."""
    scores = np.concatenate([[1.0, 0.8], np.zeros(14), np.full(16, 0.5)])
    policy = Published(mode="v1", granularity=16, pooling=pooling)
    indices = select(scores, np.arange(32), 1, PositionRange(0, 32), policy)
    assert indices.tolist() == list(range(16 * evicted, 16 * evicted + 16))


def test_incomplete_blocks_are_not_evicted():
    """The last block still grows; one that reaches into the sinks or the window is protected."""
    positions = np.arange(4, 60)
    policy = KeyNorm(granularity=8)
    for stop in (59, 100):
        evicted = positions[select(np.zeros(56), positions, 100, PositionRange(4, stop), policy)]
        assert evicted.tolist() == list(range(4, 56))
    inside = positions[select(np.zeros(56), positions, 100, PositionRange(10, 52), policy)]
    assert inside.tolist() == list(range(16, 48))
