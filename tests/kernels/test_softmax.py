"""Partial attention and its merge: exact, in any grouping and order, and finite when all is masked."""

from functools import reduce
from itertools import pairwise

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.kernels.softmax import MASKED, Partial, merge, partial

seeds = st.integers(0, 2**32 - 1)
modest = settings(max_examples=80, deadline=None)


def problem(seed: int, keys: int, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((2, 3, keys)) * spread
    return scores.astype(np.float32), rng.standard_normal((2, keys, 4)).astype(np.float32)


def attended(part: Partial) -> np.ndarray:
    return np.array(part.o / part.l)


def exact(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def pieces(scores: np.ndarray, values: np.ndarray, cuts: list[int]) -> list[Partial]:
    edges = sorted({0, scores.shape[-1], *(cut % scores.shape[-1] for cut in cuts)})
    return [partial(mx.array(scores[..., a:b]), [mx.array(values[..., a:b, :])]) for a, b in pairwise(edges)]


@given(seeds, st.integers(1, 40), st.lists(st.integers(0, 1000), max_size=5), st.sampled_from([0.1, 3.0, 300.0]))
@modest
def test_pieces_merge_to_the_whole(seed, keys, cuts, spread):
    scores, values = problem(seed, keys, spread)
    merged = reduce(merge, pieces(scores, values, cuts))
    assert np.allclose(attended(merged), exact(scores, values), rtol=1e-4, atol=1e-5)
    assert np.array_equal(np.array(merged.m)[..., 0], scores.max(axis=-1))


@given(seeds, st.permutations(range(4)))
@modest
def test_any_order_and_grouping(seed, order):
    scores, values = problem(seed, 24)
    parts = pieces(scores, values, [5, 11, 18])
    left = reduce(merge, (parts[i] for i in order))
    a, b, c, d = parts
    right = merge(a, merge(b, merge(c, d)))
    pairs = merge(merge(a, b), merge(c, d))
    assert all(mx.array_equal(x, y) for x, y in zip(merge(a, b), merge(b, a), strict=True))
    for other in (right, pairs):
        assert np.allclose(attended(left), attended(other), rtol=1e-5, atol=1e-6)
        assert np.allclose(np.array(left.l), np.array(other.l), rtol=1e-5)
        assert mx.array_equal(left.m, other.m)


@given(seeds)
@modest
def test_a_masked_piece_adds_nothing(seed):
    """Bit for bit, and also when it comes first."""
    scores, values = problem(seed, 12)
    seen = partial(mx.array(scores), [mx.array(values)])
    masked = partial(mx.full(scores.shape, MASKED), [mx.array(values)])
    for merged in (merge(seen, masked), merge(masked, seen)):
        assert all(mx.array_equal(x, y) for x, y in zip(merged, seen, strict=True))
    assert np.isfinite(attended(merge(masked, masked))).all()


@given(seeds, st.sampled_from([1, 2, 4]))
@modest
def test_planes_and_gain(seed, planes):
    """Values may come in parts of their last axis, and their factor may be applied to the weights."""
    scores, values = problem(seed, 10)
    gain = np.random.default_rng(seed).random((2, 10)).astype(np.float32)
    parts = [mx.array(part) for part in np.split(values, planes, axis=-1)]
    found = partial(mx.array(scores), parts, mx.array(gain))
    assert np.allclose(attended(found), exact(scores, values * gain[..., None]), rtol=1e-4, atol=1e-5)
    assert mx.array_equal(found.l, partial(mx.array(scores), parts).l)


def test_scores_beyond_the_range_of_exp():
    scores = np.array([[[-3e4, 5e4, 5e4 - 1]]], np.float32)
    values = np.eye(3, dtype=np.float32)[None]
    assert np.allclose(attended(reduce(merge, pieces(scores, values, [1, 2]))), exact(scores, values), atol=1e-6)
