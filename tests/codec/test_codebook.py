"""Levels and their theory: published tables, pinned polynomials, and an integral by another method."""

import math
from itertools import pairwise

import numpy as np
import pytest

from codec.reference import DIMS
from mlx_tq.codec import codebook
from mlx_tq.codec.codebook import POLYNOMIALS, boundaries, levels, normal_density

PUBLISHED_LEVELS = {
    1: [math.sqrt(2 / math.pi)],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1519],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}
PUBLISHED_MSE = {1: 0.3634, 2: 0.117482, 3: 0.034548, 4: 0.009501}
BITS = tuple(POLYNOMIALS)


def fit_levels(bits: int, basis: np.ndarray) -> np.ndarray:
    """Return the coefficients of levels in a basis [2^bits, n] of least mean square error under N(0, 1).

    This is Lloyd's iteration: cells from midpoints, then weighted least squares on their centroids. The unit matrix as
    a basis leaves the levels free.
    """
    erf = np.vectorize(math.erf)
    coefficients = np.linalg.lstsq(basis, np.linspace(-1, 1, 2**bits) * (2 + bits / 4), rcond=None)[0]
    while True:
        table = basis @ coefficients
        edges = np.concatenate([[-np.inf], (table[1:] + table[:-1]) / 2, [np.inf]])
        weight = np.diff(erf(edges / math.sqrt(2))) / 2
        first = -np.diff(np.exp(-(edges**2) / 2)) / math.sqrt(2 * math.pi)
        root = np.sqrt(weight)
        updated = np.linalg.lstsq(basis * root[:, None], first / root, rcond=None)[0]
        if np.abs(updated - coefficients).max() < 1e-12:
            return updated
        coefficients = updated


def quadrature_mse(table: np.ndarray, dim: int) -> float:
    """Integrate (t - level(t))^2 under the exact density of sqrt(D) times a unit vector's coordinate, cell by cell.

    The integrals are Gauss-Legendre's, with the constant from the gamma function.
    """
    constant = math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi * dim)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    edges = [-math.sqrt(dim), *(table[1:] + table[:-1]) / 2, math.sqrt(dim)]
    total = 0.0
    for level, (low, high) in zip(table, pairwise(edges), strict=True):
        t = (high + low) / 2 + (high - low) / 2 * nodes
        density = constant * (1 - t * t / dim) ** ((dim - 3) / 2)
        total += (high - low) / 2 * np.sum(weights * density * (t - level) ** 2)
    return total


@pytest.mark.parametrize(("bits", "loss"), [(1, 0), (2, 0), (3, 0.001e-2), (4, 0.17e-2)])
def test_polynomials_are_the_best_ones_and_cost_little(bits, loss):
    """Free levels are the published ones; the mean square error of polynomial levels is larger by `loss`."""
    best = fit_levels(bits, np.eye(2**bits))
    positive = np.array(PUBLISHED_LEVELS[bits])
    assert np.allclose(best, [*-positive[::-1], *positive], atol=6e-5)
    least = codebook.mse(best, normal_density)
    assert least == pytest.approx(PUBLISHED_MSE[bits], abs=6e-7 if bits > 1 else 6e-5)
    u = np.arange(2**bits) - (2**bits - 1) / 2
    powers = np.stack([u ** (2 * i + 1) for i in range(len(POLYNOMIALS[bits]))], axis=1)
    assert np.allclose(fit_levels(bits, powers), POLYNOMIALS[bits], rtol=2e-6, atol=0)
    ratio = codebook.mse(levels(bits).astype(np.float64), normal_density) / least
    assert ratio - 1 == pytest.approx(loss, abs=max(1e-6, loss / 10))


@pytest.mark.parametrize("bits", BITS)
def test_levels_ascend_and_are_odd_and_boundaries_are_midpoints(bits):
    table, cuts = levels(bits), boundaries(bits)
    assert table.dtype == np.float32
    assert len(table) == 2**bits
    assert (np.diff(table) > 0).all()
    assert np.array_equal(table, -table[::-1])
    assert cuts.dtype == np.float32
    assert cuts.tolist() == [np.float32((low + high) / 2) for low, high in pairwise(table.astype(np.float64))]
    assert cuts[len(cuts) // 2] == 0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_theory_equals_another_integral(dim, bits):
    expected = quadrature_mse(levels(bits).astype(np.float64), dim)
    assert codebook.theoretical_mse(bits, dim) == pytest.approx(expected, rel=1e-5)
