"""Levels and their theory: published tables, pinned polynomials, and an integral by another method."""

import math
from itertools import pairwise

import numpy as np
import pytest
from codec_reference import DIMS

from mlx_tq.codec import codebook
from mlx_tq.codec.codebook import POLYNOMIALS, boundaries, fit_polynomial, levels, lloyd_max, normal_density

PUBLISHED_LEVELS = {
    1: [math.sqrt(2 / math.pi)],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1519],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}
PUBLISHED_MSE = {1: 0.3634, 2: 0.117482, 3: 0.034548, 4: 0.009501}
BITS = tuple(POLYNOMIALS)


def quadrature_mse(table: np.ndarray, dim: int) -> float:
    """E (t - level(t))^2 under the exact density of sqrt(D) times a unit vector's coordinate, cell by cell, by
    Gauss-Legendre, with the constant from the gamma function."""
    constant = math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi * dim)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    edges = [-math.sqrt(dim), *(table[1:] + table[:-1]) / 2, math.sqrt(dim)]
    total = 0.0
    for level, (low, high) in zip(table, pairwise(edges), strict=True):
        t = (high + low) / 2 + (high - low) / 2 * nodes
        density = constant * (1 - t * t / dim) ** ((dim - 3) / 2)
        total += (high - low) / 2 * np.sum(weights * density * (t - level) ** 2)
    return total


@pytest.mark.parametrize("bits", PUBLISHED_LEVELS)
def test_solver_finds_the_published_levels(bits):
    positive = np.array(PUBLISHED_LEVELS[bits])
    assert np.allclose(lloyd_max(bits), [*-positive[::-1], *positive], atol=6e-5)


@pytest.mark.parametrize("bits", BITS)
def test_solver_is_at_its_optimum(bits):
    best = lloyd_max(bits)
    mse = codebook.mse(best, normal_density)
    assert mse == pytest.approx(PUBLISHED_MSE[bits], abs=6e-7 if bits > 1 else 6e-5)
    for i in range(len(best)):
        for step in (-1e-3, 1e-3):
            moved = best.copy()
            moved[i] += step
            assert codebook.mse(moved, normal_density) > mse


@pytest.mark.parametrize("bits", BITS)
def test_pinned_polynomials_are_the_fitted_ones(bits):
    fitted = fit_polynomial(bits, len(POLYNOMIALS[bits]))
    assert fitted.astype(np.float32).tolist() == list(POLYNOMIALS[bits])


@pytest.mark.parametrize(("bits", "loss"), [(1, 0), (2, 0), (3, 0.001e-2), (4, 0.17e-2)])
def test_what_the_polynomial_costs(bits, loss):
    least = codebook.mse(lloyd_max(bits), normal_density)
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


@pytest.mark.parametrize("dim", DIMS)
def test_beta_density_has_unit_mass_and_variance(dim):
    t = np.linspace(-math.sqrt(dim), math.sqrt(dim), 20_001)
    density = codebook.beta_density(dim)(t)
    assert np.trapezoid(density, t) == pytest.approx(1, abs=1e-6)
    assert np.trapezoid(density * t * t, t) == pytest.approx(1, abs=1e-5)
    assert np.trapezoid(density * t**4, t) == pytest.approx(3 * dim / (dim + 2), abs=1e-4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_theory_equals_another_integral(dim, bits):
    expected = quadrature_mse(levels(bits).astype(np.float64), dim)
    assert codebook.theoretical_mse(bits, dim) == pytest.approx(expected, rel=1e-5)
