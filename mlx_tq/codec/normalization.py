"""Normalized keys: what a rotation would smear over the dims that queries read is taken out before it.

Keys of real models have a large mean, and most of their energy in channels that queries hardly use. So a key is
multiplied by a positive weight w of each pair of dims that RoPE turns, by which queries are divided: inner products
stay. And each block of MEAN_TOKENS positions has a vector near its keys' mean, kept once in the codes' domain and
subtracted before coding:

    code(R (w k) - mean)        <q, k> ~ <R (q / w), decoded> + <R (q / w), mean>

Any vector would do as long as both sides take the same, so the mean is what fp16 makes of it. Dims of a pair have one
weight, so weights commute with RoPE: their statistics do not go stale with length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.exact import pairwise_sum
from mlx_tq.codec.formats.base import FP16_MAX, Codec, Encoded
from mlx_tq.codec.rotation import Rotation

# Positions that share a mean.
MEAN_TOKENS = 128
# The least statistic of a dim, of a head's root mean square: a dim that nothing uses gets no weight beyond bounds.
_FLOOR = 0.01


@dataclass(frozen=True)
class KeyNormalization:
    """What the keys of packed rows were normalized by.

    Attributes:
        scale: w, positive, fp32 [B, H, D].
        means: in the codes' domain, fp16 [B, H, n, D]; those past the last one in use may be anything.
        index: which mean each row has, int32 [at least as many as rows]. None where no token has left: that of row r is
            (first + r) // MEAN_TOKENS.
        first: how many rows came before these, where there is no index.
    """

    scale: mx.array
    means: mx.array
    index: mx.array | None = None
    first: int = 0

    def which(self, tokens: int) -> mx.array:
        """Which mean each of the first rows has, int32 [tokens]."""
        if self.index is not None:
            return self.index[:tokens]
        return mx.arange(self.first, self.first + tokens, dtype=mx.int32) // MEAN_TOKENS

    def after(self, start: int) -> "KeyNormalization":
        """That of the rows from `start` on."""
        if self.index is not None:
            return replace(self, index=self.index[start:])
        passed, first = divmod(self.first + start, MEAN_TOKENS)
        return replace(self, means=self.means[:, :, passed:], first=first)

    def of_rows(self, tokens: int) -> mx.array:
        """The mean of each of the first rows, fp32 [B, H, tokens, D]."""
        batch, heads, count, dim = self.means.shape
        which = mx.arange(batch * heads, dtype=mx.int32)[:, None] * count + self.which(tokens)
        means = self.means.astype(mx.float32).reshape(-1, dim)  # few, and a CPU widens fp16 one by one
        return mx.take(means, which, axis=0).reshape(batch, heads, tokens, dim)  # axis 2 takes 20 times as long


class Means(NamedTuple):
    """Means of blocks.

    means: as `KeyNormalization` has them. clamped: how many exceeded fp16 and were clamped to it, int32.
    """

    means: mx.array
    clamped: mx.array


def block_means(keys: mx.array, scale: mx.array, rotation: Rotation | None) -> Means:
    """The means of m blocks.

    One that is not finite becomes zero: its keys then count as broken one by one. Sums have one order, whatever the
    number of blocks.

    Args:
        keys: of each block, [B, H, m, n, D] in any float type.
        scale: w, fp32 [B, H, D].
        rotation: of the codec.
    """
    count = keys.shape[3]
    mean = pairwise_sum(keys.astype(mx.float32).swapaxes(-1, -2)) / count * scale[:, :, None]
    mean = _forward(mx.where(mx.isfinite(mean), mean, 0.0), rotation)
    clamped = (mx.abs(mean) > FP16_MAX).any(axis=-1).sum().astype(mx.int32)
    return Means(mx.clip(mean, -FP16_MAX, FP16_MAX).astype(mx.float16), clamped)


def pair_scale(keys: mx.array, queries: mx.array, pairs: Sequence[tuple[int, int]] | None = None) -> mx.array:
    """The weights w = sqrt(rms of queries / rms of keys), fp32 [B, H, D].

    Queries over w and keys times w then have the same rms, the root of their product, so that fp16 holds both wherever
    it holds scores. Statistics of the two dims of a pair are averaged, and none is less than 1 % of its head's. A head
    whose statistics are zero or not finite has weights of 1.

    Args:
        keys: root mean squares of keys less their mean, [B, H, D].
        queries: of queries after RoPE, [B, Hq, D] with Hq a multiple of H, whose heads are pooled.
        pairs: the dims that RoPE turns together; None is (f, f + D / 2). Others have a weight each.
    """
    batch, heads, dim = keys.shape
    squares = mx.square(queries.astype(mx.float32)).reshape(batch, heads, -1, dim).mean(axis=2)
    asked, stored = (_floored(_paired(x, pairs)) for x in (squares, mx.square(keys.astype(mx.float32))))
    scale = mx.sqrt(mx.sqrt(asked / stored))  # of squares
    return mx.where(mx.isfinite(mx.log(scale)).all(axis=-1, keepdims=True), scale, 1.0)


def _paired(squares: mx.array, pairs: Sequence[tuple[int, int]] | None) -> mx.array:
    """Mean squares [..., D] averaged over pairs."""
    dim = squares.shape[-1]
    partner = list(range(dim))
    for first, second in [(f, f + dim // 2) for f in range(dim // 2)] if pairs is None else pairs:
        partner[first], partner[second] = second, first
    return (squares + mx.take(squares, mx.array(partner), axis=-1)) / 2


def _floored(squares: mx.array) -> mx.array:
    return mx.maximum(squares, _FLOOR**2 * squares.mean(axis=-1, keepdims=True))


def centres(means: mx.array, rotation: Rotation | None) -> mx.array:
    """What is subtracted from w k: means [B, H, n, D] rotated back, fp32."""
    wide = means.astype(mx.float32)
    return wide if rotation is None else rotation.inverse(wide)


def turned(means: mx.array, old: Rotation | None, new: Rotation | None) -> mx.array:
    """Means [B, H, n, D] in the domain of another rotation's codes, in their type."""
    if old is new:
        return means
    return mx.clip(_forward(centres(means, old), new), -FP16_MAX, FP16_MAX).astype(means.dtype)


