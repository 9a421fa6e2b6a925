"""Our own formats as formulas, and the idea that they are compared with: fewer bits in dims that queries ignore.

A key is centered by block means and scaled by pair, as in the package. Then the RoPE pairs of a head are sorted by
rms(q) rms(k) and cut into groups of equal size. A group has its own rotation, width and expected size, all known before
the text; a vector has one fp16 scale, as before. Codes are Lloyd-Max levels, or rings of trellis codes inside a group.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement

import mlx.core as mx
import numpy as np

from benchmarks.quality.rounded_cache import (
    BLOCK,
    LEARNED,
    SINKS,
    Formula,
    LayerRows,
    Reader,
    Rounding,
    attend_exactly,
)
from mlx_tq.codec import Format
from mlx_tq.codec.codebook import midpoints
from mlx_tq.codec.formats import CodecOptions, trellis
from mlx_tq.codec.normalization import compute_key_scale
from mlx_tq.codec.rotation import get_rotation

MEAN_OF = 96  # first rows of a block that its mean is taken of: what the package has when it packs the first of them
SKIP = 4  # first tokens that the package's statistics leave out
WIDTHS = range(6)  # bits of a code in a group
_FLOOR = 0.01  # as in the package: least rms of a pair, in rms of its head
_WEIGHT_STEPS = 8  # steps of a block's log weights per doubling: 8 bits reach over 32 doublings


@dataclass(frozen=True)
class HeadStatistics:
    """What a head's queries and centered keys are like: by dim, or as covariances."""

    queries: np.ndarray  # mean squares, [D]
    keys: np.ndarray  # of keys less the mean of their block, [D]
    query_covariance: np.ndarray | None = None  # [D, D]
    key_covariance: np.ndarray | None = None


@dataclass(frozen=True)
class LayerStatistics:
    heads: list[HeadStatistics]
    oscar: tuple[np.ndarray, np.ndarray]  # covariances of queries, and of values by attention energy, of all heads


@dataclass(frozen=True)
class GroupPlan:
    """How a head's keys are stored: a transform of centered keys, and groups of the transformed dims."""

    transform: np.ndarray  # [D, D], of column vectors
    inverse: np.ndarray
    order: np.ndarray  # of the transformed dims, int [D]
    widths: tuple[int, ...]  # bits of each group
    sizes: np.ndarray  # expected rms of each group's dims, [G]
    weights: np.ndarray  # mean square of the queries that read each group's dims, [G]


def center_keys(keys: mx.array, stop: int) -> tuple[mx.array, mx.array]:
    """Return rows [SINKS, stop) of keys less their block's mean, and the means, rounded to fp16, of these rows."""
    means = []
    for start in range(SINKS, stop, BLOCK):
        mean = keys[:, :, start : start + MEAN_OF].mean(axis=2, keepdims=True)
        mean = mean.astype(mx.float16).astype(mx.float32)
        means.append(mx.broadcast_to(mean, (*keys.shape[:2], min(BLOCK, stop - start), keys.shape[3])))
    joined = mx.concatenate(means, axis=2)
    return keys[:, :, SINKS:stop] - joined, joined


def first_keys(rows: LayerRows) -> mx.array:
    """Return the keys of the first tokens less their mean."""
    keys = rows.keys[:, :, SKIP:LEARNED]
    return keys - keys.mean(axis=2, keepdims=True)


def learn_scale(rows: LayerRows) -> mx.array:
    """Return the package's scale of keys, from the first tokens: [B, H, 1, D]."""
    rms = [mx.sqrt(mx.square(x).mean(axis=2)) for x in (first_keys(rows), rows.queries[:, :, SKIP:LEARNED])]
    return compute_key_scale(*rms, rows.pairs.T.tolist())[:, :, None]


def store_with(fmt: Format, *, keys: bool, normalized: bool = False) -> Rounding:
    """Return the rounding of a format of the package, with its seeds."""

    def rounding(rows: LayerRows) -> mx.array:
        exact = rows.keys if keys else rows.values
        pairs = tuple((first, second) for first, second in rows.pairs.T.tolist())
        options = CodecOptions(seed=42 + 1000 * rows.index + (not keys), scale="unbiased", pairs=pairs)
        codec = fmt.codec(exact.shape[3], options, mx.float32)
        if not normalized:
            return codec.decode(codec.encode(exact[:, :, SINKS : rows.stop]))
        centered, means = center_keys(exact, rows.stop)
        scale = learn_scale(rows)
        codec = codec.fit(first_keys(rows) * scale)
        return codec.decode(codec.encode(centered * scale)) / scale + means

    return rounding


