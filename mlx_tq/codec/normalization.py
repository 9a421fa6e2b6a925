"""Normalize keys before they are encoded: subtract block means, and rescale dims by what queries read of them.

Keys of real models have a large mean, and most of their energy in channels that queries hardly use; a rotation would
smear both over all dims. So keys are multiplied by a scale w and queries divided by it, and each block of MEAN_TOKENS
positions has a mean, stored once in the codes' domain as fp16:

    code(R (w k) - mean)        <q, k> ~ <R (q / w), decoded> + <R (q / w), mean>

The two dims of a pair that RoPE rotates have one scale, which therefore commutes with RoPE.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, Codec, Encoded
from mlx_tq.codec.rotation import Rotation, pairwise_sum, rotate_exactly

MEAN_TOKENS = 128  # positions that share a mean
_FLOOR = 0.01  # least statistic of a dim, in rms of its head: unused dims would get an unbounded scale


@dataclass(frozen=True)
class KeyNormalization:
    """Scale and means of the keys in packed rows."""

    scale: mx.array  # w, positive, fp32 [B, H, D]
    means: mx.array  # in the codes' domain, fp16 [B, H, n, D]; entries past the last one in use are undefined
    index: mx.array | None = None  # the mean of each row, int32 [rows or more]; None until a token is evicted
    first: int = 0  # without an index, row r has mean (first + r) // MEAN_TOKENS

    def mean_index(self, tokens: int) -> mx.array:
        """Return the index of the mean of each of the first rows, int32 [tokens]."""
        if self.index is not None:
            return self.index[:tokens]
        return mx.arange(self.first, self.first + tokens, dtype=mx.int32) // MEAN_TOKENS

    def after(self, start: int) -> "KeyNormalization":
        """Return the normalization of the rows from `start` on."""
        if self.index is not None:
            return replace(self, index=self.index[start:])
        blocks, first = divmod(self.first + start, MEAN_TOKENS)
        return replace(self, means=self.means[:, :, blocks:], first=first)

    def select_heads(self, select: Callable[[mx.array], mx.array]) -> "KeyNormalization":
        """Return the normalization of some heads, which `select` takes from arrays [B, H, ...]."""
        return replace(self, scale=select(self.scale), means=select(self.means))

    def row_means(self, tokens: int) -> mx.array:
        """Return the mean of each of the first rows, fp32 [B, H, tokens, D]."""
        batch, heads, count, dim = self.means.shape
        index = mx.arange(batch * heads, dtype=mx.int32)[:, None] * count + self.mean_index(tokens)
        means = self.means.astype(mx.float32).reshape(-1, dim)  # few, and a CPU widens fp16 one by one
        return mx.take(means, index, axis=0).reshape(batch, heads, tokens, dim)  # axis 2 takes 20 times as long


class BlockMeans(NamedTuple):
    means: mx.array  # as in `KeyNormalization`
    clamped: mx.array  # int32: means that exceeded fp16 and were clamped to it


def compute_block_means(keys: mx.array, scale: mx.array, rotation: Rotation | None) -> BlockMeans:
    """Average the keys of m blocks, [B, H, m, n, D], scaled by w; a mean that is not finite becomes zero.

    Sums have one order, so that the number of blocks changes nothing.
    """
    count = keys.shape[3]
    mean = pairwise_sum(keys.astype(mx.float32).swapaxes(-1, -2)) / count * scale[:, :, None]
    mean = rotate_exactly(mx.where(mx.isfinite(mean), mean, 0.0), rotation)
    clamped = (mx.abs(mean) > FP16_MAX).any(axis=-1).sum().astype(mx.int32)
    return BlockMeans(mx.clip(mean, -FP16_MAX, FP16_MAX).astype(mx.float16), clamped)


def compute_key_scale(keys: mx.array, queries: mx.array, pairs: Sequence[tuple[int, int]] | None = None) -> mx.array:
    """Return the scale w = sqrt(rms of queries / rms of keys), fp32 [B, H, D].

    Queries over w and keys times w then have the same rms, the root of their product, so that fp16 holds both wherever
    it holds scores. A head whose statistics are zero or not finite has a scale of 1.

    Args:
        keys: root mean squares of keys less their mean, [B, H, D].
        queries: root mean squares of queries after RoPE, [B, Hq, D].
        pairs: the dims that RoPE rotates together; None is (f, f + D / 2). Other dims have a scale each.
    """
    batch, heads, dim = keys.shape
    partner = list(range(dim))
    for first, second in [(f, f + dim // 2) for f in range(dim // 2)] if pairs is None else pairs:
        partner[first], partner[second] = second, first

    def pool_pairs(squares: mx.array) -> mx.array:
        squares = (squares + mx.take(squares, mx.array(partner), axis=-1)) / 2
        return mx.maximum(squares, _FLOOR**2 * squares.mean(axis=-1, keepdims=True))

    query_squares = mx.square(queries.astype(mx.float32)).reshape(batch, heads, -1, dim).mean(axis=2)
    scale = mx.sqrt(mx.sqrt(pool_pairs(query_squares) / pool_pairs(mx.square(keys.astype(mx.float32)))))
    return mx.where(mx.isfinite(mx.log(scale)).all(axis=-1, keepdims=True), scale, 1.0)


def normalize(keys: mx.array, normalization: KeyNormalization, rotation: Rotation | None) -> mx.array:
    """Return what a codec of that rotation encodes for keys [B, H, S, D]: w k less the row's mean, fp32."""
    scaled = keys.astype(mx.float32) * normalization.scale[:, :, None]
    return scaled - _unrotated_row_means(normalization, rotation, keys.shape[2])


