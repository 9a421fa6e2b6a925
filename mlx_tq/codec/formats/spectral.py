"""`spectral8` ... `spectral16_int16`: of each key the M strongest RoPE pairs, the others dropped.

RoPE turns pairs of dims, which keeps each pair's length: the strongest pairs of a key are the same at every position. A
pair is one index byte and two coefficients of 4, 8 or 16 bits in steps of the largest; attention scores them as they
lie, without building the key: <q, k> = step sum_m (q_first[i_m] c_m + q_second[i_m] s_m).

Bytes: M indices; the coefficients (4 bits: c low, s high in one byte; else all c, then all s, little-endian); the
largest as fp16.
"""

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.formats.block import TINY
from mlx_tq.errors import ConfigError

COUNTS = (8, 10, 12, 14, 16)
WIDTHS = (4, 8, 16)
_SIZES = {8: mx.int8, 16: mx.int16}


class SpectralCodec(Codec):
    """Stores the M strongest RoPE pairs of a vector.

    Attributes:
        count: M.
        first, second: the dims of each pair, int32 [D / 2].
    """

    def __init__(self, head_dim: int, count: int, bits: int, pairs: tuple[tuple[int, int], ...]) -> None:
        super().__init__(head_dim, rotation=None)
        self.count = count
        self.first, self.second = (mx.array(side, mx.int32) for side in zip(*pairs, strict=True))
        self._bits = bits
        self._limit = 2 ** (bits - 1) - 1

    @property
    def words(self) -> int:
        """16-bit words per vector."""
        return self.count * (8 + 2 * self._bits) // 16 + 1

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D]. A zero vector decodes to zero."""
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

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The vectors, zero but for their pairs: one fp32 [..., D]. Prefill reads them so."""
        index, c, s = self.coefficients(codes)
        dense = mx.zeros((*codes.shape[:-1], self.head_dim))
        dense = mx.put_along_axis(dense, self.first[index], c, axis=-1)
        return [mx.put_along_axis(dense, self.second[index], s, axis=-1)]

    def scores(self, queries: mx.array, encoded: Encoded) -> mx.array:
        """Inner products from the coefficients: queries fp32 [B, H, N, D] -> [B, H, N, S]."""
        index, c, s = self.coefficients(encoded.codes)
        shape = (*queries.shape[:3], *index.shape[2:])  # [B, H, N, S, M]
        at = mx.broadcast_to(index[:, :, None], shape)

        def side(dims: mx.array, values: mx.array) -> mx.array:
            spread = mx.broadcast_to(queries[..., dims][:, :, :, None], (*shape[:4], dims.size))
            return (mx.take_along_axis(spread, at, axis=-1) * values[:, :, None]).sum(axis=-1)

        return side(self.first, c) + side(self.second, s)

    def coefficients(self, codes: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Index of each pair, int32 [..., M], and its two values, fp32 [..., M]."""
        data = codes.view(mx.uint8)
        values = self._from_bytes(data[..., self.count : -2]).astype(mx.float32)
        values = values * (data[..., -2:].view(mx.float16).astype(mx.float32) / self._limit)
        return data[..., : self.count].astype(mx.int32), values[..., : self.count], values[..., self.count :]

    def clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """Whether a value was beyond fp16's range."""
        return peak > FP16_MAX

    def _to_bytes(self, codes: mx.array) -> mx.array:
        if self._bits in _SIZES:
            return codes.astype(_SIZES[self._bits]).view(mx.uint8)
        nibbles = (codes & 15).astype(mx.uint8)
        return nibbles[..., : self.count] | (nibbles[..., self.count :] << 4)

    def _from_bytes(self, data: mx.array) -> mx.array:
        if self._bits in _SIZES:
            return data.view(_SIZES[self._bits])
        nibbles = mx.concatenate([data & 15, data >> 4], axis=-1).astype(mx.int32)
        return (nibbles ^ 8) - 8


class Spectral(Format):
    """M pairs: 2 M + 2 bytes with 4 bits, 3 M + 2 with 8, 5 M + 2 with 16."""

    name = "spectral"
    keys_only = "it keeps a vector's strongest RoPE pairs, and values have none"

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.width = width
        self.name = f"spectral{count}" + (f"_int{width}" if width > 4 else "")  # type: ignore[misc]
        self.bits = self.bytes_per_vector(128) / 16  # type: ignore[misc]
        # Of 64 exponentially distributed energies, the M largest have M (1 + H_64 - H_M) of 64.
        harmonic = [sum(1 / i for i in range(1, n + 1)) for n in (64, count)]
        self.error = 1 - count / 64 * (1 + harmonic[0] - harmonic[1])  # type: ignore[misc]

    @classmethod
    def variants(cls) -> list[Format]:
        """Every number of pairs with every width."""
        return [cls(count, width) for count in COUNTS for width in WIDTHS]

    def bytes_per_vector(self, head_dim: int) -> int:
        """The bytes of indices, coefficients and the largest coefficient."""
        return self.count * (1 + self.width // 4) + 2

    def check(self, head_dim: int) -> None:
        """Raise ConfigError where there are too few pairs, or more than a byte counts."""
        super().check(head_dim)
        if not 2 * self.count <= head_dim <= 512:
            raise ConfigError(
                f"head_dim {head_dim} cannot be stored as {self.name}; valid are {2 * self.count} to 512. Use tq4 for "
                "this model."
            )

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec. Of `options`, only the pairs matter; dims that they leave out pair with one another."""
        self.check(head_dim)
        half = head_dim // 2
        pairs = options.pairs if options.pairs is not None else tuple((i, i + half) for i in range(half))
        turned = {dim for pair in pairs for dim in pair}
        free = [dim for dim in range(head_dim) if dim not in turned]
        others = tuple(zip(free[: len(free) // 2], free[len(free) // 2 :], strict=True))
        return SpectralCodec(head_dim, self.count, self.width, pairs + others)