def format_bits(fmt: Format, dim: int) -> float:
    return 8 * fmt.bytes_per_vector(dim) / dim


def calibrate(reader: Reader, texts: Sequence[mx.array]) -> list[LayerStatistics]:
    """Gather the statistics of every layer over texts [1, T]."""
    sums: list[dict[str, np.ndarray]] = [{} for _ in reader.slots]

    def attend(rows: LayerRows, scale: float) -> mx.array:
        add_statistics(sums[rows.number], rows)
        return attend_exactly(rows, scale)

    for text in texts:
        reader.hidden(text, attend)
    return [reduce_statistics(layer) for layer in sums]


def add_statistics(sums: dict[str, np.ndarray], rows: LayerRows) -> None:
    batch, heads, length, dim = rows.keys.shape
    queries = np.array(rows.queries[:, :, SINKS:]).reshape(batch, heads, -1, dim)
    stop = SINKS + (length - SINKS) // BLOCK * BLOCK
    centered = np.array(center_keys(rows.keys, stop)[0])
    keys, values = (np.array(x[:, :, SINKS:]) for x in (rows.keys, rows.values))
    covariance = np.einsum("bhtd,bhte->hde", queries, queries, optimize=True) / (batch * queries.shape[2])
    energies = np.einsum("bhtd,hde,bhte->bht", keys, covariance, keys, optimize=True)
    new = {
        "queries": covariance,
        "keys": np.einsum("bhtd,bhte->hde", centered, centered, optimize=True) / (batch * centered.shape[2]),
        "values": np.einsum("bht,bhtd,bhte->de", energies, values, values, optimize=True),
        "count": np.ones(1),
    }
    for name, value in new.items():
        sums[name] = sums.get(name, 0) + value.astype(np.float64)


def reduce_statistics(sums: dict[str, np.ndarray]) -> LayerStatistics:
    queries, keys = (sums[name] / sums["count"] for name in ("queries", "keys"))
    heads = [HeadStatistics(np.diag(q), np.diag(k), q, k) for q, k in zip(queries, keys, strict=True)]
    return LayerStatistics(heads, (queries.mean(axis=0), sums["values"]))


def first_statistics(rows: LayerRows, text: int) -> list[HeadStatistics]:
    """Return the statistics of each head over the first tokens of a text."""
    heads, dim = rows.keys.shape[1], rows.keys.shape[3]
    keys = np.array(rows.keys[text, :, SKIP:LEARNED], np.float64)
    queries = np.array(rows.queries[text, :, SKIP:LEARNED], np.float64).reshape(heads, -1, dim)
    keys = keys - keys.mean(axis=1, keepdims=True)
    return [HeadStatistics((q**2).mean(axis=0), (k**2).mean(axis=0)) for q, k in zip(queries, keys, strict=True)]


