"""The statistics of a layer's queries before RoPE, and how they are gathered while a model runs.

Source: TriAttention (Mao et al., arXiv 2604.04921): queries concentrate around a centre, which predicts what later
queries will attend to.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_tq.config import EvictConfig
from mlx_tq.evict.rope import Rope, learn_rope

# Attention sinks: the first tokens are unlike all others.
SKIP = 4


@dataclass(frozen=True)
class QueryStats:
    """Of pre-RoPE queries, after bias and q_norm.

    Attributes:
        centre: mean query, fp32 [Hq, D].
        amplitude: mean length of each RoPE pair, fp32 [Hq, F].
        moment: mean outer product, fp32 [Hq, D, D], where the aggregation is "expected_attention".
    """

    centre: mx.array
    amplitude: mx.array
    moment: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """What there is."""
        return [x for x in (self.centre, self.amplitude, self.moment) if x is not None]

    def map(self, other: "QueryStats", weight: float) -> "QueryStats":
        """Self moved to `other` by `weight`, from 0 to 1."""
        mixed = [a + weight * (b - a) for a, b in zip(self.arrays(), other.arrays(), strict=True)]
        return QueryStats(*mixed)


class Calibrator:
    """Gathers the statistics of one layer in windows of `config.warmup` tokens.

    The first window calibrates. Later ones are blended in with `config.ema`, or replace it every `config.recalibrate`
    tokens; by default there are none. Sums are lazy arrays: nothing waits for them.

    Attributes:
        rope: of the layer; None in a cache from a file, until the model ran on it.
        stats: of the finished windows, or None before the first ended.
    """

    def __init__(self, rope: Rope | None, config: EvictConfig, stats: QueryStats | None = None) -> None:
        self.rope = rope
        self.config = config
        self.stats = stats
        self._fixed = stats is not None
        self._sums: list[mx.array] = []  # of the window that is open
        self._count = 0
        self._next = SKIP  # the position at which the next window opens, or goes on

    @property
    def listens(self) -> bool:
        """A later pass has something to tell."""
        return self.rope is None or self._gathers

    @property
    def ready(self) -> bool:
        """Tokens can be scored."""
        return self.rope is not None and self.stats is not None

    @property
    def _gathers(self) -> bool:
        return not self._fixed and (self.stats is None or bool(self.config.ema or self.config.recalibrate))

    @property
    def so_far(self) -> tuple[int, QueryStats]:
        """Tokens of the window that is open, at least one, and their statistics."""
        return self._count, QueryStats(*(total / self._count for total in self._sums))

    def begin_at(self, position: int) -> None:
        """Count only from this position on."""
        self._next = position

    def due(self, stop: int) -> bool:
        """Queries before position `stop` have something to tell."""
        return self.rope is None or (self._gathers and self._next < stop)

    def observe(self, queries: mx.array, start: int, module: Any) -> list[mx.array]:
        """Take in queries at positions from `start` on, as they were before RoPE.

        A position that was seen before (after a trim, or by another layer that shares the cache) is not counted again.

        Args:
            queries: [1, Hq, L, D].
            start: position of the first.
            module: the RoPE that they go through.

        Returns:
            The sums, to be computed with the pass.
        """
        if self.rope is None:
            self.rope = learn_rope(module, queries.shape[-1])
        stop = start + queries.shape[2]
        while self._gathers and self._next < stop:
            first = max(self._next, start)
            last = min(stop, first + self.config.warmup - self._count)
            self._add(self.rope, queries[0, :, first - start : last - start].astype(mx.float32))
            self._count += last - first
            self._next = last
            if self._count == self.config.warmup:
                self._end_window()
        return [*self._sums, *(self.stats.arrays() if self.stats else [])]

    def _add(self, rope: Rope, queries: mx.array) -> None:
        parts = [queries.sum(axis=1), rope.lengths(queries).sum(axis=1)]
        if self.config.aggregation == "expected_attention":
            parts.append(queries.swapaxes(-1, -2) @ queries)
        self._sums = [a + b for a, b in zip(self._sums, parts, strict=True)] if self._sums else parts

    def _end_window(self) -> None:
        _, found = self.so_far
        if self.stats is not None and self.config.ema:
            found = self.stats.map(found, self.config.ema)
        self.stats, self._sums, self._count = found, [], 0
        if not self.config.ema and self.config.recalibrate:
            self._next += self.config.recalibrate - self.config.warmup

    def copy(self) -> "Calibrator":
        """One that goes on by itself."""
        twin = Calibrator(self.rope, self.config, self.stats)
        twin._fixed, twin._sums, twin._count, twin._next = self._fixed, list(self._sums), self._count, self._next
        return twin

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays and numbers, from which `restore` goes on."""
        stats = self.stats.arrays() if self.stats else []
        return stats, list(self._sums), self._count, self._next, int(self._fixed)

    def restore(self, state: tuple[Any, ...]) -> None:
        """Take over a state."""
        stats, sums, self._count, self._next, fixed = state
        self.stats = QueryStats(*stats) if stats else None
        self._sums, self._fixed = list(sums), bool(fixed)


def pooled_over_groups(stats: QueryStats, heads: int) -> QueryStats:
    """One mean query for each KV head instead of one for each query head."""
    means = [x.reshape(heads, len(x) // heads, x.shape[1]).mean(axis=1) for x in (stats.centre, stats.amplitude)]
    return replace(stats, centre=means[0], amplitude=means[1])
