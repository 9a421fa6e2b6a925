"""Levels of rotated coordinates, and the theory of their error.

A coordinate of a rotated unit vector, times sqrt(D), is nearly N(0, 1), whose best levels are Lloyd-Max levels. The tq
formats use odd polynomials in u = code - (2^b - 1) / 2 instead, so that a kernel computes a level without a table.

Sources: TurboQuant (arXiv 2504.19874) section 3.1; Lloyd 1982; Max 1960.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

# Coefficients of u, u^3, u^5 for 1 to 4 bits that minimize the mean square error under N(0, 1), rounded to fp32.
POLYNOMIALS: dict[int, tuple[float, ...]] = {
    1: (1.5957691669464111,),
    2: (0.8928869366645813, 0.05069250240921974),
    3: (0.4906612038612366, 0.004788695368915796, 0.00043654569890350103),
    4: (0.2626548111438751, 0.0001291660882998258, 2.9582452043541707e-05),
}


@lru_cache
def levels(bits: int) -> np.ndarray:
    """Return the levels of the tq formats: float32 [2^bits], ascending and odd."""
    u = np.arange(2**bits) - (2**bits - 1) / 2
    powers = np.stack([u ** (2 * i + 1) for i in range(len(POLYNOMIALS[bits]))], axis=1)
    return np.asarray(powers @ np.array(POLYNOMIALS[bits]), np.float32)


@lru_cache
def boundaries(bits: int) -> np.ndarray:
    """Return the midpoints of `levels`: float32 [2^bits - 1]. A code is the number of boundaries below the value."""
    return midpoints(levels(bits).astype(np.float64)).astype(np.float32)


def midpoints(levels: np.ndarray) -> np.ndarray:
    return np.asarray((levels[1:] + levels[:-1]) / 2)


def normal_density(t: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-t * t / 2) / np.sqrt(2 * np.pi))


def mse(levels: np.ndarray, density: Callable[[np.ndarray], np.ndarray], limit: float = 12.0) -> float:
    """Return the mean of (t - level(t))^2 under the density of t on [-limit, limit]."""
    t = np.linspace(-limit, limit, 100_001)  # the integrals' error is below 1e-8
    values, steps = density(t), np.diff(t)
    edges = np.concatenate([t[:1], midpoints(levels), t[-1:]])
    moments = []  # of t^0, t^1 and t^2 in the cell of each level
    for integrand in (values, values * t, values * t**2):
        integral = np.concatenate([[0.0], np.cumsum(steps * (integrand[1:] + integrand[:-1]) / 2)])
        moments.append(np.diff(np.interp(edges, t, integral)))
    weight, first, second = moments
    return float(np.sum(second - 2 * levels * first + levels**2 * weight))


@lru_cache
def theoretical_mse(bits: int, dim: int) -> float:
    """Return E ||u - u_hat||^2 of a unit vector in `dim` dimensions, rotated and quantized with `levels`."""

    def density(t: np.ndarray) -> np.ndarray:  # of sqrt(D) times a coordinate of a uniform unit vector
        values = np.clip(1 - t * t / dim, 0, None) ** ((dim - 3) / 2)
        return np.asarray(values / np.trapezoid(values, t))

    return mse(levels(bits).astype(np.float64), density, limit=float(np.sqrt(dim)))
