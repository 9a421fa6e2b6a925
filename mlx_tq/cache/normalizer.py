"""The scale of a layer's keys, which is learned from its first tokens, and the means of packed keys.

The scale of each dim comes from the keys and queries of tokens [SKIP, SCALE_TOKENS). A mean is that of a block of
MEAN_TOKENS positions; its first keys are packed before its last ones arrive, so it is taken of as many as have arrived
by then. Both depend on positions alone, so chunks, batches and trims change nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_tq.cache.region_map import SCALE_READY, SCALE_TOKENS, RegionMap
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization, compute_block_means, compute_key_scale
from mlx_tq.codec.rotation import Rotation, pairwise_sum
from mlx_tq.config import BLOCK

SKIP = 4  # attention sinks are unlike all other tokens

Pairs = tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, eq=False)
class KeyNormalizer:
    """The key statistics of one layer. Immutable, so copies share it."""

    # Mean squares over the query heads of a KV head, one row for each token from SKIP on whose queries were seen, fp32
    # [B, H, n, Dk]. None before the first, and once no trim can lead back to them.
    queries: mx.array | None = None
    scale: mx.array | None = None  # fp32 [B, H, Dk], once it is known
    means: mx.array | None = None  # of the blocks that have packed keys, fp16 [B, H, n, Dk] in the domain of the codes

    @property
    def arrays(self) -> dict[str, mx.array]:
        return {name: array for name, array in vars(self).items() if array is not None}

    @property
    def seen(self) -> int:
        """Position before which the queries were seen."""
        return SKIP if self.queries is None else SKIP + self.queries.shape[2]

    # The scale.

    def before_pass(self, keys: mx.array, start: int, stop: int, pairs: Pairs) -> "KeyNormalizer":
        """Prepare for a pass of positions [start, stop); `keys` [B, H, S, Dk] are all keys up to `stop`."""
        statistics = self
        if statistics.scale is None and statistics.seen < min(start, SCALE_TOKENS):
            statistics = statistics.with_unit_scale(keys)  # stored tokens whose queries are unknown
        if statistics.scale is None and start >= SCALE_TOKENS and stop >= SCALE_READY:
            statistics = statistics.learn(keys, pairs)
        return statistics.without_settled_queries(stop)

    def after_pass(self, keys: mx.array, queries: mx.array, start: int, stop: int, pairs: Pairs) -> "KeyNormalizer":
        """Add queries [B, Hq, L, Dk] of positions [start, stop), and learn the scale from them if it is time."""
        statistics = self.add_queries(queries, keys.shape[1], start)
        return statistics.learn(keys, pairs).without_settled_queries(stop) if stop >= SCALE_READY else statistics

    def add_queries(self, queries: mx.array, heads: int, start: int) -> "KeyNormalizer":
        """Add queries [B, Hq, L, Dk] of positions from `start` on; those seen before are skipped."""
        stop = min(start + queries.shape[2], SCALE_TOKENS)
        if start > self.seen or stop <= self.seen:
            return self
        new = mx.square(queries[:, :, self.seen - start : stop - start].astype(mx.float32))
        batch, query_heads, count, dim = new.shape
        new = pairwise_sum(new.reshape(batch, heads, -1, count, dim).moveaxis(2, -1)) * (heads / query_heads)
        return replace(self, queries=new if self.queries is None else mx.concatenate([self.queries, new], axis=2))

    def with_unit_scale(self, keys: mx.array) -> "KeyNormalizer":
        """Return the statistics with a scale of 1 for keys [B, H, S, Dk]."""
        return replace(self, scale=mx.ones((*keys.shape[:2], keys.shape[3])))

    def learn(self, keys: mx.array, pairs: Pairs) -> "KeyNormalizer":
        """Compute the scale from keys [B, H, S, Dk]; it is 1 if the RoPE pairs or some queries are unknown."""
        if pairs is None or self.queries is None or self.seen < SCALE_TOKENS:
            return self.with_unit_scale(keys)
        centered = self.with_unit_scale(keys).first_keys(keys)
        scale = compute_key_scale(mx.sqrt(_mean(mx.square(centered))), mx.sqrt(_mean(self.queries)), pairs)
        return replace(self, scale=scale)

    def without_settled_queries(self, length: int) -> "KeyNormalizer":
        """Drop the queries once no exact trim leads back to where the scale is unknown."""
        is_settled = self.scale is not None and length >= SCALE_READY + BLOCK
        return replace(self, queries=None) if is_settled and self.queries is not None else self

    def trimmed(self, length: int, num_means: int) -> "KeyNormalizer":
        """Forget what was learned of tokens from position `length` on."""
        means = mx.contiguous(self.means[:, :, :num_means]) if num_means and self.means is not None else None
        if self.queries is None:
            return KeyNormalizer() if length <= SKIP and not num_means else replace(self, means=means)
        queries = self.queries[:, :, : length - SKIP] if length > SKIP else None
        return KeyNormalizer(queries, self.scale if length >= SCALE_READY else None, means)

    # The means.

    def add_means(
        self, keys: mx.array, packed: int, target: int, regions: RegionMap, rotation: Rotation | None
    ) -> tuple["KeyNormalizer", KeyNormalization, mx.array]:
        """Add the means of the blocks whose first keys are packed with positions [packed, target).

        `keys` [B, H, S, Dk] are those from position `packed` on. Returns the statistics, the normalization of these
        positions, and the number of means that were clamped to fp16, int32.
        """
        assert self.scale is not None  # noqa: S101 - tells the type checker: nothing is packed before it is learned
        means, clamped = self.means, mx.array(0, mx.int32)
        before, after = (regions.mean_blocks(end) for end in (packed, target))
        sizes = regions.sizes
        if len(after) > len(before):
            starts = sizes.sinks + after[len(before) :] * MEAN_TOKENS - packed
            blocks = mx.take(keys, mx.array(starts[:, None] + np.arange(sizes.mean_tokens)), axis=2)
            new, clamped = compute_block_means(blocks, self.scale, rotation)
            means = new if means is None else mx.concatenate([means, new], axis=2)
        assert means is not None  # noqa: S101 - as above
        offset = packed - sizes.sinks
        first = len(after) - 1 - (after[-1] - offset // MEAN_TOKENS)
        normalization = KeyNormalization(self.scale, means[:, :, int(first) :], first=offset % MEAN_TOKENS)
        return replace(self, means=means), normalization, clamped

    def normalization(self, first: int, index: mx.array | None) -> KeyNormalization:
        """Return the normalization of packed rows; `first` and `index` as in `KeyNormalization`."""
        assert self.scale is not None and self.means is not None  # noqa: S101, PT018 - as above
        return KeyNormalization(self.scale, self.means, index, 0 if index is not None else first)

    def with_blocks(self, before: np.ndarray, after: np.ndarray, reloaded: Mapping[int, np.ndarray]) -> "KeyNormalizer":
        """Keep the means of the blocks `after`, of those of `before` and of reloaded ones, fp16 [H, Dk] by number.

        `before` and `after` are ascending block numbers.
        """
        index = {int(number): i for i, number in enumerate(before)} if self.means is not None else {}
        new = [number for number in reloaded if number not in index]
        parts = [] if self.means is None else [self.means]
        if new:
            parts.append(mx.array(np.stack([reloaded[number] for number in new], axis=1))[None])
            index |= {number: len(index) + i for i, number in enumerate(new)}
        indices = [index[int(number)] for number in after if int(number) in index]
        if not indices:
            return replace(self, means=None)
        means = mx.take(mx.concatenate(parts, axis=2), mx.array(indices, mx.int32), axis=2)
        return replace(self, means=mx.contiguous(means))  # kernels would copy it at each step

    @property
    def knows_queries(self) -> bool:
        """Return whether the scale was learned from queries."""
        return self.scale is not None and bool((self.scale != 1).any())

    def first_keys(self, keys: mx.array) -> mx.array:
        """Return the keys of [B, H, S, Dk] that the scale was learned from: scaled, less their mean; fp32."""
        assert self.scale is not None  # noqa: S101 - as above
        keys = keys[:, :, SKIP:SCALE_TOKENS].astype(mx.float32)
        return (keys - _mean(keys)[:, :, None]) * self.scale[:, :, None]


def _mean(x: mx.array) -> mx.array:
    """Return the mean over the tokens of [B, H, SCALE_TOKENS - SKIP, D], summed in a fixed order."""
    return pairwise_sum(mx.pad(x, [(0, 0), (0, 0), (0, SKIP), (0, 0)]).swapaxes(-1, -2)) / x.shape[2]
