"""`tq35`, `tq25`: TurboQuant with more bits for the dims of high energy, and a bit each for what is left (QJL).

A head's dims are ordered by their energy in the first tokens of the conversation. The first group and the rest are
rotated and quantised apart; then the residual r of each is stored as sign(S r) and a norm, from which
sqrt(pi / 2) / d * norm * S^T sign(S r) is an unbiased estimate of r: so inner products with any query are unbiased.

S is sqrt(d) times a Haar rotation, and the norm is that of r times the factor that makes the estimate's inner product
with r exact. With one Walsh-Hadamard round and the bare norm the bias is 0.1 standard deviations at d = 64, for r is
far from Gaussian; with these two it is below 0.01.

Sources: TurboQuant (Zandieh et al., arXiv 2504.19874) sections 3.2 (QJL) and 4.3 (outlier channels); QJL (arXiv
2406.03482).
"""

import math
from typing import ClassVar, NamedTuple

import mlx.core as mx

from mlx_tq.codec.exact import pairwise_sum, split_order
from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format, rotation_for
from mlx_tq.codec.formats.block import TINY
from mlx_tq.codec.formats.turbo import find_code, level
from mlx_tq.codec.packing import pack, split_words, unpack, words_per_vector
from mlx_tq.codec.rotation import GroupedRotation, Rotation, get_rotation
from mlx_tq.errors import ConfigError

# Added to a rotation's seed for the sketch S of its residual.
_SKETCH = 500
_NORMS = 2  # of a group: the vector's and the residual's


class _Group(NamedTuple):
    """Dims that share a rotation and a width. sketch: S / sqrt(d)."""

    dim: int
    bits: int
    rotation: Rotation
    sketch: Rotation

    @property
    def words(self) -> int:
        """16-bit words of codes and signs."""
        return words_per_vector(self.dim, self.bits) + words_per_vector(self.dim, 1)


class GroupedCodec(Codec):
    """Codes and signs of each group, then the four norms.

    Attributes:
        order: which dim comes where, those of high energy first, uint16 [B, H, D]; None before `fit`.
    """

    def __init__(self, head_dim: int, groups: list[_Group], order: mx.array | None = None) -> None:
        self.order = order
        self._groups = groups
        self._grouped = GroupedRotation([group.rotation for group in groups], order)
        super().__init__(head_dim, self._grouped)

    @property
    def words(self) -> int:
        """16-bit words per vector."""
        return sum(group.words + _NORMS for group in self._groups)

    @property
    def learned(self) -> mx.array | None:
        """The order of dims that `fit` found, or None."""
        return self.order

    @property
    def learned_bytes(self) -> int:
        """Bytes of `order` for each head."""
        return 2 * self.head_dim

    def fit(self, x: mx.array) -> "GroupedCodec":
        """Order the dims of each head by their share of the energy of x [B, H, n, D], every vector counting alike."""
        squares = mx.square(x.astype(mx.float32))
        energy = (squares / mx.maximum(squares.sum(axis=-1, keepdims=True), TINY)).sum(axis=2)
        return self.restore(mx.argsort(-energy, axis=-1).astype(mx.uint16))

    def restore(self, learned: mx.array) -> "GroupedCodec":
        """The codec with an order of dims that another one learned."""
        return GroupedCodec(self.head_dim, self._groups, learned)

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [B, H, n, D], or of any leading dims before `fit`."""
        x = self._grouped.arrange(mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX))
        words, norms, start = [], [], 0
        for group in self._groups:
            part = x[..., start : start + group.dim]
            start += group.dim
            norm = mx.sqrt(pairwise_sum(part * part))
            y = group.rotation.forward(part)
            code = find_code[group.bits](y * mx.where(norm > 0, 1.0 / norm, 0.0)[..., None])
            stored = mx.minimum(norm, FP16_MAX).astype(mx.float16)
            residual = (y - level(code, group.bits) * stored.astype(mx.float32)[..., None]) / math.sqrt(group.dim)
            sketched = group.sketch.forward(residual)
            size = pairwise_sum(mx.abs(sketched))
            gain = mx.where(size > 0, pairwise_sum(residual * residual) * group.dim / size, 0.0)
            words += [pack(code, group.bits), pack(sketched >= 0, 1)]
            norms += [stored, mx.minimum(gain * math.sqrt(2 / math.pi), FP16_MAX).astype(mx.float16)]
        return Encoded(mx.concatenate([*words, mx.stack(norms, axis=-1).view(mx.uint16)], axis=-1), None)

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The groups side by side, codeword and residual together: one fp32 [..., D]."""
        parts, start = [], 0
        norms = self._norms(codes).astype(mx.float32)
        for i, group in enumerate(self._groups):
            middle, stop = start + words_per_vector(group.dim, group.bits), start + group.words
            code = mx.concatenate(unpack(split_words(codes[..., start:middle], group.bits), group.bits), axis=-1)
            bit = mx.concatenate(unpack([codes[..., middle:stop]], 1), axis=-1).astype(mx.float32)
            sketch = group.sketch.inverse(2 * bit - 1) * math.sqrt(math.pi / 2)
            gain, residual = norms[..., _NORMS * i, None], norms[..., _NORMS * i + 1, None]
            parts.append((level(code, group.bits) * gain + sketch * residual) / math.sqrt(group.dim))
            start = stop
        return [mx.concatenate(parts, axis=-1)]

    def clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """A value or a norm beyond fp16's range."""
        return mx.logical_or(peak > FP16_MAX, (self._norms(encoded.codes) >= FP16_MAX).any(axis=-1))

    def _norms(self, codes: mx.array) -> mx.array:
        return codes[..., -_NORMS * len(self._groups) :].view(mx.float16)


class Grouped(Format):
    """Two groups of dims; every code has its sign bit besides."""

    split: ClassVar[tuple[tuple[int, int], ...]]  # of each group: share of the dims in quarters, bits of a code

    def bytes_per_vector(self, head_dim: int) -> int:
        """Codes, signs and two norms of each group."""
        sizes = [(head_dim * quarters // 4, bits) for quarters, bits in self.split]
        return sum(dim * (bits + 1) // 8 + 2 * _NORMS for dim, bits in sizes)

    def check(self, head_dim: int) -> None:
        """Raise ConfigError where a group has no transform or no whole words."""
        sizes = [head_dim * quarters // 4 for quarters, _ in self.split]
        if head_dim <= 0 or head_dim % 64 or any(split_order(size) is None for size in sizes):
            raise ConfigError(
                f"head_dim {head_dim} cannot be stored as {self.name}, whose groups are {self.split[0][0]} and "
                f"{self.split[1][0]} quarters of it; valid are 64, 128, 256 and 512. Use tq3 or tq2 for this model."
            )

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec, with the dims in their own order until it is fitted. The scale rule changes nothing."""
        self.check(head_dim)
        groups = []
        for quarters, bits in self.split:
            dim = head_dim * quarters // 4
            sketch = get_rotation("haar", dim, options.seed + _SKETCH)
            groups.append(_Group(dim, bits, rotation_for(dim, options), sketch))
        return GroupedCodec(head_dim, groups)


class TQ35(Grouped):
    """3 + 1 bits for half of the dims, 2 + 1 for the others: 64 bytes at head_dim 128."""

    name = "tq35"
    bits = 3.5
    error = 0.0417
    split = ((2, 3), (2, 2))


class TQ25(Grouped):
    """2 + 1 bits for a quarter of the dims, 1 + 1 for the others: 44 bytes at head_dim 128."""

    name = "tq25"
    bits = 2.25
    error = 0.168
    split = ((1, 2), (3, 1))
