"""Lloyd-Max levels for rotated coordinates, and the polynomial levels that the codecs really use.

A coordinate of a rotated unit vector, times sqrt(D), has the density of `beta_density(D)`, which tends to N(0, 1). The
best 2^b levels for it are Lloyd-Max levels. The tq formats use odd polynomials in u = code - (2^b - 1) / 2 fitted to
N(0, 1), so that a kernel computes a level instead of looking it up; boundaries are the midpoints of the levels.

Sources: TurboQuant (arXiv 2504.19874) section 3.1; Lloyd 1982; Max 1960.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

Density = Callable[[np.ndarray], np.ndarray]

# Coefficients of u, u^3, u^5 for 1 to 4 bits, as `fit_polynomial` finds them for N(0, 1), rounded to fp32.
POLYNOMIALS: dict[int, tuple[float, ...]] = {
    1: (1.5957691669464111,),
    2: (0.8928869366645813, 0.05069250240921974),
    3: (0.4906612038612366, 0.004788695368915796, 0.00043654569890350103),
    4: (0.2626548111438751, 0.0001291660882998258, 2.9582452043541707e-05),
}

_GRID = 100_001  # points of the integrals; their error is below 1e-8


def normal_density(t: np.ndarray) -> np.ndarray:
    """The density of the normal distribution N(0, 1) at x."""
    return np.asarray(np.exp(-t * t / 2) / np.sqrt(2 * np.pi))


def beta_density(dim: int) -> Density:
    """The exact density of sqrt(D) times one coordinate of a uniform unit vector in D dimensions."""

    def density(t: np.ndarray) -> np.ndarray:
        inside = np.clip(1 - t * t / dim, 0, None)
        values = inside ** ((dim - 3) / 2)
        return np.asarray(values / np.trapezoid(values, t))

    return density


def midpoints(levels: np.ndarray) -> np.ndarray:
    """The boundaries between sorted levels: [2^b] -> [2^b - 1]."""
    return np.asarray((levels[1:] + levels[:-1]) / 2)


class _Moments:
    """Running integrals of t^0, t^1 and t^2 under a density, so that a cell's moments are differences."""

    def __init__(self, density: Density, limit: float) -> None:
        self._t = np.linspace(-limit, limit, _GRID)
        values = density(self._t)
        steps = np.diff(self._t)
        integrands = (values, values * self._t, values * self._t**2)
        self._integrals = [np.concatenate([[0.0], np.cumsum(steps * (f[1:] + f[:-1]) / 2)]) for f in integrands]

    def cells(self, levels: np.ndarray) -> list[np.ndarray]:
        """The three moments of each cell around sorted levels: 3 x [2^b]."""
        edges = np.concatenate([self._t[:1], midpoints(levels), self._t[-1:]])
        return [np.diff(np.interp(edges, self._t, integral)) for integral in self._integrals]


def mse(levels: np.ndarray, density: Density, limit: float = 12.0) -> float:
    """E (t - level(t))^2 for a coordinate t of unit variance."""
    weight, first, second = _Moments(density, limit).cells(levels)
    return float(np.sum(second - 2 * levels * first + levels**2 * weight))


def lloyd_max(bits: int, density: Density = normal_density, limit: float = 12.0) -> np.ndarray:
    """The levels of least mean square error: float64 [2^bits], ascending. Each level is its cell's centroid."""
    moments = _Moments(density, limit)
    levels = np.linspace(-1, 1, 2**bits) * min(limit, 2.0 + bits / 4)
    while True:
        weight, first, _ = moments.cells(levels)
        centroids = np.asarray(first / weight)
        if np.abs(centroids - levels).max() < 1e-9:
            return centroids
        levels = centroids


def _powers(bits: int, terms: int) -> np.ndarray:
    u = np.arange(2**bits) - (2**bits - 1) / 2
    return np.stack([u ** (2 * i + 1) for i in range(terms)], axis=1)


def fit_polynomial(bits: int, terms: int, density: Density = normal_density, limit: float = 12.0) -> np.ndarray:
    """The odd polynomial of least mean square error: float64 [terms], coefficients of u, u^3, u^5, ...

    Lloyd's iteration with the levels held to the polynomial: cells from midpoints, then weighted least squares.
    """
    moments = _Moments(density, limit)
    basis = _powers(bits, terms)
    coefficients = np.linalg.lstsq(basis, lloyd_max(bits, density, limit), rcond=None)[0]
    while True:
        weight, first, _ = moments.cells(basis @ coefficients)
        root = np.sqrt(weight)
        updated = np.linalg.lstsq(basis * root[:, None], first / root, rcond=None)[0]
        if np.abs(updated - coefficients).max() < 1e-10:
            return np.asarray(updated)
        coefficients = updated


@lru_cache
def levels(bits: int) -> np.ndarray:
    """The levels of the tq formats: float32 [2^bits], ascending and odd."""
    exact = _powers(bits, len(POLYNOMIALS[bits])) @ np.array(POLYNOMIALS[bits])
    return np.asarray(exact, np.float32)


@lru_cache
def boundaries(bits: int) -> np.ndarray:
    """Midpoints of `levels`: float32 [2^bits - 1]. A code is the number of boundaries below the value."""
    return midpoints(levels(bits).astype(np.float64)).astype(np.float32)


@lru_cache
def theoretical_mse(bits: int, dim: int) -> float:
    """E ||u - u_hat||^2 of a unit vector in `dim` dimensions, rotated and quantised with the levels in use."""
    return mse(levels(bits).astype(np.float64), beta_density(dim), limit=float(np.sqrt(dim)))
