"""`tq4`, `tq3`, `tq2`: TurboQuant. Normalise, rotate, nearest level of a fixed codebook, one scale a vector.

Source: TurboQuant (Zandieh et al., arXiv 2504.19874) section 3, with polynomial levels (see codebook).
"""

import math
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from mlx_tq.codec.codebook import POLYNOMIALS, boundaries
from mlx_tq.codec.exact import pairwise_sum
from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format, rotation_for
from mlx_tq.codec.packing import pack, split_words, unpack, words_per_vector
from mlx_tq.codec.rotation import Rotation

# An unbiased scale is at most this many times that of least squares. Gaussian vectors need 1.13 at 2 bits; what lies
# along a row of the rotation would need enough to double its norm.
LARGEST_RATIO = 1.3


def level(code: mx.array, bits: int) -> mx.array:
    """The level of a code, by its polynomial: uint16 -> fp32, at most 2 ulp from `codebook.levels`."""
    u = code.astype(mx.float32) - (2**bits - 1) / 2
    square = u * u
    first, *higher = POLYNOMIALS[bits]
    slope: Any = 0.0
    for coefficient in reversed(higher):
        slope = (slope + coefficient) * square
    found: mx.array = u * (slope + first)
    return found


def _code(t: mx.array, bits: int) -> mx.array:
    """The number of boundaries below each value: fp32 -> uint16."""
    code = mx.zeros_like(t).astype(mx.uint16)
    for boundary in boundaries(bits).tolist():
        code = code + (t > boundary)
    return code


def _levels(*words: mx.array, bits: int) -> list[mx.array]:
    return [level(code, bits) for code in unpack(list(words), bits)]


# One pass over memory each. Compiling changes no code: comparisons and integer sums do not round.
find_code = {bits: mx.compile(partial(_code, bits=bits), shapeless=True) for bits in POLYNOMIALS}
_find_levels = {bits: mx.compile(partial(_levels, bits=bits), shapeless=True) for bits in POLYNOMIALS}


class TurboCodec(Codec):
    """Codes of 1 to 4 bits against the levels of `codebook`."""

    def __init__(self, head_dim: int, bits: int, options: CodecOptions) -> None:
        self.rotation: Rotation = rotation_for(head_dim, options)
        super().__init__(head_dim, self.rotation)
        self.bits = bits
        self.has_kernels = bits > 1
        self.rule = options.scale
        self._wide = options.fp32_scales

    @property
    def words(self) -> int:
        """16-bit words of codes per vector."""
        return words_per_vector(self.head_dim, self.bits)

    @property
    def scale_dtype(self) -> mx.Dtype:
        """Type of the stored scale."""
        return mx.float32 if self._wide else mx.float16

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D]. A zero vector has scale 0 and decodes to zero."""
        x = mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX)
        norm = mx.sqrt(pairwise_sum(x * x))
        y = self.rotation.forward(x)
        t = y * mx.where(norm > 0, 1.0 / norm, 0.0)[..., None]
        codes, codeword = self._nearest(t)
        scale = mx.minimum(self._scale(norm, y, codeword), FP16_MAX)
        return Encoded(codes, scale.astype(self.scale_dtype))

    def _nearest(self, t: mx.array) -> tuple[mx.array, mx.array]:
        """Packed codes of vectors of unit variance [..., D], and the levels that these codes have."""
        code = find_code[self.bits](t)
        return pack(code, self.bits), level(code, self.bits)

    def _levels(self, words: list[mx.array], axis: int = -1) -> list[mx.array]:
        """The levels of runs of words along `axis`: planes of fp32."""
        return list(_find_levels[self.bits](*words))

    def _scale(self, norm: mx.array, y: mx.array, codeword: mx.array) -> mx.array:
        if self.rule == "raw":
            return norm
        energy = pairwise_sum(codeword * codeword)
        if self.rule == "matched":
            return norm * math.sqrt(self.head_dim) / mx.sqrt(energy)
        product = pairwise_sum(y * codeword)
        product = mx.where(product < 0, 0.0, product)  # nearest levels agree in sign everywhere, a path need not
        if self.rule == "ls":
            return product / energy
        unbiased = norm * (norm * self.head_dim / product)
        if self.bits > 1:  # 1 bit needs 1.57 of least squares whatever the vector
            unbiased = mx.minimum(unbiased, LARGEST_RATIO * (product / energy))
        return mx.where(norm > 0, unbiased, 0.0)

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The levels: 16 / bits planes (16 for 3 bits) of fp32 [..., D / planes]."""
        return self._levels(split_words(codes, self.bits))

    def columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        """As `planes`, from transposed words: these are a fraction of the levels to copy."""
        words = mx.contiguous(codes.swapaxes(-1, -2))
        levels = self._levels(split_words(words, self.bits, axis=-2), axis=-2)
        size = self.head_dim // len(levels)
        return [(slice(i * size, (i + 1) * size), level) for i, level in enumerate(levels)]

    def gain(self, scale: mx.array) -> mx.array:
        """Stored scale [...] over sqrt(D): fp32 [...]."""
        return scale.astype(mx.float32) * (1 / math.sqrt(self.head_dim))

    def norms(self, encoded: Encoded) -> mx.array:
        """The stored scales: codewords differ in length by about the format's error."""
        assert encoded.scale is not None  # noqa: S101 - tells the type checker: every vector has one
        return encoded.scale.astype(mx.float32)


class Turbo(Format):
    """Packed codes of `bits` bits and an fp16 scale.

    Attributes:
        codec_class: which codes these are.
    """

    bits: ClassVar[int]
    codec_class: ClassVar[type[TurboCodec]] = TurboCodec

    def bytes_per_vector(self, head_dim: int) -> int:
        """Packed codes and two bytes of scale."""
        return 2 * words_per_vector(head_dim, self.bits) + 2

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; the model's type does not matter."""
        self.check(head_dim)
        return self.codec_class(head_dim, self.bits, options)


class TQ4(Turbo):
    """4 bits: 66 bytes at head_dim 128."""

    name = "tq4"
    bits = 4
    error = 0.00932


class TQ3(Turbo):
    """3 bits: 50 bytes at head_dim 128."""

    name = "tq3"
    bits = 3
    error = 0.0339


class TQ2(Turbo):
    """2 bits: 34 bytes at head_dim 128."""

    name = "tq2"
    bits = 2
    error = 0.116
