"""The Hadamard transform and the sum in fixed order: against explicit matrices, and bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import DIMS, ORDERS, fixed_sum, gaussian, hadamard_matrix, small_hadamard

from mlx_tq.codec import exact


@pytest.mark.parametrize("order", exact.ORDERS)
def test_small_matrix_is_hadamard(order):
    matrix = exact.hadamard_matrix(order)
    assert np.array_equal(np.abs(matrix), np.ones((order, order)))
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))
    assert np.array_equal(matrix, small_hadamard(order))
    assert np.array_equal(matrix, matrix.T) == (order in (1, 12))


@pytest.mark.parametrize("dim", DIMS)
def test_split_order(dim):
    assert exact.split_order(dim) == (ORDERS[dim], dim // ORDERS[dim])


@pytest.mark.parametrize("dim", [-16, 0, 3, 72, 144, 176, 208, 288])
def test_split_order_refuses(dim):
    assert exact.split_order(dim) is None


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("transpose", [False, True])
def test_hadamard_equals_kronecker_product(dim, transpose):
    x = gaussian((5, dim))
    matrix = hadamard_matrix(dim)
    expected = x.astype(np.float64) @ (matrix if transpose else matrix.T)
    got = np.array(exact.hadamard(mx.array(x), transpose=transpose))
    assert got.dtype == np.float32
    order = ORDERS[dim]
    additions = (dim // order).bit_length() - 1 + order  # on the way from an input to an output
    assert (np.abs(got - expected).max(axis=-1) <= additions * 2**-24 * np.abs(x).sum(axis=-1)).all()


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_of_unit_vectors_is_exact(dim):
    assert np.array_equal(np.array(exact.hadamard(mx.eye(dim))), hadamard_matrix(dim).T)
    assert np.array_equal(np.array(exact.hadamard(mx.eye(dim), transpose=True)), hadamard_matrix(dim))


@pytest.mark.parametrize("dim", DIMS)
def test_pairwise_sum_adds_in_the_documented_order(dim):
    x = gaussian((64, dim)) * np.float32(10.0) ** gaussian((64, dim), seed=1)
    got = np.array(exact.pairwise_sum(mx.array(x)))
    assert np.array_equal(got, fixed_sum(x.T))
    assert not np.array_equal(got, np.cumsum(x, axis=-1, dtype=np.float32)[:, -1])  # the order is visible in this data
