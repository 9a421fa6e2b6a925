"""Mask arrays of every rank and kind, in both kernels: honoured, in logical order, column for column."""

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import DTYPES, assert_as_good_as_reference, expected, make_problem, random_sinks

from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.masks import apply_mask, causal_columns, take_columns
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.softmax import MASKED

BATCH, QUERY_HEADS = 2, 4
LENGTHS = {attend: (1, 3, 8), prefill: (9, 33)}
RUNS = [(kernel, length) for kernel, lengths in LENGTHS.items() for length in lengths]
# B, Q, L, S stand for a size of the problem; 1 for a broadcast axis.
SHAPES = ("S", "1S", "LS", "QLS", "1LS", "11LS", "B1LS", "1QLS", "BQLS", "B11S", "BQ1S")


def shape_of(letters: str, length: int, tokens: int) -> tuple[int, ...]:
    sizes = {"B": BATCH, "Q": QUERY_HEADS, "L": length, "S": tokens, "1": 1}
    return tuple(sizes[letter] for letter in letters)


def random_mask(shape: tuple[int, ...], dtype: mx.Dtype | None, seed: int = 0) -> mx.array:
    """Bool, or additive with minus infinities; every query sees something."""
    rng = np.random.default_rng(seed)
    visible = rng.random(shape) < 0.6
    visible[..., rng.integers(shape[-1])] = True
    if dtype is None:
        return mx.array(visible)
    bias = np.where(visible, rng.standard_normal(shape), -np.inf)
    return mx.array(bias.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize(("kernel", "length"), RUNS)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("letters", SHAPES)
def test_array_masks(kernel, length, additive, letters):
    problem = make_problem(batch=BATCH, length=length, body=33, recent=4)
    mask = random_mask(shape_of(letters, length, problem.tokens), mx.float16 if additive else None)
    assert_as_good_as_reference(problem, problem.solve(kernel, mask), mask, peak=4.0)


@pytest.mark.parametrize("kernel", [attend, prefill])
@pytest.mark.parametrize("prefix", [0, 5, 128])
@pytest.mark.parametrize("region", ["prefix", "body", "tail"])
def test_one_visible_token(kernel, prefix, region):
    """Attention to a single token returns its value: a mask shifted by one column returns a neighbour's."""
    problem = make_problem(length=9 if kernel is prefill else 3, body=33, prefix=prefix, dtype="float32")
    starts = {"prefix": 0, "body": prefix, "tail": prefix + 33}
    stops = {"prefix": prefix, "body": prefix + 33, "tail": problem.tokens}
    for token in {starts[region], (starts[region] + stops[region]) // 2, stops[region] - 1}:
        if starts[region] == stops[region]:
            continue
        mask = mx.arange(problem.tokens)[None] == token
        out = np.array(problem.solve(kernel, mask)).reshape(2, 2, -1, 64)
        value = problem.decoded[1][:, :, token : token + 1]
        assert np.allclose(out, np.broadcast_to(value, out.shape), atol=1e-5)


@pytest.mark.parametrize(("kernel", "length"), RUNS)
def test_causal_equals_its_array(kernel, length):
    problem = make_problem(length=length, dtype="float32")
    rows = mx.arange(problem.tokens - length, problem.tokens)[:, None]
    array = mx.arange(problem.tokens)[None] <= rows
    assert mx.allclose(problem.solve(kernel, "causal"), problem.solve(kernel, array), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [attend, prefill])
def test_mask_and_sinks(kernel):
    problem = make_problem(batch=BATCH, length=9 if kernel is prefill else 3)
    mask, sinks = random_mask((problem.queries.shape[2], problem.tokens), None), random_sinks(problem)
    assert_as_good_as_reference(problem, problem.solve(kernel, mask, sinks), mask, sinks, peak=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_additive_masks_in_every_type(dtype):
    problem = make_problem(dtype=dtype)
    mask = random_mask((3, problem.tokens), DTYPES[dtype])
    assert_as_good_as_reference(problem, problem.solve(attend, mask), mask)


def test_a_column_that_all_keys_share():
    """A bias of one value for each query changes nothing."""
    problem = make_problem(dtype="float32")
    bias = mx.array([[1.0], [-2.0], [3.0]])
    assert np.allclose(np.array(problem.solve(attend, bias)), expected(problem), atol=1e-5)


def test_take_columns():
    mask = mx.arange(20).reshape(2, 10)
    assert take_columns(mask, (0, 2), (7, 10)).tolist() == [[0, 1, 7, 8, 9], [10, 11, 17, 18, 19]]
    assert take_columns(mask, (3, 3)).shape == (2, 0)
    assert take_columns(mask[:, :1], (0, 2), (7, 10)).tolist() == [[0], [10]]


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 5), (3, 3), (4, 9)])
def test_causal_columns(length, keys):
    assert np.array_equal(np.array(causal_columns(length, keys)), np.tril(np.ones((length, keys)), keys - length))


def test_masked_scores_are_finite():
    scores = mx.zeros((1, 2, 6, 4))
    for mask in (mx.zeros((3, 4), mx.bool_), mx.full((3, 4), -mx.inf)):
        assert apply_mask(scores, mask, 3).tolist() == mx.full((1, 2, 6, 4), MASKED).tolist()