def denormalize(normalized: mx.array, normalization: KeyNormalization, rotation: Rotation | None) -> mx.array:
    """Invert `normalize`, even for vectors that another codec has stored since: fp32 [B, H, S, D]."""
    means = _unrotated_row_means(normalization, rotation, normalized.shape[2])
    return (normalized + means) / normalization.scale[:, :, None]


def normalize_queries(queries: mx.array, normalization: KeyNormalization | None) -> mx.array:
    """Divide queries [B, Hq, L, D] by w, fp32; return them in their own type if keys are not normalized."""
    if normalization is None:
        return queries
    grouped = queries.astype(mx.float32).reshape(queries.shape[0], normalization.scale.shape[1], -1, queries.shape[-1])
    return (grouped / normalization.scale[:, :, None]).reshape(queries.shape)


def score_means(queries: mx.array, normalization: KeyNormalization, tokens: int) -> mx.array:
    """Score the mean of each of the first rows by rotated queries: fp32 [B, H, N, D] -> [B, H, N, tokens]."""
    means = normalization.means
    if normalization.index is None:
        means = means[:, :, : -(-(normalization.first + tokens) // MEAN_TOKENS)]
    block_scores = queries @ means.astype(mx.float32).swapaxes(-1, -2)
    return mx.take(block_scores, normalization.mean_index(tokens), axis=-1)


def decode_rotated_keys(codec: Codec, encoded: Encoded, normalization: KeyNormalization | None) -> mx.array:
    """Return R (w k) of encoded keys, fp32 [B, H, S, D]; R k if they are not normalized."""
    decoded = codec.decode_rotated(encoded)
    return decoded if normalization is None else decoded + normalization.row_means(decoded.shape[2])


def decode_keys(codec: Codec, encoded: Encoded, normalization: KeyNormalization | None) -> mx.array:
    """Return encoded keys in the original space, fp32 [B, H, S, D]."""
    if normalization is None:
        return codec.decode(encoded)
    scaled = _unrotate(decode_rotated_keys(codec, encoded, normalization), codec.rotation)
    return scaled / normalization.scale[:, :, None]


def cast_clamped(x: mx.array, dtype: mx.Dtype, normalization: KeyNormalization | None) -> mx.array:
    """Cast keys or queries to a model's type; normalized ones can exceed fp16, and are clamped."""
    clamped = normalization is not None and dtype == mx.float16
    return (mx.clip(x, -FP16_MAX, FP16_MAX) if clamped else x).astype(dtype)


def rerotate_means(means: mx.array, old: Rotation | None, new: Rotation | None) -> mx.array:
    """Move means [B, H, n, D] from the domain of one rotation's codes to another's, in their type."""
    if old is new:
        return means
    return mx.clip(rotate_exactly(_unrotate(means, old), new), -FP16_MAX, FP16_MAX).astype(means.dtype)


def _unrotated_row_means(normalization: KeyNormalization, rotation: Rotation | None, tokens: int) -> mx.array:
    return replace(normalization, means=_unrotate(normalization.means, rotation)).row_means(tokens)


def _unrotate(x: mx.array, rotation: Rotation | None) -> mx.array:
    x = x.astype(mx.float32)
    return x if rotation is None else rotation.inverse(x)
