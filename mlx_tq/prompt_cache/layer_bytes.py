"""Bytes of one layer's tokens, region by region: exact while nothing is evicted, else an upper bound.

All sizes that people compare are bytes of allocated arrays: `RegionBytes.allocated` with `native_cache_bytes`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_lm.models.cache import KVCache

from mlx_tq.cache.layer import HEALTH_BYTES
from mlx_tq.cache.normalizer import SKIP
from mlx_tq.cache.packed_rows import STEP, row_capacity
from mlx_tq.cache.region_map import SCALE_READY, SCALE_TOKENS
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.integration.probe import SlotFacts

MEAN_BYTES = 2  # of a number of a mean
_SCALE_BYTES = 4  # of a number of the scale and of the queries' statistics
_INDEX_BYTES = 4  # of the number of a row's mean


@dataclass(frozen=True)
class RegionBytes:
    """Bytes of one sequence."""

    packed: int = 0  # packed tokens and their key normalization
    sinks: int = 0  # in full precision
    window: int = 0  # recent tokens in full precision, the block in progress and the slack for trims included
    allocated: int = 0  # all arrays, with unused capacity, counters and what is learned

    def __add__(self, other: "RegionBytes") -> "RegionBytes":
        return RegionBytes(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Evicted:
    """The known facts of earlier evictions, for an upper bound on the bytes of a layer."""

    seen: int | None  # tokens that the layer has seen; None for any number
    granularity: int  # tokens that are evicted together
    recalled: int = 0  # tokens that may be reloaded


def layer_layout(slot: SlotFacts, spec: CacheSpec) -> RowLayout:
    return spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype))


def cold_layout(slot: SlotFacts, spec: CacheSpec) -> RowLayout:
    return spec.cold_layout(layer_layout(slot, spec), dtype_of(slot.dtype))


def native_row_bytes(slot: SlotFacts, tokens: int) -> int:
    """Return the bytes of tokens in the model's dtype."""
    return slot.heads * tokens * (slot.key_dim + slot.value_dim) * dtype_of(slot.dtype).size


def native_capacity(tokens: int) -> int:
    """Return the tokens that a cache of mlx-lm's has room for after prefilling `tokens` tokens."""
    step: int = KVCache.step
    return -(-tokens // step) * step


def native_cache_bytes(slot: SlotFacts, tokens: int) -> int:
    """Return the bytes that mlx-lm's own cache allocates for `tokens` tokens."""
    return native_row_bytes(slot, native_capacity(tokens))


def layer_bytes(slot: SlotFacts, spec: CacheSpec, tokens: int, evicted: Evicted | None = None) -> RegionBytes:
    """Return the bytes of a layer that stores `tokens` tokens; an upper bound if others were evicted."""
    layout, packed = layer_layout(slot, spec), spec.packed_until(tokens)
    rows = slot.heads * _row_bytes(slot, spec, packed)
    # After an eviction, the tokens that are left fill no whole blocks.
    most = packed
    if evicted is not None:
        most = max(spec.sinks, tokens - spec.window)
        most = most if evicted.seen is None else min(most, spec.packed_until(evicted.seen))
    capacity = slot.heads * _row_bytes(slot, spec, most, row_capacity)
    if evicted is not None and spec.cold and most > spec.sinks:  # tokens of both key formats may be left
        cold = cold_layout(slot, spec).nbytes
        all_cold = row_capacity(most - spec.sinks + BLOCK) * cold
        capacity = max(capacity, slot.heads * all_cold) + slot.heads * STEP * (layout.nbytes + cold)
    learned = slot.heads * layout.learned_bytes if rows else 0
    seen = tokens if evicted is None else evicted.seen
    scale = queries = 0
    if spec.normalize and (seen is None or seen >= SCALE_READY):
        scale = slot.heads * slot.key_dim * _SCALE_BYTES
    if spec.normalize and seen is not None and seen < SCALE_READY + BLOCK:  # no exact trim leads back from there
        queries = slot.heads * slot.key_dim * _SCALE_BYTES * max(0, min(seen, SCALE_TOKENS) - SKIP)
    full = native_row_bytes(slot, spec.full_capacity(most, tokens) + _slack_tokens(spec, packed, evicted))
    means, all_means = (_mean_bytes(slot, spec, end, evicted) for end in (packed, most))
    return RegionBytes(
        packed=rows + means + (scale if rows else 0),
        sinks=native_row_bytes(slot, min(spec.sinks, tokens)),
        window=native_row_bytes(slot, max(0, tokens - spec.originals_from(packed))),
        allocated=capacity + learned + all_means + scale + queries + full + HEALTH_BYTES,
    )


def headwise_bytes(slot: SlotFacts, spec: CacheSpec, seen: int, stored: int, evicted: Evicted | None) -> RegionBytes:
    """Return the bytes of a layer that has seen `seen` tokens, of which some heads keep all and the others `stored`."""
    num_retrieval = len(spec.retrieval_heads)
    total = layer_bytes(replace(slot, heads=slot.heads - num_retrieval), spec, stored, evicted)
    if not num_retrieval:
        return total
    total += layer_bytes(replace(slot, heads=num_retrieval), spec, seen)
    return replace(total, allocated=total.allocated - HEALTH_BYTES)


def _row_bytes(slot: SlotFacts, spec: CacheSpec, packed: int, capacity: Callable[[int], int] = int) -> int:
    """Return the bytes of a KV head's rows when tokens before `packed` are packed, in buffers of a capacity.

    Tokens that went cold last are there in both key formats, for as long as their originals are kept.
    """
    layout = layer_layout(slot, spec)
    cold = spec.cold_until(packed) - spec.sinks
    recent = packed - spec.recent_from(packed)
    nbytes = capacity(recent) * layout.nbytes
    return nbytes + capacity(cold) * cold_layout(slot, spec).nbytes if cold else nbytes


def _mean_bytes(slot: SlotFacts, spec: CacheSpec, packed: int, evicted: Evicted | None) -> int:
    """Return the bytes of the means of keys and, after an eviction, of the number of each row's mean."""
    if not spec.normalize:
        return 0
    rows, per_block = packed - spec.sinks, slot.heads * slot.key_dim * MEAN_BYTES
    if evicted is None:
        return per_block * -(-rows // MEAN_TOKENS)
    # Blocks that are evicted together need not be those that have a mean together, nor those that are recalled.
    size = evicted.granularity
    blocks = rows if size == 1 else 2 * -(-rows // size) + evicted.recalled
    if evicted.seen is not None:
        blocks = min(blocks, -(-(spec.packed_until(evicted.seen) - spec.sinks) // MEAN_TOKENS))
    return per_block * blocks + _INDEX_BYTES * rows


def _slack_tokens(spec: CacheSpec, packed: int, evicted: Evicted | None) -> int:
    """Return the packed tokens whose originals are kept: a block, but at first all normalized ones."""
    if evicted is None:
        return packed - spec.originals_from(packed)
    first = spec.packed_until(SCALE_READY + BLOCK - 1) - spec.sinks if spec.normalize else 0
    return max(BLOCK, first) if evicted.seen is None or evicted.seen < SCALE_READY + 2 * BLOCK else BLOCK
