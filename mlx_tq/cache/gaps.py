"""Which positions of a layer's body are gone."""

from dataclasses import dataclass, field

import numpy as np

from mlx_tq.codec.conditioning import MEAN_TOKENS


@dataclass(frozen=True, eq=False)
class Gaps:
    """What rounds of eviction took out of the packed body.

    Attributes:
        evicted: tokens that left.
        floor: the end of the body at the last round; only positions before it are missing.
        kept: positions that stayed between the prefix and the floor, ascending, int64 [N].
    """

    evicted: int = 0
    floor: int = 0
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def blocks(self, prefix: int, packed: int) -> np.ndarray:
        """Which blocks of MEAN_TOKENS positions behind the prefix have a mean when tokens before `packed` are packed.

        Those with a token that stayed, and all that a token from the floor on is packed or may be packed into: int64
        [n], ascending.
        """
        start = max(self.floor, prefix) - prefix
        later = np.arange(start // MEAN_TOKENS, -(-(packed - prefix) // MEAN_TOKENS))
        numbers = np.concatenate([(self.kept - prefix) // MEAN_TOKENS, later])  # ascending
        return numbers[np.diff(numbers, prepend=-1) > 0]

    def missing(self, start: int, stop: int) -> np.ndarray:
        """Positions of [start, stop) that left, ascending, int64 [n]; `start` is behind the prefix."""
        first, last = np.searchsorted(self.kept, (start, stop))
        return np.setdiff1d(np.arange(start, min(stop, self.floor)), self.kept[first:last], assume_unique=True)

    def before(self, length: int, prefix: int) -> "Gaps":
        """Those before position `length`, as if nothing had ever been behind it."""
        floor, kept = min(self.floor, length), self.kept[self.kept < length]
        evicted = floor - prefix - len(kept)
        return Gaps(evicted, floor, kept) if evicted > 0 else NO_GAPS


NO_GAPS = Gaps()
