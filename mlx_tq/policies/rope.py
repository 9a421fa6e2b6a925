"""What a model's RoPE does to which dims, learned by running it: no variant is known by name."""

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.errors import UnsupportedModelError

_OFFSETS = (65536, 100003)  # far enough that every rotated pair has turned, at one of them at least
_FAR = 1 << 20
_DISTANCE = 1000
_SAME = 0.05  # of the norms: above fp32's error of angles at _FAR, far below the effect of other frequencies
_FINGERPRINT = (1, 64, 4096)


@dataclass(frozen=True, eq=False)
class Rope:
    """A RoPE module of a layer.

    Attributes:
        module: called as `module(x, offset=...)` with x [B, H, L, D].
        pairs: the dims that turn together, int32 [2, F].
        gain: by which a pair's length grows (YaRN's mscale), fp32 [F].
        free: the dims that it leaves alone, int32 [D - 2 F].
    """

    module: Any
    pairs: mx.array
    gain: mx.array
    free: mx.array
    _mean_turns: dict[tuple[int, ...], mx.array] = field(default_factory=dict, init=False, repr=False)

    def __deepcopy__(self, memo: object) -> "Rope":
        return self

    def turn(self, x: mx.array, offset: int) -> mx.array:
        """Vectors [..., D], all at position `offset`."""
        flat = x.reshape(1, -1, 1, x.shape[-1])
        return self.module(flat, offset=offset).reshape(x.shape)  # type: ignore[no-any-return]

    def ahead(self, x: mx.array, offsets: tuple[int, ...]) -> mx.array:
        """The mean of vectors [..., D] turned by each of `offsets`, without the gain.

        One that turns is a rotation of each pair, so their mean is one matrix, which is asked of the module once.
        """
        if not self.pairs.size:
            return x
        first, second = self.pairs
        if offsets not in self._mean_turns:
            probe = mx.zeros(x.shape[-1])
            probe[first] = 1 / self.gain
            mean = reduce(mx.add, (self.turn(probe, offset) for offset in offsets)) / len(offsets)
            self._mean_turns[offsets] = mx.stack([mean[first], mean[second]])
        cosine, sine = self._mean_turns[offsets]
        turned = mx.array(x)
        turned[..., first] = cosine * x[..., first] - sine * x[..., second]
        turned[..., second] = sine * x[..., first] + cosine * x[..., second]
        return turned

    def lengths(self, x: mx.array) -> mx.array:
        """The length of each pair of vectors [..., D]: [..., F]."""
        return mx.sqrt(mx.square(x[..., self.pairs[0]]) + mx.square(x[..., self.pairs[1]]))

    def fingerprint(self, dim: int) -> mx.array:
        """Three turned vectors that differ between RoPEs: fp32 [3, D]."""
        probe = mx.array(_probe(dim, seed=1))
        return mx.stack([self.turn(probe, offset) for offset in _FINGERPRINT])


def learn_rope(module: Any, dim: int) -> Rope:
    """Find the pairs of a RoPE module of head size `dim`, whose scores can be told from distances.

    Raises:
        UnsupportedModelError: its angles depend on more than the distance of two tokens (dynamic NTK), or as of
            `find_pairs`.
    """
    rope = find_pairs(module, dim)
    _check_steady(rope, dim, type(module).__name__)
    return rope


def find_pairs(module: Any, dim: int) -> Rope:
    """The pairs of a RoPE module of head size `dim`, whatever its angles depend on.

    Raises:
        UnsupportedModelError: it mixes dims otherwise than in pairs.
    """
    name = type(module).__name__
    rope = Rope(module, mx.zeros((2, 0), mx.int32), mx.zeros(0), mx.arange(dim))
    turned = [np.abs(np.array(rope.turn(mx.eye(dim), offset))) for offset in _OFFSETS]
    off_diagonal = np.maximum(*turned) * (1 - np.eye(dim))
    partner = np.where(off_diagonal.max(axis=1) > 1e-6, off_diagonal.argmax(axis=1), -1)
    first = np.flatnonzero(partner > np.arange(dim))
    second = partner[first]
    mixed = off_diagonal.copy()
    mixed[first, second] = mixed[second, first] = 0
    if mixed.max() > 1e-6:
        raise UnsupportedModelError(f"{name} turns dims otherwise than in pairs, which cannot be scored.")
    gain = np.sqrt(turned[0][first, first] ** 2 + turned[0][first, second] ** 2)
    free = np.flatnonzero(partner < 0)
    return Rope(module, mx.array(np.stack([first, second]), mx.int32), mx.array(gain), mx.array(free, mx.int32))


def _check_steady(rope: Rope, dim: int, name: str) -> None:
    a, b = (mx.array(_probe(dim, seed)) for seed in (2, 3))
    near, far = ((rope.turn(a, start + _DISTANCE) * rope.turn(b, start)).sum().item() for start in (0, _FAR))
    if abs(near - far) > _SAME * float(mx.linalg.norm(a) * mx.linalg.norm(b)):
        raise UnsupportedModelError(
            f"{name} changes its frequencies with the position (dynamic NTK): keys of a cache then have no common "
            "frame in which they could be scored. Use another policy, such as knorm."
        )


def _probe(dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
