"""Formats `tcq4`, `tcq3` and `tcq2`, for measurements: tq's bits and scale, and paths through a trellis.

They show what trellis codes would lose, not how they would be stored: in memory a value's whole state is kept.
"""

import mlx.core as mx

from benchmarks.trellis.coder import Trellis
from benchmarks.trellis.sketches import paths
from mlx_tq.codec import Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.formats.base import FP16_MAX, rotation_for
from mlx_tq.codec.formats.turbo import LARGEST_RATIO

AROUND = 16  # values on either side of the cut, for the state at it


class TrellisCodec(Codec):
    """Paths of rotated vectors, and an unbiased scale."""

    def __init__(self, head_dim: int, trellis: Trellis, options: CodecOptions) -> None:
        super().__init__(head_dim, rotation_for(head_dim, options))
        self.trellis = trellis

    @property
    def words(self) -> int:
        """16-bit words per vector: a state for each value."""
        return self.head_dim

    @property
    def scale_dtype(self) -> mx.Dtype:
        """Type of the stored scale."""
        return mx.float16

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D]."""
        x = mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX)
        norm = mx.linalg.norm(x, axis=-1)
        y = self.rotation.forward(x)
        unit = (y * mx.where(norm > 0, 1.0 / norm, 0.0)[..., None]).reshape(-1, self.head_dim)
        path = paths(unit, self.trellis).reshape(x.shape)
        codeword = self.trellis.decode(path)
        product, energy = (y * codeword).sum(axis=-1), (codeword * codeword).sum(axis=-1)
        unbiased = mx.minimum(norm * (norm * self.head_dim / product), LARGEST_RATIO * product / energy)
        return Encoded(path, mx.minimum(mx.where(norm > 0, unbiased, 0.0), FP16_MAX).astype(mx.float16))

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The levels: one fp32 [..., D]."""
        return [self.trellis.decode(codes)]

    def gain(self, scale: mx.array) -> mx.array:
        """Stored scale [...] over sqrt(D): fp32 [...]."""
        return scale.astype(mx.float32) * self.head_dim**-0.5


class TrellisFormat(Format):
    """`bits` bits a value with a window of some width: `tcq3` has 9 bits (`tcq4` 8), `tcq3.6` has 6."""

    name = "tcq"

    def __init__(self, name: str, trellis: Trellis) -> None:
        self.name, self.bits, self.error = name, trellis.bits, 0.0  # type: ignore[misc]
        self.trellis = trellis

    @classmethod
    def variants(cls) -> list[Format]:
        """The widths of the issue, then smaller ones."""
        return [
            cls(f"tcq{bits}" + ("" if window == widest else f".{window}"), Trellis(bits, window, around=AROUND))
            for bits, widest in WIDEST.items()
            for window in range(widest, LEAST - 1, -1)
        ]

    def bytes_per_vector(self, head_dim: int) -> int:
        """As tq's."""
        return head_dim * int(self.bits) // 8 + 2

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; the scale rule is unbiased whatever `options` say."""
        return TrellisCodec(head_dim, self.trellis, options)


WIDEST = {4: 8, 3: 9, 2: 9}  # windows by bits
LEAST = 5
USEFUL = {4: 7, 3: 6, 2: 5}  # the least that takes a fifth off the error of the nearest level
