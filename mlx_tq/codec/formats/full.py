"""`fp16`: vectors kept in the model's own type. The baseline, and the choice where compression would hurt."""

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format


class FullCodec(Codec):
    """The bits of the model's type, as 16-bit words."""

    has_kernels = True

    def __init__(self, head_dim: int, dtype: mx.Dtype) -> None:
        super().__init__(head_dim, rotation=None)
        self.dtype = dtype

    @property
    def words(self) -> int:
        """16-bit words per vector."""
        return self.head_dim * self.dtype.size // 2

    def encode(self, x: mx.array) -> Encoded:
        """Take vectors [..., D] as they are, as 16-bit words; normalized ones, which are fp32, in the model's type."""
        if self.dtype == mx.float16 and x.dtype != mx.float16:
            x = mx.clip(x, -FP16_MAX, FP16_MAX)
        return Encoded(x.astype(self.dtype).view(mx.uint16), None)

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The vectors themselves: one fp32 [..., D]."""
        return [codes.view(self.dtype).astype(mx.float32)]

    def columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        """The vectors, transposed in their own type."""
        return [(slice(None), mx.contiguous(codes.view(self.dtype).swapaxes(-1, -2)).astype(mx.float32))]

    def clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """Finite values beyond fp16, which only normalized keys have."""
        beyond = mx.logical_and(peak > FP16_MAX, mx.isfinite(peak))
        return beyond if self.dtype == mx.float16 else mx.zeros(peak.shape, mx.bool_)


class Full(Format):
    """The model's own type: fp16, bf16 or fp32."""

    name = "fp16"
    bits = 16
    error = 0.0

    def bytes_per_vector(self, head_dim: int) -> int:
        """The bytes of a vector: two a value."""
        return 2 * head_dim

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; it has no rotation and no scale, so `options` change nothing."""
        self.check(head_dim)
        return FullCodec(head_dim, dtype)
