"""`q8`: rotated, then int8 with one scale a vector. The safe choice for keys."""

import math
from functools import partial

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format, rotation_for
from mlx_tq.codec.rotation import Rotation

_LIMIT = 127.0
# Below this the factor 127 / amax would overflow; such a vector is stored as zero.
_TINY = 2.0**-110


@partial(mx.compile, shapeless=True)
def _bytes(words: mx.array) -> list[mx.array]:
    """The four bytes of int32 words as signed numbers, lowest first: fp32."""
    return [((words << shift) >> 24).astype(mx.float32) for shift in (24, 16, 8, 0)]


class Q8Codec(Codec):
    """Symmetric int8 of the rotated vector in steps of amax / 127.

    The stored scale is amax, not the step, so that small vectors stay clear of fp16's subnormals.
    """

    has_kernels = True

    def __init__(self, head_dim: int, options: CodecOptions) -> None:
        self.rotation: Rotation = rotation_for(head_dim, options)
        super().__init__(head_dim, self.rotation)
        self._wide = options.fp32_scales

    @property
    def words(self) -> int:
        """16-bit words of codes per vector."""
        return self.head_dim // 2

    @property
    def scale_dtype(self) -> mx.Dtype:
        """Type of the stored scale."""
        return mx.float32 if self._wide else mx.float16

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D]. A zero vector has scale 0 and decodes to zero."""
        y = self.rotation.forward(mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX))
        peak = mx.abs(y).max(axis=-1)
        factor = mx.where(peak > _TINY, _LIMIT / peak, 0.0)
        codes = mx.round(y * factor[..., None]).astype(mx.int8)
        scale = mx.minimum(peak / math.sqrt(self.head_dim), FP16_MAX)
        return Encoded(codes.view(mx.uint16), scale.astype(self.scale_dtype))

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The codes as numbers: one fp32 [..., D]."""
        return [codes.view(mx.int8).astype(mx.float32)]

    def columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        """Every fourth dim: one byte of each transposed 32-bit word, which is the least to copy."""
        words = mx.contiguous(codes.view(mx.int32).swapaxes(-1, -2))
        return [(slice(byte, None, 4), column) for byte, column in enumerate(_bytes(words))]

    def gain(self, scale: mx.array) -> mx.array:
        """Stored amax [...] over 127: fp32 [...]."""
        return scale.astype(mx.float32) * (1 / _LIMIT)


class Q8(Format):
    """8-bit integers and an fp16 scale."""

    name = "q8"
    bits = 8
    error = 4.18e-5

    def bytes_per_vector(self, head_dim: int) -> int:
        """One byte a value and two of scale."""
        return head_dim + 2

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; the model's type does not matter."""
        self.check(head_dim)
        return Q8Codec(head_dim, options)
