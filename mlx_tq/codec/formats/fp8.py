"""`fp8`: 8-bit floating point, e4m3, without rotation or scale. The keys of vLLM's preset k8v4.

Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), E4M3: largest 448, no infinities.
"""

import mlx.core as mx

from mlx_tq.codec.formats.base import Codec, CodecOptions, Encoded, Format

_LARGEST = 448.0


class FP8Codec(Codec):
    """One byte a value; larger ones than 448 are clamped, and counted."""

    @property
    def words(self) -> int:
        """16-bit words per vector."""
        return self.head_dim // 2

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D]."""
        return Encoded(mx.to_fp8(mx.clip(x.astype(mx.float32), -_LARGEST, _LARGEST)).view(mx.uint16), None)

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The values: one fp32 [..., D]."""
        return [mx.from_fp8(codes.view(mx.uint8), mx.float32)]

    def clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """Whether a value was above 448, the largest of the format."""
        return peak > _LARGEST


class FP8(Format):
    """E4m3 numbers: 128 bytes at head_dim 128."""

    name = "fp8"
    bits = 8
    error = 7.05e-4

    def bytes_per_vector(self, head_dim: int) -> int:
        """The bytes of a vector: one a value."""
        return head_dim

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; it has no rotation and no scale, so `options` change nothing."""
        self.check(head_dim)
        return FP8Codec(head_dim, rotation=None)
