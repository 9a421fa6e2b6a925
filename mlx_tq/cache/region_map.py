"""The regions of a layer, sinks | packed region | window, as plain numbers without arrays of the model.

    position    0        sinks             originals         packed          length
                |  sinks   |   packed region    :    packed     |   window     |  next token
    packed rows            [------------------------------------]   less the evicted positions
    originals   [----------]                    [---------------][-------------]
                full precision                      slack         full precision

A token enters in full precision. Once it is older than the window, its block of 32 is packed, and its original stays
in the slack for one block more. So where a token is depends on the length alone, not on how the tokens arrived, and a
trim of up to 32 tokens leads back to exactly the cache that never saw them.

Eviction rounds take positions out of the packed region; only positions before `floor`, its end at the last round, are
missing. Positions never change: RoPE has been applied to the keys.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import BLOCK

SHORT_PASS = 8  # tokens of a pass that see each what it would have seen alone, as speculative decoding requires
SCALE_TOKENS = 128  # first tokens whose keys and queries give the scale of normalized keys
# Length from which normalized keys are packed: queries come after their keys, and a short pass must not need its own.
SCALE_READY = SCALE_TOKENS + SHORT_PASS
FULL_STEP = 2 * BLOCK  # tokens by which the full-precision buffer grows while nothing is packed


@dataclass(frozen=True, kw_only=True)
class RegionSizes:
    """The sizes of the regions, and the arithmetic that follows from them while nothing is evicted."""

    sinks: int  # first tokens in full precision
    window: int  # last tokens in full precision, at least one: attention needs the newest token unpacked
    normalize: bool = False  # whether keys are normalized, so that nothing is packed before SCALE_READY

    def packed_until(self, length: int) -> int:
        """Return the position before which tokens are packed after `length` tokens: a multiple of BLOCK, or sinks."""
        packed = max(self.sinks, (length - self.window) // BLOCK * BLOCK)
        return self.sinks if self.normalize and packed + self.window < SCALE_READY else packed

    @property
    def first_packed(self) -> int:
        """The least length at which tokens are packed."""
        block = self.sinks // BLOCK * BLOCK + BLOCK
        if self.normalize:
            block = max(block, -(-(SCALE_READY - self.window) // BLOCK) * BLOCK)
        return block + self.window

    def originals_from(self, packed: int) -> int:
        """Return the position from which originals are kept when tokens before `packed` are packed."""
        return self.packed_until(packed + self.window - BLOCK)

    def needed_from(self, length: int) -> int:
        """Return the position from which no token may be missing after a trim to `length`.

        It is the start of an archived block; these are counted from the sinks.
        """
        return self.sinks + max(0, length - self.window - self.sinks) // BLOCK * BLOCK

    def full_capacity(self, packed: int, length: int) -> int:
        """Return the tokens that the full-precision buffer has room for.

        Once something is packed: sinks, the window, the rest of a block, and a block of new tokens. Before, it grows.
        """
        if packed > self.sinks:
            return self.sinks + self.window + 2 * BLOCK
        return -(-length // FULL_STEP) * FULL_STEP

    @property
    def mean_tokens(self) -> int:
        """First tokens of a block of keys that its mean is taken of: those that are there when it is first packed."""
        return min(MEAN_TOKENS, BLOCK - self.sinks % BLOCK + self.window)


@dataclass(frozen=True, eq=False)
class RegionMap:
    """The positions that one layer stores, by region."""

    sizes: RegionSizes
    length: int  # tokens seen, evicted ones included
    originals: int  # position from which originals of packed tokens are in the slack
    evicted: int = 0  # number of evicted tokens
    floor: int = 0  # end of the packed region at the last eviction round; later positions are all there
    # Positions between sinks and floor that were not evicted, ascending, int64 [N].
    retained: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def empty(cls, sizes: RegionSizes) -> "RegionMap":
        return cls(sizes, 0, sizes.sinks)

    @property
    def positions(self) -> np.ndarray:
        """Positions of the stored tokens, ascending, int64 [N]."""
        sinks = min(self.sizes.sinks, self.length)
        return np.concatenate([np.arange(sinks), self.retained, np.arange(max(self.floor, sinks), self.length)])

    @property
    def stored(self) -> int:
        """Number of stored tokens."""
        return self.length - self.evicted

    def packed_until(self, length: int) -> int:
        """Return the position before which tokens are packed at a length: by the sizes, or for want of originals."""
        return max(self.sizes.packed_until(length), self.originals)

    def stored_before(self, position: int) -> int:
        """Return how many tokens are stored between the sinks and a position."""
        if position < self.floor:
            return int(np.searchsorted(self.retained, position))
        return position - self.sizes.sinks - self.evicted

    def full_index(self, position: int, window_start: int) -> int:
        """Return the index of a position in a full-precision buffer: sinks, then the positions from `window_start`."""
        sinks = self.sizes.sinks
        return position if position < sinks else sinks + position - window_start

    def missing(self, start: int, stop: int) -> np.ndarray:
        """Return the evicted positions of [start, stop), ascending, int64 [n]; `start` is not before the sinks' end."""
        return np.setdiff1d(np.arange(start, min(stop, self.floor)), self.retained, assume_unique=True)

    def mean_blocks(self, packed: int) -> np.ndarray:
        """Return the numbers of the blocks of MEAN_TOKENS keys that have a mean when tokens before `packed` are packed.

        Those with a token that was not evicted, and all into which tokens from the floor on are or will be packed:
        int64 [n], ascending.
        """
        sinks = self.sizes.sinks
        start = max(self.floor, sinks) - sinks
        later = np.arange(start // MEAN_TOKENS, -(-(packed - sinks) // MEAN_TOKENS))
        numbers = np.concatenate([(self.retained - sinks) // MEAN_TOKENS, later])
        return numbers[np.diff(numbers, prepend=-1) > 0]

    def without_evictions(self) -> "RegionMap":
        """Return the map as if all positions were stored."""
        return RegionMap(self.sizes, self.length, self.originals)

    def grown_to(self, length: int) -> "RegionMap":
        return replace(self, length=length)

    def trimmed_to(self, length: int) -> "RegionMap":
        """Return the map as if no token had ever followed position `length`."""
        sinks = self.sizes.sinks
        originals = max(sinks, min(self.originals, length))
        floor, retained = min(self.floor, length), self.retained[self.retained < length]
        evicted = floor - sinks - len(retained)
        if evicted <= 0:
            return RegionMap(self.sizes, length, originals)
        return replace(self, length=length, originals=originals, evicted=evicted, floor=floor, retained=retained)

    def with_packed(self, positions: np.ndarray, packed: int) -> "RegionMap":
        """Return the map after a round; `positions` of [sinks, packed) were not evicted, ascending int64 [N].

        Originals of packed tokens are given up: a trim would lead back to rows that are gone.
        """
        evicted = packed - self.sizes.sinks - len(positions)
        if not evicted:
            return RegionMap(self.sizes, self.length, packed)
        return RegionMap(self.sizes, self.length, packed, evicted, packed, positions)
