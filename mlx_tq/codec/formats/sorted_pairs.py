"""Formats `stcq4`, `stcq3`, `stcq2` of keys: trellis codes with more bits for dims that matter more to the scores.

The error of a key matters as (q . error)^2. Normalized keys and their queries have the same energy in each RoPE pair,
and most of it is in a few pairs. So the dims of a head are sorted by energy and cut into groups of GROUP dims. A group
is divided by its expected size, rotated by itself, and stored as a ring of trellis codes of its own width, from none to
LARGEST_WIDTH bits. The mean width of a head is the format's. A vector still has one scale.

Order, sizes and widths follow from a cache's first keys. Without them all groups have the same width.
"""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.formats.trellis import decode_rings, encode_rings
from mlx_tq.codec.formats.turbo import LARGEST_RATIO, TurboCodec
from mlx_tq.codec.grouped_rotation import GroupedRotation
from mlx_tq.codec.rotation import get_rotation, pairwise_sum
from mlx_tq.errors import CacheFormatError

GROUP = 32  # dims; shorter rings of codes lose more at their cut
LARGEST_WIDTH = 7
# Squared error of a Gaussian value in a ring of GROUP codes, by width.
ERRORS = (1.0, 0.322, 0.0815, 0.0217, 0.00597, 0.00166, 0.00047, 0.000129)
_FLOOR = 1e-4  # least mean square of a dim, in that of its head


