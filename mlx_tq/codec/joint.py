"""Reads rows of latents and the rotated parts of keys as vectors of both, which queries score at once."""

from functools import cached_property

import mlx.core as mx

from mlx_tq.codec.formats.base import Codec, Encoded
from mlx_tq.codec.rotation import Rotation
from mlx_tq.codec.rows import RowLayout


class JointRotation(Rotation):
    """Rotates the first dims of a vector by one rotation and the others by another."""

    def __init__(self, first: Codec, second: Codec) -> None:
        self.dim = first.head_dim + second.head_dim
        self._parts = first.rotation, second.rotation
        self._edge = first.head_dim

    def forward(self, x: mx.array) -> mx.array:
        scaled: mx.array = x @ self.matrix.swapaxes(-1, -2) * self.dim**0.5
        return scaled

    def inverse(self, y: mx.array) -> mx.array:
        return y @ self.matrix

    @cached_property
    def matrix(self) -> mx.array:
        sizes = self._edge, self.dim - self._edge
        first, second = (
            mx.eye(size) if part is None else part.matrix for part, size in zip(self._parts, sizes, strict=True)
        )
        return mx.concatenate([mx.pad(first, [(0, 0), (0, sizes[1])]), mx.pad(second, [(0, 0), (sizes[0], 0)])])


class JointCodec(Codec):
    """Decodes whole rows of a layout: keys, followed by values."""

    rotation: Rotation

    def __init__(self, stored: RowLayout) -> None:
        rotation = JointRotation(stored.key, stored.value)
        super().__init__(rotation.dim, 2 * stored.words, rotation)
        self._stored = stored

    def encode(self, x: mx.array) -> Encoded:
        keys, values = mx.split(x, [self._stored.key.head_dim], axis=-1)
        return Encoded(self._stored.encode(keys, values).rows.view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        rows, stored = codes.view(mx.uint32), self._stored
        return [stored.key.decode_rotated(stored.keys(rows)), stored.value.decode_rotated(stored.values(rows))]


class JointLayout(RowLayout):
    """Reads the rows of another layout as keys without values."""

    def __init__(self, stored: RowLayout) -> None:
        self.key = self.value = JointCodec(stored)
        self.unfitted = self
        self.words, self.nbytes, self.learned_bytes = stored.words, stored.nbytes, stored.learned_bytes
        self.split_sizes = 2 * stored.words, 0

    def keys(self, rows: mx.array) -> Encoded:
        return Encoded(rows.view(mx.uint16), None)

    def split(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        words = rows.view(mx.uint16)
        return words, words[..., :0]

    def unsplit(self, keys: mx.array, values: mx.array) -> mx.array:
        return keys.view(mx.uint32)

    def split_keys(self, words: mx.array) -> Encoded:
        return Encoded(words, None)
