"""Which positions of a layer's body are gone."""

from dataclasses import dataclass, field

import numpy as np

from mlx_tq.codec.normalization import MEAN_TOKENS


@dataclass(frozen=True, eq=False)
class Gaps:
    """What rounds of eviction took out of the packed body.

    Attributes:
        evicted: tokens that left.
        floor: the end of the body at the last round; only positions before it are missing.
        kept: positions that stayed between the sinks and the floor, ascending, int64 [N].
    """

    evicted: int = 0
    floor: int = 0
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def blocks(self, sinks: int, packed: int) -> np.ndarray:
        """Which blocks of MEAN_TOKENS positions behind the sinks have a mean when tokens before `packed` are packed.

        Those with a token that stayed, and all that a token from the floor on is packed or may be packed into: int64
        [n], ascending.
        """
        start = max(self.floor, sinks) - sinks
        later = np.arange(start // MEAN_TOKENS, -(-(packed - sinks) // MEAN_TOKENS))
        numbers = np.concatenate([(self.kept - sinks) // MEAN_TOKENS, later])  # ascending
        return numbers[np.diff(numbers, prepend=-1) > 0]

    def missing(self, start: int, stop: int) -> np.ndarray:
        """Positions of [start, stop) that left, ascending, int64 [n]; `start` is behind the sinks."""
        first, last = np.searchsorted(self.kept, (start, stop))
        return np.setdiff1d(np.arange(start, min(stop, self.floor)), self.kept[first:last], assume_unique=True)

    def before(self, length: int, sinks: int) -> "Gaps":
        """Those before position `length`, as if nothing had ever been behind it."""
        floor, kept = min(self.floor, length), self.kept[self.kept < length]
        evicted = floor - sinks - len(kept)
        return Gaps(evicted, floor, kept) if evicted > 0 else NO_GAPS


NO_GAPS = Gaps()
