"""Bytes of a layer's tokens, region by region: the one place where they are computed."""

from dataclasses import dataclass

from mlx_tq.cache.buffers import STEP, body_capacity
from mlx_tq.cache.layer import HEALTH
from mlx_tq.cache.normalizer import SKIP
from mlx_tq.cache.spec import LEARNED, READY, CacheSpec
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.integration.probe import SlotFacts

# Bytes of a value of a mean, of a weight or a statistic, and of the number of a row's mean.
MEAN, WEIGHT, INDEX = 2, 4, 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of one layer for one sequence.

    Attributes:
        body: packed tokens, and what their keys were normalized by.
        sinks, window: tokens in the model's type; the window includes the block in progress and the slack for trims.
        allocated: all arrays: the regions' buffers with unused capacity, counters, and what is learned.
    """

    body: int
    sinks: int
    window: int
    allocated: int


@dataclass(frozen=True)
class Departures:
    """What is known of tokens that left a layer.

    Attributes:
        seen: tokens that went through it, those that left too; None for any number.
        together: how many leave together.
    """

    seen: int | None
    together: int


def layer_layout(slot: SlotFacts, spec: CacheSpec) -> RowLayout:
    """The rows of a layer's body."""
    return spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype))


def native_bytes(slot: SlotFacts, tokens: int) -> int:
    """Bytes of tokens in the model's type."""
    return fp16_bytes(slot, tokens) * dtype_of(slot.dtype).size // 2


def fp16_bytes(slot: SlotFacts, tokens: int) -> int:
    """Bytes of tokens at 16 bits."""
    return slot.heads * tokens * (slot.key_dim + slot.value_dim) * 2


def layer_footprint(slot: SlotFacts, spec: CacheSpec, tokens: int, left: Departures | None = None) -> Footprint:
    """Bytes of a layer that stores `tokens` tokens; of one that has lost others, at most."""
    dtype, layout = dtype_of(slot.dtype), layer_layout(slot, spec)
    packed = spec.packed_until(tokens)
    body = slot.heads * spec.body_nbytes(packed, layout, dtype)
    most = packed if left is None else max(spec.sinks, tokens - spec.window)  # those that stay are no whole blocks
    rows = slot.heads * _row_bytes(slot, spec, most, left)
    learned = slot.heads * layout.learned_bytes if body else 0
    weights = slot.heads * slot.key_dim * WEIGHT if spec.normalize and tokens >= READY else 0
    asked = _asked_bytes(slot, spec, tokens)
    originals = native_bytes(slot, spec.full_capacity(most, tokens) + _slack_tokens(spec, packed, left))
    return Footprint(
        body=body + _mean_bytes(slot, spec, packed, left) + (weights if body else 0),
        sinks=native_bytes(slot, min(spec.sinks, tokens)),
        window=native_bytes(slot, max(0, tokens - spec.originals_from(packed))),
        allocated=rows + learned + _mean_bytes(slot, spec, most, left) + weights + asked + originals + HEALTH,
    )


def _row_bytes(slot: SlotFacts, spec: CacheSpec, packed: int, left: Departures | None) -> int:
    """Bytes of a KV head's buffers of rows; at most, where tokens have left that had keys of two formats."""
    dtype, layout = dtype_of(slot.dtype), layer_layout(slot, spec)
    full = spec.body_nbytes(packed, layout, dtype, body_capacity)
    if left is None or not spec.cold or packed == spec.sinks:
        return full
    cold = spec.cold_layout(layout, dtype).nbytes
    return max(full, body_capacity(packed - spec.sinks + BLOCK) * cold) + STEP * (layout.nbytes + cold)


def _mean_bytes(slot: SlotFacts, spec: CacheSpec, packed: int, left: Departures | None) -> int:
    """Bytes of the means of keys, and of which of them each row has where rows have left."""
    if left is None or not spec.normalize:
        return slot.heads * slot.key_dim * MEAN * spec.blocks(packed)
    rows = packed - spec.sinks
    most = rows if left.together == 1 else 2 * -(-rows // left.together)  # blocks that leave need not be those of means
    blocks = most if left.seen is None else min(most, spec.blocks(spec.packed_until(left.seen)))
    return slot.heads * slot.key_dim * MEAN * blocks + INDEX * rows


def _slack_tokens(spec: CacheSpec, packed: int, left: Departures | None) -> int:
    """Packed tokens whose originals are there: a block; of normalized keys first all that were packed at once."""
    if left is None:
        return packed - spec.originals_from(packed)
    first = spec.packed_until(READY + BLOCK - 1) - spec.sinks if spec.normalize else 0
    return max(BLOCK, first) if left.seen is None or left.seen < READY + 2 * BLOCK else BLOCK


def _asked_bytes(slot: SlotFacts, spec: CacheSpec, tokens: int) -> int:
    """Bytes of the queries' statistics, which are kept until no exact trim leads back to where weights are unknown."""
    if not spec.normalize or tokens >= READY + BLOCK:
        return 0
    return slot.heads * slot.key_dim * WEIGHT * max(0, min(tokens, LEARNED) - SKIP)
