"""Random rotations that make every coordinate of a vector look like a Gaussian.

R x is what a codebook quantises, and <R k, R q> = <k, q> is why attention never needs the inverse per token. Seeds go
through NumPy's PCG64, so every platform gets the same rotation.

Sources: TurboQuant (arXiv 2504.19874) section 3; Ailon and Chazelle 2009 (signs, then Walsh-Hadamard); Mezzadri 2007
(Haar measure by QR with the signs of diag(R)).
"""

import math
from functools import cached_property, lru_cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_tq.codec.exact import ORDERS, hadamard, split_order
from mlx_tq.errors import ConfigError


class Rotation(Protocol):
    """An orthogonal map of the last axis."""

    dim: int

    def forward(self, x: mx.array) -> mx.array:
        """R x times sqrt(D), fp32 [..., D]: of unit variance where x is a unit vector."""
        ...

    def inverse(self, y: mx.array) -> mx.array:
        """R^T y, fp32 [..., D]."""
        ...

    @property
    def matrix(self) -> mx.array:
        """R, fp32 [D, D]."""
        ...


class WalshHadamard:
    """R = H diag(s) / sqrt(D), with one random sign vector s.

    D = m 2^k, m in {1, 12, 20, 28}. H is not symmetric for m = 20 and 28; there the inverse is a path of its own.
    The signs are those of the seed, or `signs` where a published format fixes them.
    """

    def __init__(self, dim: int, seed: int = 0, *, signs: list[float] | None = None) -> None:
        orders = split_order(dim)
        if orders is None:
            valid = f"m * 2^k with m in {set(ORDERS)}, such as 64, 80, 96, 112, 128, 192 or 256"
            raise ConfigError(f"head_dim {dim} has no Walsh-Hadamard transform; valid is {valid}. Use rotation='haar'.")
        self.dim = dim
        self.sylvester = orders[0] == 1
        flips = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, dim)
        self.signs = mx.array((1 - 2 * flips).astype(np.float32)) if signs is None else mx.array(signs)

    def forward(self, x: mx.array) -> mx.array:
        """H diag(s) x, fp32 [..., D]."""
        return hadamard(x * self.signs)

    def inverse(self, y: mx.array) -> mx.array:
        """diag(s) H^T y / sqrt(D), fp32 [..., D]."""
        return hadamard(y, transpose=True) * (self.signs / math.sqrt(self.dim))

    @cached_property
    def matrix(self) -> mx.array:
        """R, fp32 [D, D]."""
        return (self.forward(mx.eye(self.dim)) / math.sqrt(self.dim)).T


class Dense:
    """A rotation by its matrix, fp32 [D, D]."""

    def __init__(self, matrix: mx.array) -> None:
        self.dim = matrix.shape[0]
        self.matrix = matrix

    def forward(self, x: mx.array) -> mx.array:
        """R x times sqrt(D), fp32 [..., D]; summed over D left to right, so that no batch shape changes a bit."""
        scaled = self.matrix * math.sqrt(self.dim)
        total = x[..., 0:1] * scaled[:, 0]
        for j in range(1, self.dim):
            total = total + x[..., j : j + 1] * scaled[:, j]
        return total

    def inverse(self, y: mx.array) -> mx.array:
        """R^T y, fp32 [..., D]."""
        return y @ self.matrix


class Haar(Dense):
    """A dense rotation from the Haar measure: QR of a Gaussian matrix with Q sign(diag(R)).

    Computed in float64 and rounded to fp32, which hides what LAPACKs disagree on.
    """

    def __init__(self, dim: int, seed: int) -> None:
        gaussian = np.random.Generator(np.random.PCG64(seed)).standard_normal((dim, dim))
        q, r = np.linalg.qr(gaussian)
        super().__init__(mx.array((q * np.sign(np.diag(r))).astype(np.float32)))


