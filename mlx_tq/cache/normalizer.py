"""What a layer learns of its first tokens, by which all of its keys are normalized, and the means of those it packed.

A weight for each dim comes from the keys and the queries of tokens [SKIP, LEARNED). A mean is of a block of MEAN_TOKENS
positions; its first keys are packed before its last ones arrive, so it is taken of as many as have arrived by then.
Both depend on positions alone, so chunks, batches and trims change nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_tq.cache.gaps import Gaps
from mlx_tq.cache.spec import LEARNED, READY, CacheSpec
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization, compute_block_means, compute_key_scale, normalize
from mlx_tq.codec.rotation import Rotation, pairwise_sum
from mlx_tq.config import BLOCK

SKIP = 4  # attention sinks are unlike all other tokens


@dataclass(frozen=True, eq=False)
class KeyNormalizer:
    """The statistics of one layer. Never changed, so copies share them.

    Attributes:
        queries: mean squares over the query heads of a KV head, a row for each token from SKIP on that attention has
            asked with, fp32 [B, H, n, Dk]. None before the first, and once no trim can lead back to them.
        scale: the weights, fp32 [B, H, Dk]; None before they are learned.
        means: of the blocks that have packed keys, fp16 [B, H, n, Dk] in the codes' domain, or None.
    """

    queries: mx.array | None = None
    scale: mx.array | None = None
    means: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """All that are there."""
        return [each for each in (self.queries, self.scale, self.means) if each is not None]

    @property
    def asked(self) -> int:
        """The position before which attention's queries were seen."""
        return SKIP if self.queries is None else SKIP + self.queries.shape[2]

    def observe(self, queries: mx.array, heads: int, start: int) -> "KeyNormalizer":
        """With queries [B, Hq, L, Dk] of positions from `start` on; those seen before are passed over."""
        stop = min(start + queries.shape[2], LEARNED)
        if start > self.asked or stop <= self.asked:
            return self
        new = mx.square(queries[:, :, self.asked - start : stop - start].astype(mx.float32))
        batch, asking, count, dim = new.shape
        new = pairwise_sum(new.reshape(batch, heads, -1, count, dim).moveaxis(2, -1)) * (heads / asking)
        return replace(self, queries=new if self.queries is None else mx.concatenate([self.queries, new], axis=2))

    def unweighted(self, keys: mx.array) -> "KeyNormalizer":
        """With weights of 1 for keys [B, H, S, Dk], of which nothing better can be known."""
        return replace(self, scale=mx.ones((*keys.shape[:2], keys.shape[3])))

    def learn(self, keys: mx.array, pairs: tuple[tuple[int, int], ...] | None) -> "KeyNormalizer":
        """With weights from keys [B, H, LEARNED, Dk]; of 1 where pairs are unknown or some of the queries are."""
        if pairs is None or self.queries is None or self.asked < LEARNED:
            return self.unweighted(keys)
        keys = keys[:, :, SKIP:].astype(mx.float32)
        keys = keys - _mean(keys)[:, :, None]
        return replace(
            self, scale=compute_key_scale(mx.sqrt(_mean(mx.square(keys))), mx.sqrt(_mean(self.queries)), pairs)
        )

    def settled(self, length: int) -> "KeyNormalizer":
        """Without the queries once no exact trim leads back to where weights are unknown."""
        return self if self.scale is None or length < READY + BLOCK else replace(self, queries=None)

    def extended(
        self, keys: mx.array, packed: int, target: int, spec: CacheSpec, gaps: Gaps, rotation: Rotation | None
    ) -> tuple["KeyNormalizer", KeyNormalization, mx.array]:
        """With the means of the blocks that positions [packed, target) are the first packed ones of.

        Args:
            keys: from position `packed` on, [B, H, S, Dk].
            packed: see above.
            target: see above.
            spec: of the layer.
            gaps: of its body.
            rotation: of its key codec.

        Returns:
            The statistics; the normalization of these positions; how many means were clamped to fp16, int32.
        """
        assert self.scale is not None  # noqa: S101 - tells the type checker: nothing is packed before it is learned
        means, clamped = self.means, mx.array(0, mx.int32)
        before, after = (gaps.blocks(spec.sinks, end) for end in (packed, target))
        if len(after) > len(before):
            starts = spec.sinks + after[len(before) :] * MEAN_TOKENS - packed
            blocks = mx.take(keys, mx.array(starts[:, None] + np.arange(spec.mean_tokens)), axis=2)
            new, clamped = compute_block_means(blocks, self.scale, rotation)
            means = new if means is None else mx.concatenate([means, new], axis=2)
        assert means is not None  # noqa: S101 - as above
        inside = packed - spec.sinks
        first = len(after) - 1 - (after[-1] - inside // MEAN_TOKENS)
        own = KeyNormalization(self.scale, means[:, :, int(first) :], first=inside % MEAN_TOKENS)
        return replace(self, means=means), own, clamped

    def normalization(self, first: int, index: mx.array | None) -> KeyNormalization:
        """Of packed rows; `first` and `index` as `KeyNormalization` has them."""
        assert self.scale is not None and self.means is not None  # noqa: S101, PT018 - as above
        return KeyNormalization(self.scale, self.means, index, 0 if index is not None else first)

    def rearranged(self, before: np.ndarray, after: np.ndarray, back: Mapping[int, np.ndarray]) -> "KeyNormalizer":
        """With the means of other blocks.

        Args:
            before: numbers of the blocks that have one, ascending [n].
            after: of those that will have one, ascending.
            back: means of others, fp16 [H, Dk] by number.
        """
        known = {int(number): place for place, number in enumerate(before)} if self.means is not None else {}
        new = [number for number in back if number not in known]
        parts = [] if self.means is None else [self.means]
        if new:
            parts.append(mx.array(np.stack([back[number] for number in new], axis=1))[None])
            known |= {number: len(known) + place for place, number in enumerate(new)}
        places = [known[int(number)] for number in after if int(number) in known]
        if not places:
            return replace(self, means=None)
        means = mx.take(mx.concatenate(parts, axis=2), mx.array(places, mx.int32), axis=2)
        return replace(self, means=mx.contiguous(means))  # kernels would copy it at each step

    def centered(self, keys: mx.array, block: mx.array) -> mx.array:
        """Keys [B, H, S, Dk] as a format that learns should see them: weighted, less the mean of `block`; fp32."""
        assert self.scale is not None  # noqa: S101 - as above
        means, _ = compute_block_means(block[:, :, None], self.scale, None)
        return normalize(keys, KeyNormalization(self.scale, means, mx.zeros(keys.shape[2], mx.int32)), None)

    def trimmed(self, length: int, means: int) -> "KeyNormalizer":
        """What is left at this length with so many blocks: statistics of a text that was never there are forgotten."""
        kept = mx.contiguous(self.means[:, :, :means]) if means and self.means is not None else None
        if self.queries is None:
            return KeyNormalizer() if length <= SKIP and not means else replace(self, means=kept)
        queries = self.queries[:, :, : length - SKIP] if length > SKIP else None
        return KeyNormalizer(queries, self.scale if length >= READY else None, kept)


def _mean(x: mx.array) -> mx.array:
    """Mean over the tokens of [B, H, LEARNED - SKIP, D], in one order."""
    return pairwise_sum(mx.pad(x, [(0, 0), (0, 0), (0, SKIP), (0, 0)]).swapaxes(-1, -2)) / x.shape[2]
