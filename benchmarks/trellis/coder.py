"""Trellis-coded quantisation in mlx's operations: a bitshift trellis that bites its tail (Tseng et al., QTIP, 2024).

The codes of a vector are one ring of bits. The state of a value is the last `window` bits of it up to the value's own
`bits`, and its level is what a table has at that state. So any value is decoded by itself, and a path through all
values is found by Viterbi's search, in which the states that differ in their last `bits` alone have the same
predecessors: of each such group one choice is kept.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

FAR = 1e9  # the cost of a state in which a path may not begin
_TRAINING = (2048, 128, 12)  # vectors, their values, rounds


@dataclass(frozen=True)
class Trellis:
    """A trellis of 2^window states.

    Attributes:
        bits: of a value.
        window: bits of a state, more than `bits`.
        table: "trained" on Gaussian vectors, or "computed" by a multiplication and a sum of bytes (QTIP's 1MAD).
        around: on either side of the cut, how many values the search for the state at the cut reads; 0 is half of the
            vector, as much as there is.
    """

    bits: int
    window: int
    table: str = "trained"
    around: int = 0

    @property
    def states(self) -> int:
        """How many there are."""
        return 1 << self.window

    @property
    def levels(self) -> mx.array:
        """Of each state: fp32 [states]."""
        return mx.array((trained if self.table == "trained" else computed)(self.bits, self.window))

    def encode(self, x: mx.array) -> mx.array:
        """The states of the best path through vectors of unit variance: fp32 [N, D] -> uint16 [N, D]."""
        size = x.shape[-1]
        half = min(self.around or size // 2, size // 2)
        cut = mx.concatenate([x[:, size - half :], x[:, :half]], axis=-1)
        at_cut = search(cut, self.levels, self.bits)[:, half - 1]
        return search(x, self.levels, self.bits, at_cut)

    def decode(self, states: mx.array) -> mx.array:
        """The levels of a path: fp32 [..., D]."""
        return self.levels[states]


def search(x: mx.array, levels: mx.array, bits: int, ends: mx.array | None = None) -> mx.array:
    """The path of least squared error: fp32 [N, D] -> uint16 [N, D].

    Args:
        x: vectors.
        levels: of the states, fp32 [S].
        bits: of a value.
        ends: the state before the first value and of the last, [N]; None leaves both free.
    """
    count, states = x.shape[0], levels.size
    branches, groups = 1 << bits, states >> bits
    number = mx.arange(states)[None]
    cost = mx.zeros((count, states)) if ends is None else mx.where(number == ends[:, None], 0.0, FAR)
    chosen = []
    for t in range(x.shape[-1]):
        best, choice = cost[:, :groups], mx.zeros((count, groups), mx.uint8)
        for branch in range(1, branches):
            other = cost[:, branch * groups : (branch + 1) * groups]
            choice = mx.where(other < best, mx.array(branch, mx.uint8), choice)
            best = mx.minimum(best, other)
        chosen.append(choice)
        cost = mx.repeat(best, branches, axis=-1) + mx.square(x[:, t : t + 1] - levels)
        if t % 16 == 15:
            mx.eval(cost, chosen)
    state = mx.argmin(cost, axis=-1).astype(mx.uint32) if ends is None else ends.astype(mx.uint32)
    path = []
    for choice in reversed(chosen):
        path.append(state.astype(mx.uint16))
        group = state >> bits
        state = group + mx.take_along_axis(choice, group[:, None], axis=-1)[:, 0].astype(mx.uint32) * groups
    return mx.stack(path[::-1], axis=-1)


@cache
def trained(bits: int, window: int) -> np.ndarray:
    """Lloyd's iteration over paths: the level of a state is the mean of the values that pass through it."""
    rng = np.random.default_rng(0)
    states = 1 << window
    count, size, rounds = _TRAINING
    levels = rng.permutation(np.sort(rng.standard_normal(states))).astype(np.float32)
    for _ in range(rounds):
        x = rng.standard_normal((count, size)).astype(np.float32)
        path = np.array(search(mx.array(x), mx.array(levels), bits)).ravel()
        number = np.bincount(path, minlength=states)
        mean = np.bincount(path, x.ravel(), minlength=states) / np.maximum(number, 1)
        levels = np.where(number > 0, mean, levels).astype(np.float32)
    return levels


@cache
def computed(bits: int, window: int) -> np.ndarray:
    """1MAD: the sum of the bytes of 34038481 s + 76625530, centred and scaled; the same for all `bits`."""
    state = np.arange(1 << window, dtype=np.uint64)
    hashed = (state * 34038481 + 76625530) & 0xFFFFFFFF
    total = sum((hashed >> shift & 255 for shift in (0, 8, 16, 24)), np.zeros_like(state)).astype(np.float64)
    return ((total - total.mean()) / total.std()).astype(np.float32)
