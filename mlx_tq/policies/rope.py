"""The dims that a model's RoPE rotates, learned by running it, so that no variant is known by name."""

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.errors import UnsupportedModelError

OFFSETS = tuple(1 << i for i in range(17))  # distances of later queries behind the last token
_PROBED_OFFSETS = (65536, 100003)  # every rotated pair has moved at one of them at least
_FAR = 1 << 20
_DISTANCE = 1000
_TOLERANCE = 0.05  # relative to norms: above fp32's error of angles at _FAR, far below the effect of other frequencies
_FINGERPRINT_OFFSETS = (1, 64, 4096)


@dataclass(frozen=True, eq=False)
class Rope:
    """A layer's RoPE module, called as `module(x, offset=...)` with x [B, H, L, D], and what it does to which dims."""

    module: Any
    pairs: mx.array  # dims that rotate together, int32 [2, F]
    gain: mx.array  # growth of each pair's norm (YaRN's mscale), fp32 [F]
    unrotated: mx.array  # dims that it leaves alone, int32 [D - 2 F]
    is_fused: bool = False  # the model applies RoPE inside a fused kernel and never calls the module

    def __deepcopy__(self, memo: object) -> "Rope":
        return self

    def rotate(self, x: mx.array, offset: int) -> mx.array:
        """Return vectors [..., D], all of them at position `offset`, after RoPE."""
        flat = x.reshape(1, -1, 1, x.shape[-1])
        return self.module(flat, offset=offset).reshape(x.shape)  # type: ignore[no-any-return]

    def unrotate(self, x: mx.array, start: int) -> mx.array:
        """Return vectors [B, H, L, D], which have the positions from `start` on, as they were before RoPE: fp32."""
        (first, second), x = self.pairs, x.astype(mx.float32)
        probe = mx.zeros(self.dim)
        probe[first] = 1 / self.gain
        turned = self.module(mx.broadcast_to(probe, (1, 1, x.shape[2], self.dim)), offset=start)
        cosine, sine = turned[..., first], turned[..., second]
        before = mx.array(x)
        before[..., first] = (cosine * x[..., first] + sine * x[..., second]) / self.gain
        before[..., second] = (cosine * x[..., second] - sine * x[..., first]) / self.gain
        return before

    @property
    def dim(self) -> int:
        return 2 * self.gain.size + self.unrotated.size

    @cached_property
    def _mean_rotation(self) -> tuple[mx.array, mx.array]:
        """Cosine and sine of each pair, averaged over OFFSETS, without the gain: fp32 [F]."""
        probe = mx.zeros(self.dim)
        probe[self.pairs[0]] = 1 / self.gain
        mean = reduce(mx.add, (self.rotate(probe, offset) for offset in OFFSETS)) / len(OFFSETS)
        return mean[self.pairs[0]], mean[self.pairs[1]]

    def mean_rotated(self, x: mx.array, last: int) -> mx.array:
        """Return the mean of vectors [..., D] rotated to the positions `last` + OFFSETS."""
        rotated = mx.array(x)
        if self.pairs.size:
            (first, second), (cosine, sine) = self.pairs, self._mean_rotation
            rotated[..., first] = cosine * x[..., first] - sine * x[..., second]
            rotated[..., second] = sine * x[..., first] + cosine * x[..., second]
        return self.rotate(rotated, last)

    def pair_norms(self, x: mx.array) -> mx.array:
        """Return the norm of each pair of vectors [..., D]: [..., F]."""
        return mx.sqrt(mx.square(x[..., self.pairs[0]]) + mx.square(x[..., self.pairs[1]]))

    def fingerprint(self) -> mx.array:
        """Return three rotated vectors that differ between RoPEs: fp32 [3, D]."""
        probe = mx.array(_probe(self.dim, seed=1))
        return mx.stack([self.rotate(probe, offset) for offset in _FINGERPRINT_OFFSETS])


def learn_rope(module: Any, dim: int) -> Rope:
    """Return the pairs of a RoPE module of head size `dim`; raise UnsupportedModelError if its frequencies change."""
    rope = find_pairs(module, dim)
    a, b = (mx.array(_probe(dim, seed)) for seed in (2, 3))
    near, far = ((rope.rotate(a, start + _DISTANCE) * rope.rotate(b, start)).sum().item() for start in (0, _FAR))
    if abs(near - far) > _TOLERANCE * float(mx.linalg.norm(a) * mx.linalg.norm(b)):
        raise UnsupportedModelError(
            f"{type(module).__name__} changes its frequencies with the position (dynamic NTK): keys of a cache then "
            "have no common frame in which they could be scored. Use another policy, such as knorm."
        )
    return rope


def find_pairs(module: Any, dim: int) -> Rope:
    """Return the pairs of a RoPE module of head size `dim`; raise UnsupportedModelError if it rotates no pairs."""
    rope = Rope(module, mx.zeros((2, 0), mx.int32), mx.zeros(0), mx.arange(dim))
    rotated = [np.abs(np.array(rope.rotate(mx.eye(dim), offset))) for offset in _PROBED_OFFSETS]
    off_diagonal = np.maximum(*rotated) * (1 - np.eye(dim))
    partner = np.where(off_diagonal.max(axis=1) > 1e-6, off_diagonal.argmax(axis=1), -1)
    first = np.flatnonzero(partner > np.arange(dim))
    second = partner[first]
    mixed = off_diagonal.copy()
    mixed[first, second] = mixed[second, first] = 0
    if mixed.max() > 1e-6:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not rotate dims in pairs, so its keys cannot be scored. Use another policy, "
            "such as knorm."
        )
    gain = np.sqrt(rotated[0][first, first] ** 2 + rotated[0][first, second] ** 2)
    unrotated = np.flatnonzero(partner < 0)
    return Rope(module, mx.array(np.stack([first, second]), mx.int32), mx.array(gain), mx.array(unrotated, mx.int32))


def _probe(dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
