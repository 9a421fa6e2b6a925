"""Random rotations that make every coordinate of a vector look like a Gaussian, and exact fp32 sums.

<R k, R q> = <k, q> is why attention never needs the inverse per token. NumPy's PCG64 makes seeds portable.

Encoding must give the same bits on every backend and batch shape, and a code on a boundary depends on the order of fp32
additions. So a vector of D = m 2^k values is read as m rows of 2^k: neighbors are added in pairs along a row (k
stages), then the m rows left to right. The kernels in metal/ do the same.

Sources: TurboQuant (arXiv 2504.19874) section 3; Ailon and Chazelle 2009 (signs, then Walsh-Hadamard); Mezzadri 2007
(Haar measure by QR with the signs of diag(R)).
"""

import math
from abc import ABC, abstractmethod
from functools import cache, cached_property, lru_cache

import mlx.core as mx
import numpy as np

from mlx_tq.errors import ConfigError

ORDERS = (1, 12, 20, 28)  # m of D = m 2^k, as in mx.hadamard_transform


@cache
def hadamard_matrix(order: int) -> np.ndarray:
    """Return mlx's Hadamard matrix of an order in ORDERS: entries +-1, float64 [m, m]; symmetric for 1 and 12 only."""
    return np.rint(np.array(mx.hadamard_transform(mx.eye(order), scale=1.0, stream=mx.cpu), np.float64).T)


def split_order(dim: int) -> tuple[int, int] | None:
    """Write `dim` as (m, 2^k) with m in ORDERS; None if that cannot be done."""
    for order in ORDERS:
        power, rest = divmod(dim, order)
        if dim > 0 and rest == 0 and power & (power - 1) == 0:
            return order, power
    return None


def hadamard(x: mx.array, *, transpose: bool = False) -> mx.array:
    """Multiply by the Hadamard matrix H_m (x) H_(2^k) along the last axis, in the fixed order: fp32 [..., D]."""
    order, power = split_order(x.shape[-1]) or (0, 0)
    rows = x.reshape(*x.shape[:-1], order, power)
    for _ in range(power.bit_length() - 1):
        even, odd = rows[..., 0::2], rows[..., 1::2]
        rows = mx.concatenate([even + odd, even - odd], axis=-1)
    if order > 1:
        matrix = hadamard_matrix(order).astype(np.float32)
        columns = mx.array(matrix if transpose else matrix.T)[:, :, None]  # column j holds the signs of row j
        total = rows[..., 0:1, :] * columns[0]
        for j in range(1, order):
            total = total + rows[..., j : j + 1, :] * columns[j]
        rows = total
    return rows.reshape(x.shape)


def pairwise_sum(x: mx.array) -> mx.array:
    """Sum along the last axis in the fixed order: fp32 [..., D] -> [...]."""
    rows = x.reshape(*x.shape[:-1], *(split_order(x.shape[-1]) or (x.shape[-1], 1)))
    while rows.shape[-1] > 1:
        rows = rows[..., 0::2] + rows[..., 1::2]
    total = rows[..., 0, 0]
    for j in range(1, rows.shape[-2]):
        total = total + rows[..., j, 0]
    return total


class Rotation(ABC):
    """An orthogonal map R of the last axis."""

    dim: int

    @abstractmethod
    def forward(self, x: mx.array) -> mx.array:
        """Return R x times sqrt(D), fp32 [..., D]: of unit variance if x is a unit vector."""

    @abstractmethod
    def inverse(self, y: mx.array) -> mx.array:
        """Return R^T y, fp32 [..., D]."""

    @cached_property
    def matrix(self) -> mx.array:
        """R, fp32 [D, D]."""
        return (self.forward(mx.eye(self.dim)) / math.sqrt(self.dim)).T


class WalshHadamard(Rotation):
    """R = H diag(s) / sqrt(D), with random signs s. H is not symmetric for m = 20 and 28: the inverse transposes it."""

    def __init__(self, dim: int, seed: int = 0) -> None:
        orders = split_order(dim)
        if orders is None:
            valid = f"m * 2^k with m in {set(ORDERS)}, such as 64, 80, 96, 112, 128, 192 or 256"
            raise ConfigError(f"head_dim {dim} has no Walsh-Hadamard transform; valid is {valid}. Use rotation='haar'.")
        self.dim = dim
        self.order, self.power = orders
        flips = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, dim)
        self.signs = mx.array((1 - 2 * flips).astype(np.float32))

    def forward(self, x: mx.array) -> mx.array:
        return hadamard(x * self.signs)

    def inverse(self, y: mx.array) -> mx.array:
        return hadamard(y, transpose=True) * (self.signs / math.sqrt(self.dim))


class Dense(Rotation):
    """A rotation by its matrix, fp32 [D, D]."""

    def __init__(self, matrix: mx.array) -> None:
        self.dim = matrix.shape[0]
        self.matrix = matrix

    def forward(self, x: mx.array) -> mx.array:
        scaled = self.matrix * math.sqrt(self.dim)
        total = x[..., 0:1] * scaled[:, 0]
        for j in range(1, self.dim):  # left to right, so that no batch shape changes a bit
            total = total + x[..., j : j + 1] * scaled[:, j]
        return total

    def inverse(self, y: mx.array) -> mx.array:
        return y @ self.matrix


class Haar(Dense):
    """A dense rotation from the Haar measure; rounding float64 to fp32 hides what LAPACKs disagree on."""

    def __init__(self, dim: int, seed: int) -> None:
        gaussian = np.random.Generator(np.random.PCG64(seed)).standard_normal((dim, dim))
        q, r = np.linalg.qr(gaussian)
        super().__init__(mx.array((q * np.sign(np.diag(r))).astype(np.float32)))


ROTATIONS: dict[str, type[WalshHadamard] | type[Haar]] = {"wht": WalshHadamard, "haar": Haar}


@lru_cache(maxsize=1024)
def get_rotation(name: str, dim: int, seed: int) -> Rotation:
    if name not in ROTATIONS:
        raise ConfigError(f"rotation {name!r} is unknown; valid are {', '.join(ROTATIONS)}.")
    return ROTATIONS[name](dim, seed)


def rotate_exactly(x: mx.array, rotation: Rotation | None) -> mx.array:
    """Return R x of fp32 vectors [..., D], with additions in a fixed order."""
    return x if rotation is None else rotation.forward(x) / math.sqrt(rotation.dim)


def rotate(x: mx.array, rotation: Rotation | None) -> mx.array:
    """Return R x of a few vectors (queries), fp32 [..., D]; uses mlx's transform if H is Sylvester's."""
    if rotation is None:
        return x
    if isinstance(rotation, WalshHadamard) and rotation.order == 1:
        return mx.hadamard_transform(x * rotation.signs)
    return x @ rotation.matrix.swapaxes(-1, -2)


def rotate_back(y: mx.array, rotation: Rotation | None) -> mx.array:
    """Return R^T y of a few vectors (outputs), fp32 [..., D]."""
    if rotation is None:
        return y
    if isinstance(rotation, WalshHadamard) and rotation.order == 1:
        return mx.hadamard_transform(y) * rotation.signs
    return y @ rotation.matrix
