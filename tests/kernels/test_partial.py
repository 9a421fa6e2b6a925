"""Partial attention and its merge: exact, in any grouping and order, and finite if everything is masked."""

from functools import reduce
from itertools import pairwise

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.kernels.attend import Partial, attend_scores, merge
from mlx_tq.kernels.regions import MASKED

seeds = st.integers(0, 2**32 - 1)
few_examples = settings(max_examples=80, deadline=None)


def make_problem(seed: int, keys: int, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((2, 3, keys)) * spread
    return scores.astype(np.float32), rng.standard_normal((2, keys, 4)).astype(np.float32)


def output(part: Partial) -> np.ndarray:
    return np.array(part.o / part.l)


def exact_output(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def attend_parts(scores: np.ndarray, values: np.ndarray, cuts: list[int]) -> list[Partial]:
    edges = sorted({0, scores.shape[-1], *(cut % scores.shape[-1] for cut in cuts)})
    return [attend_scores(mx.array(scores[..., a:b]), [mx.array(values[..., a:b, :])]) for a, b in pairwise(edges)]


@given(seeds, st.integers(1, 40), st.lists(st.integers(0, 1000), max_size=5), st.sampled_from([0.1, 3.0, 300.0, 3e4]))
@few_examples
def test_parts_merge_to_the_whole(seed, keys, cuts, spread):
    scores, values = make_problem(seed, keys, spread)
    merged = reduce(merge, attend_parts(scores, values, cuts))
    assert np.allclose(output(merged), exact_output(scores, values), rtol=1e-4, atol=1e-5)  # also beyond exp's range
    assert np.array_equal(np.array(merged.m)[..., 0], scores.max(axis=-1))


@given(seeds, st.permutations(range(4)))
@few_examples
def test_any_order_and_grouping(seed, order):
    a, b, c, d = parts = attend_parts(*make_problem(seed, 24), [5, 11, 18])
    merged = reduce(merge, (parts[i] for i in order))
    assert all(mx.array_equal(x, y) for x, y in zip(merge(a, b), merge(b, a), strict=True))
    for other in (merge(a, merge(b, merge(c, d))), merge(merge(a, b), merge(c, d))):
        assert np.allclose(output(merged), output(other), rtol=1e-5, atol=1e-6)
        assert np.allclose(np.array(merged.l), np.array(other.l), rtol=1e-5)
        assert mx.array_equal(merged.m, other.m)


@given(seeds)
@few_examples
def test_a_masked_part_adds_nothing(seed):
    scores, values = (mx.array(x) for x in make_problem(seed, 12))
    visible = attend_scores(scores, [values])
    masked = attend_scores(mx.full(scores.shape, MASKED), [values])
    for merged in (merge(visible, masked), merge(masked, visible)):
        assert all(mx.array_equal(x, y) for x, y in zip(merged, visible, strict=True))
    assert np.isfinite(output(merge(masked, masked))).all()


@given(seeds, st.sampled_from([1, 2, 4]))
@few_examples
def test_planes_and_gain_of_values(seed, planes):
    scores, values = make_problem(seed, 10)
    gain = np.random.default_rng(seed).random((2, 10)).astype(np.float32)
    parts = [mx.array(part) for part in np.split(values, planes, axis=-1)]
    result = attend_scores(mx.array(scores), parts, mx.array(gain))
    assert np.allclose(output(result), exact_output(scores, values * gain[..., None]), rtol=1e-4, atol=1e-5)
    assert mx.array_equal(result.l, attend_scores(mx.array(scores), parts).l)
