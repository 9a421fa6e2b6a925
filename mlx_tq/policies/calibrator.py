"""How the statistics of a layer's queries are gathered while a model runs."""

from typing import Any

import mlx.core as mx

from mlx_tq.policies.policy import CalibratedPolicy
from mlx_tq.policies.queries import QueryStats
from mlx_tq.policies.rope import Rope, learn_rope

# Attention sinks: the first tokens are unlike all others.
SKIP = 4


class Calibrator:
    """Gathers the statistics of one layer in windows of `policy.warmup` tokens.

    The first window calibrates. Later ones are blended in with `policy.ema`, or replace it every `policy.recalibrate`
    tokens; by default there are none. Sums are lazy arrays: nothing waits for them.

    Attributes:
        rope: of the layer; None in a cache from a file, until the model ran on it.
        stats: of the finished windows, or None before the first ended.
    """

    def __init__(self, rope: Rope | None, policy: CalibratedPolicy, stats: QueryStats | None = None) -> None:
        self.rope = rope
        self.policy = policy
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
        """Whether tokens can be scored by statistics that have their window."""
        return self.rope is not None and self.stats is not None

    @property
    def begun(self) -> bool:
        """Whether tokens can be scored, if need be by less than a window."""
        return self.rope is not None and self.soonest is not None

    @property
    def soonest(self) -> QueryStats | None:
        """Statistics of the finished windows; before the first ended of what it holds, if anything."""
        return self.so_far[1] if self.stats is None and self._count else self.stats

    @property
    def _gathers(self) -> bool:
        return not self._fixed and (self.stats is None or bool(self.policy.ema or self.policy.recalibrate))

    @property
    def so_far(self) -> tuple[int, QueryStats]:
        """Tokens of the window that is open, at least one, and their statistics."""
        return self._count, QueryStats(*(total / self._count for total in self._sums))

    def begin_at(self, position: int) -> None:
        """Forget what the open window holds, and count only from this position on."""
        self._sums, self._count, self._next = [], 0, position

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
            last = min(stop, first + self.policy.warmup - self._count)
            self._add(self.rope, queries[0, :, first - start : last - start].astype(mx.float32))
            self._count += last - first
            self._next = last
            if self._count == self.policy.warmup:
                self._end_window()
        return [*self._sums, *(self.stats.arrays() if self.stats else [])]

    def _add(self, rope: Rope, queries: mx.array) -> None:
        parts = [queries.sum(axis=1), rope.lengths(queries).sum(axis=1)]
        if self.policy.needs_covariance:
            parts.append(queries.swapaxes(-1, -2) @ queries)
        self._sums = [a + b for a, b in zip(self._sums, parts, strict=True)] if self._sums else parts

    def _end_window(self) -> None:
        _, found = self.so_far
        if self.stats is not None and self.policy.ema:
            found = self.stats.map(found, self.policy.ema)
        self.stats, self._sums, self._count = found, [], 0
        if not self.policy.ema and self.policy.recalibrate:
            self._next += self.policy.recalibrate - self.policy.warmup

    def copy(self) -> "Calibrator":
        """One that goes on by itself."""
        twin = Calibrator(self.rope, self.policy, self.stats)
        twin._fixed, twin._sums, twin._count, twin._next = self._fixed, list(self._sums), self._count, self._next
        return twin

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays and numbers, from which `restore` goes on."""
        stats = self.stats.arrays() if self.stats else []
        return stats, list(self._sums), self._count, self._next, int(self._fixed)

    def restore(self, state: tuple[Any, ...]) -> None:
        """Take over the state of another calibrator."""
        stats, sums, self._count, self._next, fixed = state
        self.stats = QueryStats(*stats) if stats else None
        self._sums, self._fixed = list(sums), bool(fixed)
