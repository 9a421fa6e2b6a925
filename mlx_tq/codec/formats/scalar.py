"""Formats that store each value by itself: `fp16` (the model's own type) and `q8` (rotated, then int8)."""

import math
from functools import partial

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, TINY, Codec, CodecOptions, Encoded, Format, RotatedCodec

_INT8_MAX = 127.0


class FullCodec(Codec):
    """Stores vectors in the model's own type."""

    has_kernels = True

    def __init__(self, head_dim: int, dtype: mx.Dtype) -> None:
        super().__init__(head_dim, head_dim * dtype.size // 2)
        self.dtype = dtype

    def encode(self, x: mx.array) -> Encoded:
        if self.dtype == mx.float16 and x.dtype != mx.float16:  # normalized keys are fp32
            x = mx.clip(x, -FP16_MAX, FP16_MAX)
        return Encoded(x.astype(self.dtype).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        return [codes.view(self.dtype).astype(mx.float32)]

    def decode_columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        return [(slice(None), mx.contiguous(codes.view(self.dtype).swapaxes(-1, -2)).astype(mx.float32))]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        if self.dtype != mx.float16:
            return mx.zeros(peak.shape, mx.bool_)
        return mx.logical_and(peak > FP16_MAX, mx.isfinite(peak))


@partial(mx.compile, shapeless=True)
def _unpack_bytes(words: mx.array) -> list[mx.array]:
    """Return the four bytes of int32 words as signed numbers, lowest first: fp32."""
    return [((words << shift) >> 24).astype(mx.float32) for shift in (24, 16, 8, 0)]


class Q8Codec(RotatedCodec):
    """Stores the rotated vector as symmetric int8 in steps of amax / 127.

    The stored scale is amax / sqrt(D), not the step, so that small vectors stay clear of fp16's subnormals.
    """

    has_kernels = True

    def __init__(self, head_dim: int, options: CodecOptions) -> None:
        super().__init__(head_dim, head_dim // 2, options)

    def encode(self, x: mx.array) -> Encoded:
        y = self.rotation.forward(mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX))
        peak = mx.abs(y).max(axis=-1)
        factor = mx.where(peak > TINY, _INT8_MAX / peak, 0.0)
        codes = mx.round(y * factor[..., None]).astype(mx.int8)
        return Encoded(codes.view(mx.uint16), self.clamp_scale(peak / math.sqrt(self.head_dim)))

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        return [codes.view(mx.int8).astype(mx.float32)]

    def decode_columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        # Transposing 32-bit words copies the least; each of their bytes is every fourth dim.
        words = mx.contiguous(codes.view(mx.int32).swapaxes(-1, -2))
        return [(slice(byte, None, 4), column) for byte, column in enumerate(_unpack_bytes(words))]

    def gain(self, scale: mx.array) -> mx.array:
        return scale.astype(mx.float32) * (1 / _INT8_MAX)


FORMATS = (
    Format("fp16", bits=16, error=0.0, make_codec=lambda head_dim, options, dtype: FullCodec(head_dim, dtype)),
    Format("q8", bits=8, error=4.18e-5, make_codec=lambda head_dim, options, dtype: Q8Codec(head_dim, options)),
)
