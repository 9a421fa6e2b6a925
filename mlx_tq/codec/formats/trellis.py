"""Trellis formats `tcq4`, `tcq3`, `tcq2`: TurboQuant whose codes are paths through a trellis.

The codes of a vector are one ring of bits. A value's *state* is the last WINDOW bits of the ring up to the end of its
own bits, and a table has the level of each state: so any value is decoded by itself, though neighbors share bits.
Viterbi's search finds the ring of least squared error. States that differ only in their last bits, a *group*, have the
same predecessors.

Source: bitshift trellis, Tseng et al., QTIP (2024, arXiv 2406.11235) section 3.1; a ring ("tail-biting"), section 3.2.
"""

from functools import cache
from importlib.resources import files

import mlx.core as mx

from mlx_tq.codec.formats.base import Format
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.packing import plane_count

WINDOW = 8
STATES = 1 << WINDOW
CUT_CONTEXT = 16  # values on either side of the cut that are read to find the state there; all would gain 1 to 3 %
_FORBIDDEN = 1e9  # cost of a state in which a path may not begin; paths through D values of unit variance cost < 25 D
_CHUNK = 512  # vectors that are searched together: their costs stay in a processor's cache


@cache
def all_levels() -> mx.array:
    """Load the level of each state for 1 to 7 bits per value: fp16 [7, STATES].

    `benchmarks/studies/trellis_train.py` made them. What was stored with them is read with them, so they never change.
    """
    stored: dict[str, mx.array] = mx.load(str(files("mlx_tq") / "assets" / "trellis" / "levels.safetensors"))  # type: ignore[assignment]
    return mx.stack([stored[bits] for bits in "1234567"])


@cache
def state_levels(bits: int) -> mx.array:
    return all_levels()[bits - 1].astype(mx.float32)


def search_ring(x: mx.array, levels: mx.array, bits: int, context: int = CUT_CONTEXT) -> mx.array:
    """Return a path whose first state follows its last: fp32 [N, D] -> uint16 [N, D].

    A first search around the cut finds the bits that states share across it, a second begins and ends with them.
    """
    size = x.shape[-1]
    half = min(context, size // 2)
    at_cut = search_path(mx.concatenate([x[:, size - half :], x[:, :half]], axis=-1), levels, bits)[:, half - 1]
    return search_path(x, levels, bits, at_cut % (levels.size >> bits))


def search_path(x: mx.array, levels: mx.array, bits: int, ends: mx.array | None = None) -> mx.array:
    """Return the path of least squared error: fp32 [N, D] -> uint16 [N, D].

    The first state follows the last if `ends` [N] has the group of the first; else both ends are free. The number of a
    candidate stands in the lowest bits of its cost, as in the kernel: one comparison finds both.
    """
    states, branches = levels.size, 1 << bits
    groups = states >> bits
    group = mx.arange(groups)[:, None]
    best = mx.zeros((groups, x.shape[0])) if ends is None else mx.where(group == ends, 0.0, _FORBIDDEN)
    branch = mx.repeat(mx.arange(branches, dtype=mx.uint32), groups)[:, None]
    number = mx.array(branches - 1, mx.uint32)
    choices = []
    for value in mx.contiguous(x.T):
        cost = mx.square(value - levels[:, None]) + mx.repeat(best, branches, axis=0)
        candidates = ((cost.view(mx.uint32) & ~number) | branch).reshape(branches, groups, -1)
        least = candidates.min(axis=0)  # costs are positive, and so in the order of their bits
        choices.append((least & number).astype(mx.uint8))
        best = least.view(mx.float32)
    group = mx.argmin(best, axis=0) if ends is None else ends
    path = []
    for choice in reversed(choices):
        state = group + mx.take_along_axis(choice, group[None], axis=0)[0] * mx.array(groups, mx.uint32)
        path.append(state.astype(mx.uint16))
        group = state >> bits
    return mx.stack(path[::-1], axis=-1)


def pack_states(states: mx.array, bits: int) -> mx.array:
    """Pack the bits of rings: states uint16 [..., D] -> words uint16 [..., D bits / 16].

    A unit is the fewest words that hold whole codes: one, or three for 3 bits; its first value has the highest bits. Of
    U units, word n of unit u is word n U + u of the vector, and value i is dim i U + u: planes, as in `packing`.
    """
    mask, per_unit = (1 << bits) - 1, plane_count(bits)
    units = mx.split(states & mask, per_unit, axis=-1)
    words = []
    for n in range(per_unit * bits // 16):
        word = mx.zeros_like(units[0])
        for i, code in enumerate(units):
            shift = 16 * (n + 1) - bits * (i + 1)  # a code may reach over the end of its word
            if -bits < shift < 16:
                word = word | (code << shift if shift >= 0 else code >> -shift)
        words.append(word)
    return mx.concatenate(words, axis=-1)


def unpack_states(words: list[mx.array], bits: int, axis: int = -1) -> list[mx.array]:
    """Return the states of packed rings in dim order: runs of words, units along `axis` -> planes uint16."""
    runs = [mx.roll(words[-1], 1, axis), *words]
    pairs = [(high.astype(mx.uint32) << 16) | low for high, low in zip(runs[:-1], words, strict=True)]
    planes = []
    for i in range(plane_count(bits)):
        end = bits * (i + 1)
        n = -(-end // 16) - 1  # the word in which the value's bits end
        planes.append(((pairs[n] >> (16 * (n + 1) - end)) & (STATES - 1)).astype(mx.uint16))
    return planes


def encode_rings(t: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Return packed rings of vectors of unit variance [..., D], uint16 [..., D bits / 16], and the levels of codes."""
    if not bits:
        return mx.zeros((*t.shape[:-1], 0), mx.uint16), mx.zeros_like(t)
    levels, per_unit, dim = state_levels(bits), plane_count(bits), t.shape[-1]
    count = t.size // dim
    rings = t.reshape(count, per_unit, dim // per_unit).swapaxes(-1, -2).reshape(count, dim)  # unit by unit
    paths = [search_ring(rings[i : i + _CHUNK], levels, bits) for i in range(0, count, _CHUNK)]
    path = mx.concatenate(paths) if paths else rings.astype(mx.uint16)
    states = path.reshape(count, dim // per_unit, per_unit).swapaxes(-1, -2).reshape(t.shape)
    return pack_states(states, bits), levels[states]


def decode_rings(words: mx.array, bits: int) -> mx.array:
    """Return the levels of packed rings: uint16 [..., D bits / 16] -> fp32 [..., D]."""
    runs = list(mx.split(words, plane_count(bits) * bits // 16, axis=-1))
    return mx.concatenate([state_levels(bits)[states] for states in unpack_states(runs, bits)], axis=-1)


class TrellisCodec(TurboCodec):
    """Stores rings of 2, 3 or 4 bits per value."""

    def quantize(self, t: mx.array) -> tuple[mx.array, mx.array]:
        return encode_rings(t, self.bits)

    def dequantize(self, words: list[mx.array], axis: int = -1) -> list[mx.array]:
        return [state_levels(self.bits)[states] for states in unpack_states(words, self.bits, axis)]


def _trellis_format(bits: int, error: float) -> Format:
    return Format(f"tcq{bits}", bits, error, lambda head_dim, options, dtype: TrellisCodec(head_dim, bits, options))


FORMATS = (_trellis_format(4, 0.00580), _trellis_format(3, 0.0210), _trellis_format(2, 0.0775))