def pool_pairs(squares: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Average mean squares over RoPE pairs, with the package's floor."""
    pooled = squares.copy()
    pooled[pairs[0]] = pooled[pairs[1]] = (squares[pairs[0]] + squares[pairs[1]]) / 2
    return np.asarray(np.maximum(pooled, _FLOOR**2 * pooled.mean()))


@cache
def lloyd_levels(bits: int) -> np.ndarray:
    """Return the best levels of N(0, 1): float32 [2^bits]."""
    samples = np.sort(np.random.default_rng(0).standard_normal(50_000))
    levels = np.quantile(samples, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(100):
        cell = np.searchsorted(midpoints(levels), samples)
        levels = np.bincount(cell, samples) / np.bincount(cell)
    return np.asarray(levels, np.float32)


def lloyd_codeword(t: np.ndarray, bits: int) -> np.ndarray:
    """Return the nearest levels of numbers of unit variance [N, D]."""
    if not bits:
        return np.zeros_like(t)
    levels = lloyd_levels(bits)
    return np.asarray(levels[np.searchsorted(midpoints(levels), t)])


def trellis_codeword(t: np.ndarray, bits: int) -> np.ndarray:
    """Return the levels of the nearest rings."""
    if not bits:
        return np.zeros_like(t)
    levels = trellis.state_levels(bits)
    return np.asarray(np.array(levels)[np.array(trellis.search_ring(mx.array(t), levels, bits))])


Codeword = Callable[[np.ndarray, int], np.ndarray]


@cache
def distortion(codeword: Codeword, bits: int) -> float:
    """Return the mean squared error of N(0, 1)."""
    sample = np.random.default_rng(1).standard_normal((500, 64)).astype(np.float32)
    return float(np.square(sample - codeword(sample, bits)).mean())


def choose_widths(losses: np.ndarray, total: int, codeword: Codeword) -> tuple[int, ...]:
    """Return the widths of groups, falling, that sum up to `total` and lose least."""
    candidates = combinations_with_replacement(reversed(WIDTHS), len(losses))
    errors = np.array([distortion(codeword, bits) for bits in WIDTHS])
    return min((w for w in candidates if sum(w) == total), key=lambda widths: float(losses @ errors[list(widths)]))


def plan_groups(
    head: HeadStatistics, pairs: np.ndarray, count: int, total: int, codeword: Codeword, shrinkage: float | None = None
) -> GroupPlan:
    """Sort the pairs of a head into `count` groups of `total` bits together; or with shrinkage, rotated dims."""
    if shrinkage is None:
        queries, keys = (pool_pairs(squares, pairs) for squares in (head.queries, head.keys))
        scale = (queries / keys) ** 0.25
        transform, inverse = np.diag(scale), np.diag(1 / scale)
        queries, keys = queries / scale**2, keys * scale**2
        first = np.argsort(-(queries * keys)[pairs[0]], kind="stable")
        order = pairs[:, first].T.ravel()
    else:
        transform, inverse, queries = covariance_transform(head, shrinkage)
        keys, order = queries, np.argsort(-queries, kind="stable")
    losses, sizes, weights = np.array(
        [(queries[x] @ keys[x], np.sqrt(keys[x].mean()), queries[x].mean()) for x in np.array_split(order, count)]
    ).T
    return GroupPlan(transform, inverse, order, choose_widths(losses, total, codeword), sizes, weights)


def covariance_transform(head: HeadStatistics, shrinkage: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the transform of keys that makes queries and keys uncorrelated and equal, its inverse, mean squares."""
    roots = []
    for covariance in (head.query_covariance, head.key_covariance):
        assert covariance is not None
        mixed = (1 - shrinkage) * covariance + shrinkage * np.diag(np.diag(covariance))
        mixed += 1e-3 * np.trace(mixed) / len(mixed) * np.eye(len(mixed))
        roots.append(mixed)
    energies, vectors = np.linalg.eigh(roots[0])
    root = (vectors * np.sqrt(energies)) @ vectors.T
    squares, directions = np.linalg.eigh(root @ roots[1] @ root)
    transform = (squares**-0.25)[:, None] * (directions.T @ root)
    return transform, np.linalg.inv(transform), np.sqrt(squares)


def round_groups_of_dims(centered: np.ndarray, plan: GroupPlan, codeword: Codeword, seed: int) -> np.ndarray:
    """Round one head's centered keys [N, D]."""
    count = len(plan.widths)
    ordered = (centered @ plan.transform.T)[:, plan.order].astype(np.float32)
    groups = np.array_split(ordered, count, axis=1)
    sizes, weights = plan.sizes, plan.weights
    norm = np.sqrt(np.mean([((g / s) ** 2).mean(axis=1) for g, s in zip(groups, sizes, strict=True)], axis=0))
    energy, product, codewords = 0.0, 0.0, []
    for group, width, size, weight in zip(groups, plan.widths, sizes, weights, strict=True):
        rotation = get_rotation("wht", group.shape[1], seed)
        unit = group / np.maximum(norm * size, 1e-30)[:, None]
        turned = np.array(rotation.forward(mx.array(unit))) / math.sqrt(group.shape[1])
        word = codeword(turned, width)
        codewords.append(np.array(rotation.inverse(mx.array(word))) * size)
        if width:
            energy = energy + weight * size**2 * (turned * turned).sum(axis=1)
            product = product + weight * size**2 * (turned * word).sum(axis=1)
    scale = norm * np.clip(energy / np.maximum(product, 1e-30), 0, 2)
    found = np.concatenate(codewords, axis=1) * scale.astype(np.float16).astype(np.float32)[:, None]
    restored = np.empty_like(found)
    restored[:, plan.order] = found
    return np.asarray(restored @ plan.inverse.T, np.float32)


def weigh_blocks(centered: mx.array) -> mx.array:
    """Return one over the rms of each dim in its block, in eighths of a doubling: [B, H, N, D]."""
    weights = []
    for start in range(0, centered.shape[2], BLOCK):
        block = centered[:, :, start : start + BLOCK]
        squares = mx.square(block[:, :, :MEAN_OF]).mean(axis=2, keepdims=True)
        squares = mx.maximum(squares, _FLOOR**2 * squares.mean(axis=-1, keepdims=True))
        logs = mx.round(-mx.log2(squares) / 2 * _WEIGHT_STEPS) / _WEIGHT_STEPS
        weights.append(mx.broadcast_to(mx.power(2.0, logs), block.shape))
    return mx.concatenate(weights, axis=2)


@dataclass(frozen=True)
class SortedKeys:
    """Rounds keys by groups of sorted pairs."""

    statistics: Callable[[], list[LayerStatistics]] | None  # None: of the first tokens of each text
    total: int  # bits of all groups together
    codeword: Codeword
    count: int = 4
    shrinkage: float | None = None  # rotates by covariances instead of scaling by pair
    fixed: tuple[int, ...] = ()  # widths of all heads, instead of those that lose least
    by_block: bool = False  # dims are scaled by their own spread in each block too

    def __call__(self, rows: LayerRows) -> mx.array:
        centered, means = center_keys(rows.keys, rows.stop)
        weights = weigh_blocks(centered) if self.by_block else mx.ones((1,))
        scaled = np.array(centered * weights)
        found = np.empty_like(scaled)
        for text in range(len(scaled)):
            for head, statistics in enumerate(self.of_heads(rows, text)):
                if self.by_block:
                    energies = statistics.queries * statistics.keys
                    statistics = HeadStatistics(energies, np.ones_like(energies))
                plan = plan_groups(statistics, rows.pairs, self.count, self.total, self.codeword, self.shrinkage)
                plan = replace(plan, widths=self.fixed or plan.widths)
                seed = 42 + 1000 * rows.index
                found[text, head] = round_groups_of_dims(scaled[text, head], plan, self.codeword, seed)
        return mx.array(found) / weights + means

    def of_heads(self, rows: LayerRows, text: int) -> list[HeadStatistics]:
        return first_statistics(rows, text) if self.statistics is None else self.statistics()[rows.number].heads

    def bits(self, dim: int) -> float:
        return self.total / self.count + 16 / dim + (16 + 8 * self.by_block) / BLOCK


@dataclass(frozen=True)
class MixedValues:
    """Rounds values, rotated as a whole, by groups of given widths."""

    widths: tuple[int, ...]
    codeword: Codeword
    centered: bool = False  # the mean of each head's first tokens is subtracted

    def __call__(self, rows: LayerRows) -> mx.array:
        exact = rows.values[:, :, SINKS : rows.stop]
        means = mx.zeros((1,))
        if self.centered:
            means = rows.values[:, :, SKIP:LEARNED].mean(axis=2, keepdims=True)
        dim, count = exact.shape[3], len(self.widths)
        rotation = get_rotation("wht", dim, 43 + 1000 * rows.index)
        ones = np.ones(count)
        plan = GroupPlan(np.eye(dim), np.eye(dim), np.arange(dim), self.widths, ones, ones)
        turned = np.array(rotation.forward(exact - means)).reshape(-1, dim) / math.sqrt(dim)
        found = round_groups_of_dims(turned, plan, self.codeword, 43 + 1000 * rows.index)
        return rotation.inverse(mx.array(found).reshape(exact.shape)) + means

    def bits(self, dim: int) -> float:
        return sum(self.widths) / len(self.widths) + 16 / dim


def sorted_formula(name: str, keys: SortedKeys, values: MixedValues | Format) -> Formula:
    if isinstance(values, MixedValues):
        stored = values
        return Formula(name, keys, stored, lambda heads, dim: (keys.bits(dim), stored.bits(dim)))
    fmt = values
    return Formula(name, keys, store_with(fmt, keys=False), lambda heads, dim: (keys.bits(dim), format_bits(fmt, dim)))
