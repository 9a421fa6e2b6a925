"""Trellis codes: a value's level is looked up by its own bits and those before it, on a ring of bits.

The codes of a vector are one ring. A value's *state* is the last WINDOW bits of the ring up to the end of its own
bits, so any value is decoded by itself, and neighbours share bits. Encoding finds the ring of least squared error by
Viterbi's search. States that differ in their last bits alone have the same predecessors: of each such group one choice
is kept.

Source: bitshift trellis, Tseng et al., QTIP (2024, arXiv 2406.11235) section 3.1; a ring ("tail-biting"), section 3.2.
"""

from functools import cache
from importlib.resources import files

import mlx.core as mx

from mlx_tq.codec.packing import planes_of

WINDOW = 8
STATES = 1 << WINDOW
# Values on either side of the cut that are read to find the state there; all of them would gain 1 to 3 %.
AROUND = 16
# The cost of a state in which a path may not begin: of a path through D values of unit variance it is below 25 D.
FAR = 1e9
# Vectors that are searched together: their costs stay in a processor's cache.
_TOGETHER = 512


@cache
def all_levels() -> mx.array:
    """The level of each state for 2, 3 and 4 bits a value: fp16 [3, STATES].

    Each is the mean of the standard normal values whose path passes through its state (Lloyd's iteration over paths,
    `benchmarks/trellis/train.py`). What was stored with them is read with them, so they never change.
    """
    stored: dict[str, mx.array] = mx.load(str(files("mlx_tq") / "assets" / "trellis" / "levels.safetensors"))  # type: ignore[assignment]
    return mx.stack([stored[bits] for bits in ("2", "3", "4")])


@cache
def levels(bits: int) -> mx.array:
    """The level of each state for so many bits a value: fp32 [STATES]."""
    return all_levels()[bits - 2].astype(mx.float32)


def encode(x: mx.array, bits: int) -> mx.array:
    """The states of the best ring through vectors of unit variance: fp32 [..., D] -> uint16 [..., D], in dim order.

    The ring goes unit by unit, see `pack`.
    """
    if not x.size:
        return x.astype(mx.uint16)
    per_unit = planes_of(bits)
    flat = x.reshape(-1, per_unit, x.shape[-1] // per_unit).swapaxes(-1, -2).reshape(-1, x.shape[-1])
    parts = [ring(flat[i : i + _TOGETHER], levels(bits), bits) for i in range(0, flat.shape[0], _TOGETHER)]
    return mx.concatenate(parts).reshape(flat.shape[0], -1, per_unit).swapaxes(-1, -2).reshape(x.shape)


def ring(x: mx.array, levels: mx.array, bits: int, around: int = AROUND) -> mx.array:
    """A path whose first state follows its last: fp32 [N, D] -> uint16 [N, D].

    A first search around the cut finds the bits that states share across it, a second begins and ends with them.

    Args:
        x: vectors.
        levels: of the states, fp32 [S], a power of two.
        bits: of a value.
        around: values on either side of the cut that the first search reads, at most D / 2.
    """
    size = x.shape[-1]
    half = min(around, size // 2)
    at_cut = search(mx.concatenate([x[:, size - half :], x[:, :half]], axis=-1), levels, bits)[:, half - 1]
    return search(x, levels, bits, at_cut % (levels.size >> bits))


def search(x: mx.array, levels: mx.array, bits: int, ends: mx.array | None = None) -> mx.array:
    """The path of least squared error: fp32 [N, D] -> uint16 [N, D].

    The number of a candidate stands in the lowest bits of its cost, as in the kernel: one comparison finds both.

    Args:
        x: vectors.
        levels: of the states, fp32 [S], a power of two.
        bits: of a value.
        ends: the bits that the last state hands on to the first, all but its first `bits`: [N]; None leaves both free.
    """
    states, branches = levels.size, 1 << bits
    groups = states >> bits
    group = mx.arange(groups)[:, None]
    best = mx.zeros((groups, x.shape[0])) if ends is None else mx.where(group == ends, 0.0, FAR)
    branch = mx.repeat(mx.arange(branches, dtype=mx.uint32), groups)[:, None]
    number = mx.array(branches - 1, mx.uint32)
    chosen = []
    for value in mx.contiguous(x.T):
        cost = mx.square(value - levels[:, None]) + mx.repeat(best, branches, axis=0)
        candidates = ((cost.view(mx.uint32) & ~number) | branch).reshape(branches, groups, -1)
        least = candidates.min(axis=0)  # costs are positive, and so in the order of their bits
        chosen.append((least & number).astype(mx.uint8))
        best = least.view(mx.float32)
    place = mx.argmin(best, axis=0) if ends is None else ends
    path = []
    for choice in reversed(chosen):
        state = place + mx.take_along_axis(choice, place[None], axis=0)[0] * mx.array(groups, mx.uint32)
        path.append(state.astype(mx.uint16))
        place = state >> bits
    return mx.stack(path[::-1], axis=-1)


def pack(states: mx.array, bits: int) -> mx.array:
    """The bits of rings: states uint16 [..., D] -> words uint16 [..., D bits / 16].

    A unit of the ring is the fewest words that hold whole codes: one, or three for 3 bits; its first value's bits are
    the highest. Of U units, word n of unit u is word n U + u of the vector, and value i of it is dim i U + u. So a
    decoder takes planes of dims from runs of words, as it does of `packing`.
    """
    mask, per_unit = (1 << bits) - 1, planes_of(bits)
    units = mx.split(states & mask, per_unit, axis=-1)
    words = []
    for n in range(planes_of(bits) * bits // 16):
        word = mx.zeros_like(units[0])
        for i, code in enumerate(units):
            shift = 16 * (n + 1) - bits * (i + 1)  # a code may reach over the end of its word
            if -bits < shift < 16:
                word = word | (code << shift if shift >= 0 else code >> -shift)
        words.append(word)
    return mx.concatenate(words, axis=-1)


def unpack(words: list[mx.array], bits: int, axis: int = -1) -> list[mx.array]:
    """The states of packed rings, in dim order: the runs of words, units along `axis` -> planes uint16 alike."""
    before = mx.roll(words[-1], 1, axis)
    planes = []
    runs = [before, *words]
    pairs = [(high.astype(mx.uint32) << 16) | low for high, low in zip(runs[:-1], words, strict=True)]
    for i in range(planes_of(bits)):
        end = bits * (i + 1)
        n = -(-end // 16) - 1  # the word in which the value's bits end
        planes.append(((pairs[n] >> (16 * (n + 1) - end)) & (STATES - 1)).astype(mx.uint16))
    return planes