class BlockRotation:
    """The same rotation of each run of `inner.dim` values."""

    def __init__(self, dim: int, inner: Rotation) -> None:
        self.dim = dim
        self.inner = inner

    def forward(self, x: mx.array) -> mx.array:
        """R x times sqrt(D), fp32 [..., D]."""
        blocks = self.inner.forward(x.reshape(*x.shape[:-1], -1, self.inner.dim))
        return blocks.reshape(x.shape) * math.sqrt(self.dim / self.inner.dim)

    def inverse(self, y: mx.array) -> mx.array:
        """R^T y, fp32 [..., D]."""
        return self.inner.inverse(y.reshape(*y.shape[:-1], -1, self.inner.dim)).reshape(y.shape)

    @cached_property
    def matrix(self) -> mx.array:
        """R, fp32 [D, D]."""
        return (self.forward(mx.eye(self.dim)) / math.sqrt(self.dim)).T


class GroupedRotation:
    """Dims put in an order, then cut into groups that have a rotation each.

    Args:
        parts: the rotations, whose sizes add up to D.
        order: integers [B, H, D], which dim comes where in each head, or None for all as they are.
    """

    def __init__(self, parts: list[Rotation], order: mx.array | None = None) -> None:
        self.dim = sum(part.dim for part in parts)
        self._parts = parts
        self._order = order
        self._back = None if order is None else mx.argsort(order, axis=-1)

    def arrange(self, x: mx.array) -> mx.array:
        """Dims in the order: x [..., D], or [B, Hq, n, D] with Hq a multiple of H."""
        return _take(x, self._order)

    def forward(self, x: mx.array) -> mx.array:
        """R x times sqrt(D), fp32, shapes as in `arrange`."""
        x = self.arrange(x)
        parts = [part.forward(run) * math.sqrt(self.dim / part.dim) for part, run in self._runs(x)]
        return mx.concatenate(parts, axis=-1)

    def inverse(self, y: mx.array) -> mx.array:
        """R^T y, fp32, shapes as in `arrange`."""
        return _take(mx.concatenate([part.inverse(run) for part, run in self._runs(y)], axis=-1), self._back)

    @cached_property
    def matrix(self) -> mx.array:
        """R, fp32 [D, D], or [B, H, D, D] where heads have their own order."""
        eye = mx.eye(self.dim)
        if self._order is not None:
            eye = mx.broadcast_to(eye, (*self._order.shape[:2], self.dim, self.dim))
        return (self.forward(eye) / math.sqrt(self.dim)).swapaxes(-1, -2)

    def _runs(self, x: mx.array) -> list[tuple[Rotation, mx.array]]:
        stops = [sum(part.dim for part in self._parts[: i + 1]) for i in range(len(self._parts))]
        return [(part, x[..., stop - part.dim : stop]) for part, stop in zip(self._parts, stops, strict=True)]


def _take(x: mx.array, order: mx.array | None) -> mx.array:
    """Dims in the order of each head; the Hq / H query heads of a KV head share its order."""
    if order is None:
        return x
    batch, heads, dim = order.shape
    grouped = x.reshape(batch, heads, -1, dim)
    return mx.take_along_axis(grouped, order[:, :, None], axis=-1).reshape(x.shape)


ROTATIONS: dict[str, type[WalshHadamard] | type[Haar]] = {"wht": WalshHadamard, "haar": Haar}


@lru_cache(maxsize=1024)
def get_rotation(name: str, dim: int, seed: int) -> Rotation:
    """The rotation of a name in ROTATIONS, made once for each size and seed.

    Raises:
        ConfigError: an unknown name, or a size that the rotation cannot take.
    """
    if name not in ROTATIONS:
        raise ConfigError(f"rotation {name!r} is unknown; valid are {', '.join(ROTATIONS)}.")
    return ROTATIONS[name](dim, seed)


def rotated(x: mx.array, rotation: Rotation | None) -> mx.array:
    """R x of a few vectors (queries), fp32 [..., D]: by mlx's own transform where H is Sylvester's."""
    if rotation is None:
        return x
    if isinstance(rotation, WalshHadamard) and rotation.sylvester:
        return mx.hadamard_transform(x * rotation.signs)
    return x @ rotation.matrix.swapaxes(-1, -2)


def rotated_back(y: mx.array, rotation: Rotation | None) -> mx.array:
    """R^T y of a few vectors (outputs), fp32 [..., D]: as `rotated`."""
    if rotation is None:
        return y
    if isinstance(rotation, WalshHadamard) and rotation.sylvester:
        return mx.hadamard_transform(y) * rotation.signs
    return y @ rotation.matrix
