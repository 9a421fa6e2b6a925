"""Formats `tq35`, `tq25`: TurboQuant with more bits for dims of high energy, and a sign per dim of the residual (QJL).

A head's dims are ordered by their energy in its first tokens. The first group and the rest are rotated and quantized
apart. The residual r of each is stored as sign(S r) and a norm: sqrt(pi / 2) / d * norm * S^T sign(S r) is an unbiased
estimate of r, so inner products with any query are unbiased.

S is sqrt(d) times a Haar rotation, and the norm makes the estimate's inner product with r exact: a Walsh-Hadamard
rotation and the bare norm of r would leave a bias of 0.1 standard deviations at d = 64, for r is far from Gaussian.

Sources: TurboQuant (Zandieh et al., arXiv 2504.19874) sections 3.2 (QJL) and 4.3 (outlier channels); QJL (arXiv
2406.03482).
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, TINY, Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.formats.turbo import decode_level, find_code
from mlx_tq.codec.grouped_rotation import GroupedRotation
from mlx_tq.codec.packing import pack, split_words, unpack
from mlx_tq.codec.rotation import Rotation, get_rotation, pairwise_sum, split_order
from mlx_tq.errors import ConfigError

_SKETCH_SEED = 500  # added to a rotation's seed for the sketch S of its residual


@dataclass(frozen=True)
class _Group:
    dim: int
    bits: int
    rotation: Rotation
    sketch: Rotation  # S / sqrt(d)

    def encode(self, x: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        """Return the words of codes and signs, and the norms of vector and residual."""
        norm = mx.sqrt(pairwise_sum(x * x))
        y = self.rotation.forward(x)
        code = find_code[self.bits](y * mx.where(norm > 0, 1.0 / norm, 0.0)[..., None])
        stored = mx.minimum(norm, FP16_MAX).astype(mx.float16)
        residual = (y - decode_level(code, self.bits) * stored.astype(mx.float32)[..., None]) / math.sqrt(self.dim)
        sketched = self.sketch.forward(residual)
        size = pairwise_sum(mx.abs(sketched))
        gain = mx.where(size > 0, pairwise_sum(residual * residual) * self.dim / size, 0.0)
        residual_norm = mx.minimum(gain * math.sqrt(2 / math.pi), FP16_MAX).astype(mx.float16)
        return [pack(code, self.bits), pack(sketched >= 0, 1)], [stored, residual_norm]

    def decode(self, words: mx.array, norms: mx.array) -> mx.array:
        """Return codeword and residual together: fp32 [..., d] in rotated space."""
        middle = self.dim * self.bits // 16
        code = mx.concatenate(unpack(split_words(words[..., :middle], self.bits), self.bits), axis=-1)
        bit = mx.concatenate(unpack([words[..., middle:]], 1), axis=-1).astype(mx.float32)
        sketch = self.sketch.inverse(2 * bit - 1) * math.sqrt(math.pi / 2)
        gain, residual = norms[..., 0, None], norms[..., 1, None]
        return (decode_level(code, self.bits) * gain + sketch * residual) / math.sqrt(self.dim)


class GroupedCodec(Codec):
    """Stores codes and signs of each group, then all norms. `learned` is the order of dims, uint16 [B, H, D]."""

    def __init__(self, head_dim: int, groups: list[_Group], order: mx.array | None = None) -> None:
        self.learned = order
        self.learned_bytes = 2 * head_dim
        self._groups = groups
        self._grouped = GroupedRotation([group.rotation for group in groups], order)
        self._stops = list(accumulate(group.dim * (group.bits + 1) // 16 for group in groups))
        super().__init__(head_dim, self._stops[-1] + 2 * len(groups), self._grouped)  # norms of vector and residual

    def fit(self, x: mx.array) -> "GroupedCodec":
        """Order the dims of each head by their share of the energy of x [B, H, n, D], every vector counting alike."""
        squares = mx.square(x.astype(mx.float32))
        energy = (squares / mx.maximum(squares.sum(axis=-1, keepdims=True), TINY)).sum(axis=2)
        return self.restore(mx.argsort(-energy, axis=-1).astype(mx.uint16))

    def restore(self, learned: mx.array) -> "GroupedCodec":
        return GroupedCodec(self.head_dim, self._groups, learned)

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [B, H, n, D], or of any leading dims before `fit`."""
        x = self._grouped.arrange(mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX))
        words, norms = [], []
        for group, part in zip(self._groups, self._grouped.split(x), strict=True):
            part_words, part_norms = group.encode(part)
            words += part_words
            norms += part_norms
        return Encoded(mx.concatenate([*words, mx.stack(norms, axis=-1).view(mx.uint16)], axis=-1), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        norms = self._norms(codes).astype(mx.float32)
        words = mx.split(codes, self._stops, axis=-1)[:-1]
        parts = zip(self._groups, words, mx.split(norms, len(self._groups), axis=-1), strict=True)
        return [mx.concatenate([group.decode(*part) for group, *part in parts], axis=-1)]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        return mx.logical_or(peak > FP16_MAX, (self._norms(encoded.codes) >= FP16_MAX).any(axis=-1))

    def _norms(self, codes: mx.array) -> mx.array:
        return codes[..., self._stops[-1] :].view(mx.float16)


def _grouped_format(name: str, error: float, *split: tuple[int, int]) -> Format:
    """Return a format of groups of dims, each given by its share of the dims in quarters and the bits of a code."""

    def make_codec(head_dim: int, options: CodecOptions, dtype: mx.Dtype) -> Codec:
        sizes = [head_dim * quarters // 4 for quarters, _ in split]
        if head_dim % 64 or any(split_order(size) is None for size in sizes):
            raise ConfigError(
                f"head_dim {head_dim} cannot be stored as {name}, whose groups are {split[0][0]} and "
                f"{split[1][0]} quarters of it; valid are 64, 128, 256 and 512. Use tq3 or tq2 for this model."
            )
        groups = []
        for dim, (_, bits) in zip(sizes, split, strict=True):
            rotation = get_rotation(options.rotation, dim, options.seed)
            groups.append(_Group(dim, bits, rotation, get_rotation("haar", dim, options.seed + _SKETCH_SEED)))
        return GroupedCodec(head_dim, groups)

    return Format(name, sum(quarters * bits for quarters, bits in split) / 4 + 1, error, make_codec)


# 3 + 1 bits for half of the dims, 2 + 1 for the others; 2 + 1 for a quarter, 1 + 1 for the others.
FORMATS = (_grouped_format("tq35", 0.0417, (2, 3), (2, 2)), _grouped_format("tq25", 0.168, (1, 2), (3, 1)))
