"""Rotates groups of dims apart, after each head's dims are put in an order of their own."""

import math
from functools import cached_property
from itertools import accumulate

import mlx.core as mx

from mlx_tq.codec.rotation import Rotation


def rotation_of_one_group(rotation: Rotation | None) -> Rotation | None:
    """Return what rotates each group of dims, or a rotation of all dims itself; groups of one codec are alike."""
    return rotation.parts[0] if isinstance(rotation, GroupedRotation) else rotation


class GroupedRotation(Rotation):
    """Puts dims in the order [B, H, D] of each head, then rotates groups of them by `parts`."""

    def __init__(self, parts: list[Rotation], order: mx.array | None = None) -> None:
        self.parts = parts
        self._stops = list(accumulate(part.dim for part in parts))
        self.dim = self._stops[-1]
        self._order = order
        self._inverse_order = None if order is None else mx.argsort(order, axis=-1)

    def arrange(self, x: mx.array) -> mx.array:
        """Put dims in the order: x [..., D], or [B, Hq, n, D] with Hq a multiple of H."""
        return _reorder(x, self._order)

    def split(self, x: mx.array) -> list[mx.array]:
        return list(mx.split(x, self._stops[:-1], axis=-1))

    def forward(self, x: mx.array) -> mx.array:
        runs = zip(self.parts, self.split(self.arrange(x)), strict=True)
        return mx.concatenate([part.forward(run) * math.sqrt(self.dim / part.dim) for part, run in runs], axis=-1)

    def inverse(self, y: mx.array) -> mx.array:
        runs = zip(self.parts, self.split(y), strict=True)
        return _reorder(mx.concatenate([part.inverse(run) for part, run in runs], axis=-1), self._inverse_order)

    @cached_property
    def matrix(self) -> mx.array:
        """R, fp32 [D, D], or [B, H, D, D] if heads have their own order."""
        eye = mx.eye(self.dim)
        if self._order is not None:
            eye = mx.broadcast_to(eye, (*self._order.shape[:2], self.dim, self.dim))
        return (self.forward(eye) / math.sqrt(self.dim)).swapaxes(-1, -2)


def _reorder(x: mx.array, order: mx.array | None) -> mx.array:
    """Put dims in the order of each head; the Hq / H query heads of a KV head share its order."""
    if order is None:
        return x
    batch, heads, dim = order.shape
    grouped = x.reshape(batch, heads, -1, dim)
    return mx.take_along_axis(grouped, order[:, :, None], axis=-1).reshape(x.shape)
