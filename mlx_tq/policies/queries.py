"""The statistics of a layer's queries before RoPE.

Source: TriAttention (Mao et al., arXiv 2604.04921): queries concentrate around a centre, which predicts what later
queries will attend to.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_tq.distributed.group import Ranks


@dataclass(frozen=True)
class QueryStats:
    """Of pre-RoPE queries, after bias and q_norm.

    Attributes:
        centre: mean query, fp32 [Hq, D].
        amplitude: mean length of each RoPE pair, fp32 [Hq, F].
        moment: mean outer product, fp32 [Hq, D, D], where the policy needs the covariance.
    """

    centre: mx.array
    amplitude: mx.array
    moment: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """The arrays that were gathered, by name."""
        return [x for x in (self.centre, self.amplitude, self.moment) if x is not None]

    def part(self, rank: int, size: int) -> "QueryStats":
        """The `rank`-th of `size` equal shares of the heads, computed, so that any thread can use it."""
        own = [array.reshape(size, -1, *array.shape[1:])[rank] for array in self.arrays()]
        mx.eval(own)
        return QueryStats(*own)

    def of_all(self, ranks: Ranks) -> "QueryStats":
        """The statistics of all ranks' heads."""
        if ranks.is_alone:
            return self
        return QueryStats(*(mx.array(ranks.stacked(np.array(array))) for array in self.arrays()))

    def map(self, other: "QueryStats", weight: float) -> "QueryStats":
        """Self moved to `other` by `weight`, from 0 to 1."""
        mixed = [a + weight * (b - a) for a, b in zip(self.arrays(), other.arrays(), strict=True)]
        return QueryStats(*mixed)


def pooled_over_groups(stats: QueryStats, heads: int) -> QueryStats:
    """One mean query for each KV head instead of one for each query head."""
    means = [x.reshape(heads, len(x) // heads, x.shape[1]).mean(axis=1) for x in (stats.centre, stats.amplitude)]
    return replace(stats, centre=means[0], amplitude=means[1])