@dataclass(frozen=True, eq=False)
class Groups:
    """How the keys of each head are cut into G groups."""

    order: np.ndarray  # of dims, uint16 [B, H, D]
    sizes: np.ndarray  # expected rms of each group's dims, fp32 [B, H, G]
    widths: np.ndarray  # bits of a code, falling, int32 [B, H, G]
    bits: int  # mean width

    @classmethod
    def equal(cls, head_dim: int, bits: int) -> "Groups":
        """Return groups of one head that differ in nothing."""
        count = head_dim // GROUP
        order, ones = np.arange(head_dim, dtype=np.uint16)[None, None], np.ones((1, 1, count), np.float32)
        return cls(order, ones, np.full((1, 1, count), bits, np.int32), bits)

    @classmethod
    def learn(cls, keys: np.ndarray, pairs: tuple[tuple[int, int], ...], bits: int) -> "Groups":
        """Sort dims by the energy of normalized keys [B, H, n, D]; a head that is not finite keeps its order."""
        energies = np.square(keys.astype(np.float64)).mean(axis=2)
        energies[~np.isfinite(energies).all(axis=-1)] = 1
        first, second = np.array(pairs, int).reshape(-1, 2).T
        energies[..., first] = energies[..., second] = (energies[..., first] + energies[..., second]) / 2
        energies = np.maximum(energies, np.maximum(_FLOOR * energies.mean(axis=-1, keepdims=True), 1e-30))
        energies /= energies.mean(axis=-1, keepdims=True)
        order = np.argsort(-energies, axis=-1, kind="stable")
        groups = np.take_along_axis(energies, order, axis=-1).reshape(*order.shape[:2], -1, GROUP)
        sizes = np.sqrt(groups.mean(axis=-1)).astype(np.float16).astype(np.float32)
        return cls(order.astype(np.uint16), sizes, choose_widths(groups, bits), bits)

    @classmethod
    def unpack(cls, learned: mx.array, head_dim: int, bits: int) -> "Groups":
        """Invert `packed`; raise CacheFormatError if the array cannot come from there."""
        count = head_dim // GROUP
        if learned.dtype != mx.uint16 or learned.ndim != 3 or learned.shape[2] != head_dim + 2 * count:
            raise CacheFormatError(f"the groups of keys are {learned.dtype} {learned.shape}; the file is damaged.")
        order, sizes, widths = np.split(np.array(learned), [head_dim, head_dim + count], axis=-1)
        groups = cls(order, sizes.view(np.float16).astype(np.float32), widths.astype(np.int32), bits)
        if not (
            (np.sort(order, axis=-1) == np.arange(head_dim)).all()
            and (groups.sizes > 0).all()
            and np.isfinite(groups.sizes).all()
            and (np.diff(groups.widths, axis=-1) <= 0).all()
            and (groups.widths <= LARGEST_WIDTH).all()
            and (groups.widths.sum(axis=-1) == bits * count).all()
        ):
            raise CacheFormatError("the groups of keys contradict themselves; the file is damaged.")
        return groups

    @property
    def packed(self) -> mx.array:
        """Everything in one array, uint16 [B, H, D + 2 G]."""
        sizes = self.sizes.astype(np.float16).view(np.uint16)
        return mx.array(np.concatenate([self.order, sizes, self.widths], axis=-1).astype(np.uint16))

    @cached_property
    def placed(self) -> mx.array:
        """`packed`, with eight times the number of a group's first word added to its width."""
        firsts = GROUP // 16 * (self.widths.cumsum(axis=-1) - self.widths)
        return Groups(self.order, self.sizes, self.widths + 8 * firsts, self.bits).packed

    @cached_property
    def weights(self) -> np.ndarray:
        """How much the error of a group counts in scores, up to a factor: fp32 [B, H, G], 0 without codes."""
        return np.where(self.widths > 0, np.square(np.square(self.sizes)), 0).astype(np.float32)

    @cached_property
    def factors(self) -> np.ndarray:
        """One over the size of each dim's group, in the order of the vector: fp32 [B, H, D]."""
        sorted_factors = np.repeat(1 / self.sizes, GROUP, axis=-1)
        return np.take_along_axis(sorted_factors, np.argsort(self.order, axis=-1), axis=-1).astype(np.float32)

    @cached_property
    def rings(self) -> dict[int, np.ndarray]:
        """The numbers of the groups of each width, among those of all heads."""
        return {width: np.flatnonzero(self.widths == width) for width in sorted({*self.widths.ravel().tolist()})}

    @cached_property
    def words(self) -> np.ndarray:
        """The places of the words of `rings`, one after another, among those of all heads."""
        counts = (GROUP // 16 * self.widths).ravel()
        starts = counts.cumsum() - counts
        places = [starts[numbers, None] + np.arange(GROUP // 16 * width) for width, numbers in self.rings.items()]
        return np.concatenate([of_width.ravel() for of_width in places])


def choose_widths(energies: np.ndarray, bits: int) -> np.ndarray:
    """Return the widths, of mean `bits`, that lose least; of groups whose dims have energies [B, H, G, GROUP].

    A rotation spreads errors over a group, but what is not stored is missing in its own dims.
    """
    losses = np.square(energies.mean(axis=-1, keepdims=True)) * ERRORS
    losses[..., 0] = np.square(energies).mean(axis=-1)
    gains = -np.diff(losses, append=losses[..., -1:])  # of one bit more; they fall, so the largest one first is best
    widths = np.zeros(gains.shape[:-1], np.int32)
    for _ in range(bits * widths.shape[-1]):
        best = np.take_along_axis(gains, widths[..., None], axis=-1)[..., 0].argmax(axis=-1)
        widths += np.arange(widths.shape[-1]) == best[..., None]
    return widths


class SortedCodec(TurboCodec):
    """Stores rings of codes, group after group. Vectors are [B, H, S, D]; of any shape until it is fitted."""

    rotation: GroupedRotation

    def __init__(self, head_dim: int, bits: int, options: CodecOptions, groups: Groups | None = None) -> None:
        super().__init__(head_dim, bits, options)
        self.groups = Groups.equal(head_dim, bits) if groups is None else groups
        self.learned = None if groups is None else groups.packed
        self.learned_bytes = 2 * (head_dim + 2 * head_dim // GROUP)
        self._options = options
        parts = [get_rotation(options.rotation, GROUP, options.seed)] * (head_dim // GROUP)
        self.rotation = GroupedRotation(parts, None if groups is None else mx.array(groups.order))
        # Of each dim, in order: fp32 [B, H, 1, D].
        self.sizes, self._weights = (
            mx.array(np.repeat(x, GROUP, axis=-1))[:, :, None] for x in (self.groups.sizes, self.groups.weights)
        )
        self._factors = mx.array(self.groups.factors)[:, :, None]

    def fit(self, x: mx.array) -> "SortedCodec":
        half = self.head_dim // 2
        pairs = self._options.pairs or tuple((i, i + half) for i in range(half))
        return self._with_groups(Groups.learn(np.array(x.astype(mx.float32)), pairs, self.bits))

    def restore(self, learned: mx.array) -> "SortedCodec":
        return self._with_groups(Groups.unpack(learned, self.head_dim, self.bits))

    def encode(self, x: mx.array) -> Encoded:
        vectors = x.reshape(1, 1, x.size // self.head_dim, self.head_dim) if self.learned is None else x
        codes, scale = self.encode_clipped(mx.clip(vectors.astype(mx.float32), -FP16_MAX, FP16_MAX) * self._factors)
        assert scale is not None  # noqa: S101 - tells the type checker: every vector has one
        return Encoded(codes.reshape(*x.shape[:-1], self.words), scale.reshape(x.shape[:-1]))

    def quantize(self, t: mx.array) -> tuple[mx.array, mx.array]:
        rings = _side_by_side(t).reshape(t.shape[2], self.groups.widths.size, GROUP)
        encoded = [encode_rings(rings[:, mx.array(numbers)], width) for width, numbers in self.groups.rings.items()]
        words = mx.concatenate([mx.flatten(part, 1) for part, _ in encoded], axis=1)
        words = mx.take(words, mx.array(np.argsort(self.groups.words)), axis=1)
        return _by_head(words, t.shape), _by_head(self._in_order([levels for _, levels in encoded]), t.shape)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        by_head = codes.reshape(1, 1, codes.size // self.words, self.words) if self.learned is None else codes
        words, start, levels = mx.take(_side_by_side(by_head), mx.array(self.groups.words), axis=1), 0, []
        for width, numbers in self.groups.rings.items():
            stop = start + numbers.size * GROUP // 16 * width
            rings = words[:, start:stop].reshape(words.shape[0], numbers.size, GROUP // 16 * width)
            levels.append(decode_rings(rings, width) if width else mx.zeros((*rings.shape[:2], GROUP)))
            start = stop
        values = _by_head(self._in_order(levels), by_head.shape) * self.sizes
        return [values.reshape(*codes.shape[:-1], self.head_dim)]

    def decode_columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        return Codec.decode_columns(self, codes)

    def _in_order(self, levels: list[mx.array]) -> mx.array:
        """Put the levels of `rings` [S, rings, GROUP] in the order of groups: [S, B H D]."""
        numbers = np.concatenate([*self.groups.rings.values()])
        joined = mx.take(mx.concatenate(levels, axis=1), mx.array(np.argsort(numbers)), axis=1)
        return mx.flatten(joined, 1)

    def _scale(self, norm: mx.array, y: mx.array, codeword: mx.array) -> mx.array:
        if self.rule == "raw":
            return norm
        square, product, energy = (pairwise_sum(self._weights * x) for x in (y * y, y * codeword, codeword * codeword))
        if self.rule == "matched":
            return mx.where(square > 0, mx.sqrt(square / energy), 0.0)
        product = mx.where(product < 0, 0.0, product)
        least = mx.where(square > 0, product / energy, 0.0)
        if self.rule == "ls":
            return least
        return mx.where(square > 0, mx.minimum(square / product, LARGEST_RATIO * least), 0.0)

    def _with_groups(self, groups: Groups) -> "SortedCodec":
        return SortedCodec(self.head_dim, self.bits, self._options, groups)


def _side_by_side(x: mx.array) -> mx.array:
    """Put what all heads store of a token next to each other: [B, H, S, n] -> [S, B H n]."""
    batch, heads, count, size = x.shape
    return x.transpose(2, 0, 1, 3).reshape(count, batch * heads * size)


def _by_head(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Invert `_side_by_side`, for an array of that shape but for its last axis."""
    batch, heads, count, _ = shape
    return x.reshape(count, batch, heads, x.shape[1] // (batch * heads)).transpose(1, 2, 0, 3)


def _sorted_format(bits: int, error: float) -> Format:
    reason = "it sorts the dims of a head by what queries read of them, and they read all of a value"
    return Format(
        f"stcq{bits}",
        bits,
        error,
        lambda head_dim, options, dtype: SortedCodec(head_dim, bits, options),
        multiple=GROUP,
        keys_only=reason,
        unsorted=f"tcq{bits}",
    )


FORMATS = (_sorted_format(4, 0.00583), _sorted_format(3, 0.0214), _sorted_format(2, 0.081))
