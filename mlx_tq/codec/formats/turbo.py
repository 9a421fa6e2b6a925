"""TurboQuant formats `tq4`, `tq3`, `tq2`: normalize, rotate, nearest level of a fixed codebook, one scale per vector.

Source: TurboQuant (Zandieh et al., arXiv 2504.19874) section 3, with polynomial levels (see `mlx_tq.codec.codebook`).
"""

import math
from functools import partial, reduce
from typing import Any

import mlx.core as mx

from mlx_tq.codec.codebook import POLYNOMIALS, boundaries
from mlx_tq.codec.formats.base import FP16_MAX, CodecOptions, Encoded, Format, RotatedCodec
from mlx_tq.codec.packing import pack, split_words, unpack
from mlx_tq.codec.rotation import pairwise_sum

# Limit of an unbiased scale, in scales of least squares. Gaussian vectors need 1.13 at 2 bits; one along a row of the
# rotation, which is never Gaussian, would need enough to double its norm.
LARGEST_RATIO = 1.3


def decode_level(code: mx.array, bits: int) -> mx.array:
    """Compute the level of a code by its polynomial: uint16 -> fp32, at most 2 ulp from `codebook.levels`."""
    u = code.astype(mx.float32) - (2**bits - 1) / 2
    square = u * u
    slope: Any = 0.0
    for coefficient in reversed(POLYNOMIALS[bits][1:]):
        slope = (slope + coefficient) * square
    return u * (slope + POLYNOMIALS[bits][0])  # type: ignore[no-any-return]


def _find_code(t: mx.array, bits: int) -> mx.array:
    """Count the boundaries below each value: fp32 -> uint16."""
    code: mx.array = reduce(mx.add, [(t > boundary).astype(mx.uint16) for boundary in boundaries(bits).tolist()])
    return code


def _unpack_levels(*words: mx.array, bits: int) -> list[mx.array]:
    return [decode_level(code, bits) for code in unpack(list(words), bits)]


# One pass over memory each. Compiling changes no code: comparisons and integer sums do not round.
find_code = {bits: mx.compile(partial(_find_code, bits=bits), shapeless=True) for bits in POLYNOMIALS}
_unpack = {bits: mx.compile(partial(_unpack_levels, bits=bits), shapeless=True) for bits in POLYNOMIALS}


class TurboCodec(RotatedCodec):
    """Stores codes of 1 to 4 bits against the levels of `codebook`."""

    def __init__(self, head_dim: int, bits: int, options: CodecOptions) -> None:
        super().__init__(head_dim, head_dim * bits // 16, options)
        self.bits = bits
        self.has_kernels = bits > 1
        self.rule = options.scale

    def encode(self, x: mx.array) -> Encoded:
        return self.encode_clipped(mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX))

    def encode_clipped(self, x: mx.array) -> Encoded:
        norm = mx.sqrt(pairwise_sum(x * x))
        y = self.rotation.forward(x)
        t = y * mx.where(norm > 0, 1.0 / norm, 0.0)[..., None]
        codes, codeword = self.quantize(t)
        return Encoded(codes, self.clamp_scale(self._scale(norm, y, codeword)))

    def quantize(self, t: mx.array) -> tuple[mx.array, mx.array]:
        """Return packed codes of vectors of unit variance [..., D], and the levels of these codes."""
        code = find_code[self.bits](t)
        return pack(code, self.bits), decode_level(code, self.bits)

    def dequantize(self, words: list[mx.array], axis: int = -1) -> list[mx.array]:
        """Return the levels of runs of words along `axis`: planes of fp32."""
        return list(_unpack[self.bits](*words))

    def _scale(self, norm: mx.array, y: mx.array, codeword: mx.array) -> mx.array:
        if self.rule == "raw":
            return norm
        energy = pairwise_sum(codeword * codeword)
        if self.rule == "matched":
            return norm * math.sqrt(self.head_dim) / mx.sqrt(energy)
        product = pairwise_sum(y * codeword)
        product = mx.where(product < 0, 0.0, product)  # of a trellis path; nearest levels agree in sign everywhere
        if self.rule == "ls":
            return product / energy
        unbiased = norm * (norm * self.head_dim / product)
        if self.bits > 1:  # 1 bit needs 1.57 of least squares whatever the vector
            unbiased = mx.minimum(unbiased, LARGEST_RATIO * (product / energy))
        return mx.where(norm > 0, unbiased, 0.0)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        return self.dequantize(split_words(codes, self.bits))

    def decode_columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        # Words are transposed before they are decoded: they are a fraction of the levels to copy.
        words = mx.contiguous(codes.swapaxes(-1, -2))
        planes = self.dequantize(split_words(words, self.bits, axis=-2), axis=-2)
        size = self.head_dim // len(planes)
        return [(slice(i * size, (i + 1) * size), plane) for i, plane in enumerate(planes)]

    def gain(self, scale: mx.array) -> mx.array:
        return scale.astype(mx.float32) * (1 / math.sqrt(self.head_dim))

    def estimate_norms(self, encoded: Encoded) -> mx.array:
        assert encoded.scale is not None  # noqa: S101 - tells the type checker: every vector has one
        return encoded.scale.astype(mx.float32)  # codewords differ in length by about the format's error


def _turbo_format(bits: int, error: float) -> Format:
    return Format(f"tq{bits}", bits, error, lambda head_dim, options, dtype: TurboCodec(head_dim, bits, options))


FORMATS = (_turbo_format(4, 0.00932), _turbo_format(3, 0.0339), _turbo_format(2, 0.116))