def normalize(keys: mx.array, normalization: KeyNormalization, rotation: Rotation | None) -> mx.array:
    """What a codec of that rotation encodes in place of keys [B, H, S, D]: w k less the token's mean, fp32."""
    subtracted = _subtracted(normalization, rotation, keys.shape[2])
    return keys.astype(mx.float32) * normalization.scale[:, :, None] - subtracted


def denormalize(decoded: mx.array, normalization: KeyNormalization, rotation: Rotation | None) -> mx.array:
    """The keys of what `normalize` made of them, fp32 [B, H, S, D], in whatever codec that was stored since."""
    return (decoded + _subtracted(normalization, rotation, decoded.shape[2])) / normalization.scale[:, :, None]


def _subtracted(normalization: KeyNormalization, rotation: Rotation | None, tokens: int) -> mx.array:
    return mx.take(centres(normalization.means, rotation), normalization.which(tokens), axis=2)


def asking(queries: mx.array, normalization: KeyNormalization | None) -> mx.array:
    """Queries [B, Hq, L, D] over w, fp32; in their type where there is nothing to divide by."""
    if normalization is None:
        return queries
    grouped = queries.astype(mx.float32).reshape(queries.shape[0], normalization.scale.shape[1], -1, queries.shape[-1])
    return (grouped / normalization.scale[:, :, None]).reshape(queries.shape)


def mean_scores(queries: mx.array, normalization: KeyNormalization, tokens: int) -> mx.array:
    """What means add to scores: divided, rotated queries fp32 [B, H, N, D] and the first rows -> [B, H, N, tokens]."""
    means = normalization.means
    if normalization.index is None:
        means = means[:, :, : -(-(normalization.first + tokens) // MEAN_TOKENS)]
    each = queries @ means.astype(mx.float32).swapaxes(-1, -2)
    return mx.take(each, normalization.which(tokens), axis=-1)


def decode_rotated(codec: Codec, encoded: Encoded, normalization: KeyNormalization | None) -> mx.array:
    """R (w k) of rows, fp32 [B, H, S, D]; R k where they are not normalized."""
    decoded = codec.decode_rotated(encoded)
    return decoded if normalization is None else decoded + normalization.of_rows(decoded.shape[2])


def decode(codec: Codec, encoded: Encoded, normalization: KeyNormalization | None) -> mx.array:
    """The keys of rows, fp32 [B, H, S, D]."""
    if normalization is None:
        return codec.decode(encoded)
    whole = decode_rotated(codec, encoded, normalization)
    whole = whole if codec.rotation is None else codec.rotation.inverse(whole)
    return whole / normalization.scale[:, :, None]


def narrowed(x: mx.array, dtype: mx.Dtype, normalization: KeyNormalization | None) -> mx.array:
    """Keys or queries in a model's type: weights can carry what fp16 holds beyond its range, where it is clamped."""
    clamped = normalization is not None and dtype == mx.float16
    return (mx.clip(x, -FP16_MAX, FP16_MAX) if clamped else x).astype(dtype)


def _forward(x: mx.array, rotation: Rotation | None) -> mx.array:
    return x if rotation is None else rotation.forward(x) / rotation.dim**0.5
