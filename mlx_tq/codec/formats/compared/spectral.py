"""Spectral formats `spectral8` ... `spectral16_int16`: the M strongest RoPE pairs of each key, without the others.

RoPE preserves the length of each pair of dims that it rotates: the strongest pairs of a key are the same at every
position. Attention scores them without building the key: <q, k> = step sum_m (q_first[i_m] c_m + q_second[i_m] s_m).

Bytes: M indices; the coefficients in steps of the largest (4 bits: c low, s high in one byte; else all c, then all s,
little-endian); the largest as fp16.
"""

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, TINY, Codec, CodecOptions, Encoded, Format
from mlx_tq.errors import ConfigError

COUNTS = (8, 10, 12, 14, 16)  # of leading pairs
_TYPES = {8: mx.int8, 16: mx.int16}


class SpectralCodec(Codec):
    def __init__(self, head_dim: int, count: int, bits: int, pairs: tuple[tuple[int, int], ...]) -> None:
        super().__init__(head_dim, count * (8 + 2 * bits) // 16 + 1)
        self.count = count
        self.first, self.second = (mx.array(side, mx.int32) for side in zip(*pairs, strict=True))  # dims of pairs
        self._bits = bits
        self._limit = 2 ** (bits - 1) - 1

    def encode(self, x: mx.array) -> Encoded:
        x = mx.clip(x.astype(mx.float32), -FP16_MAX, FP16_MAX)
        c, s = x[..., self.first], x[..., self.second]
        strongest = mx.argsort(-(c * c + s * s), axis=-1)[..., : self.count]
        index = mx.sort(strongest, axis=-1)
        chosen = mx.concatenate([mx.take_along_axis(side, index, axis=-1) for side in (c, s)], axis=-1)
        peak = mx.abs(chosen).max(axis=-1, keepdims=True).astype(mx.float16)
        step = peak.astype(mx.float32) / self._limit
        codes = mx.round(chosen * mx.where(step > TINY, 1.0 / step, 0.0))
        codes = mx.clip(codes, -self._limit, self._limit).astype(mx.int32)
        parts = [index.astype(mx.uint8), self._to_bytes(codes), peak.view(mx.uint8)]
        return Encoded(mx.concatenate(parts, axis=-1).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        index, c, s = self.coefficients(codes)
        dense = mx.zeros((*codes.shape[:-1], self.head_dim))
        dense = mx.put_along_axis(dense, self.first[index], c, axis=-1)
        return [mx.put_along_axis(dense, self.second[index], s, axis=-1)]

    def scores(self, queries: mx.array, encoded: Encoded) -> mx.array:
        index, c, s = self.coefficients(encoded.codes)
        shape = (*queries.shape[:3], *index.shape[2:])  # [B, H, N, S, M]
        at = mx.broadcast_to(index[:, :, None], shape)

        def score_side(dims: mx.array, values: mx.array) -> mx.array:
            spread = mx.broadcast_to(queries[..., dims][:, :, :, None], (*shape[:4], dims.size))
            return (mx.take_along_axis(spread, at, axis=-1) * values[:, :, None]).sum(axis=-1)

        return score_side(self.first, c) + score_side(self.second, s)

    def coefficients(self, codes: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the index of each pair, int32 [..., M], and its two values, fp32 [..., M]."""
        data = codes.view(mx.uint8)
        values = self._from_bytes(data[..., self.count : -2]).astype(mx.float32)
        values = values * (data[..., -2:].view(mx.float16).astype(mx.float32) / self._limit)
        return data[..., : self.count].astype(mx.int32), values[..., : self.count], values[..., self.count :]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        return peak > FP16_MAX

    def _to_bytes(self, codes: mx.array) -> mx.array:
        if self._bits in _TYPES:
            return codes.astype(_TYPES[self._bits]).view(mx.uint8)
        nibbles = (codes & 15).astype(mx.uint8)
        return nibbles[..., : self.count] | (nibbles[..., self.count :] << 4)

    def _from_bytes(self, data: mx.array) -> mx.array:
        if self._bits in _TYPES:
            return data.view(_TYPES[self._bits])
        nibbles = mx.concatenate([data & 15, data >> 4], axis=-1).astype(mx.int32)
        return (nibbles ^ 8) - 8


def _spectral_format(count: int, bits: int) -> Format:
    name = f"spectral{count}" + (f"_int{bits}" if bits > 4 else "")

    def make_codec(head_dim: int, options: CodecOptions, dtype: mx.Dtype) -> Codec:
        if not 2 * count <= head_dim <= 512:  # a byte counts 256 pairs
            raise ConfigError(
                f"head_dim {head_dim} cannot be stored as {name}; valid are {2 * count} to 512. Use tq4 for this model."
            )
        half = head_dim // 2
        pairs = options.pairs if options.pairs is not None else tuple((i, i + half) for i in range(half))
        unpaired = sorted(set(range(head_dim)).difference(*pairs))
        middle = len(unpaired) // 2
        others = tuple(zip(unpaired[:middle], unpaired[middle:], strict=True))  # pair with one another
        return SpectralCodec(head_dim, count, bits, pairs + others)

    nbytes = count * (1 + bits // 4) + 2
    # Of 64 exponentially distributed energies, the M largest have M (1 + H_64 - H_M) of 64.
    error = 1 - count / 64 * (1 + sum(1 / i for i in range(count + 1, 65)))
    reason = "it keeps the strongest RoPE pairs of a vector, and RoPE does not rotate values"
    return Format(name, nbytes / 16, error, make_codec, keys_only=reason, needs_pairs=True)


FORMATS = tuple(_spectral_format(count, bits) for count in COUNTS for bits in (4, 8, 16))
