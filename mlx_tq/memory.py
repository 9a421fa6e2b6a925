"""Bytes that a cache takes at a context length, region by region, from the shape of a model alone."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_tq.cache.coordinator import EvictionPlan
from mlx_tq.cache.factory import LayerPlan, Plan, budget_in_tokens
from mlx_tq.cache.facts import SlotFacts
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.config import BLOCK, DEFAULT_PROFILE, PROFILES, KVConfig
from mlx_tq.errors import ConfigError


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of stored tokens; a cache's `nbytes` adds the spare capacity of its buffers.

    Attributes:
        body: packed tokens; with eviction the most that stay between two forward passes.
        prefix, window: tokens in the model's type; the window includes the block in progress and the slack for trims.
        fp16: all tokens in a 16-bit type, those too that would have been evicted.
    """

    body: int
    prefix: int
    window: int
    fp16: int

    @property
    def total(self) -> int:
        """Bytes of all regions."""
        return self.body + self.prefix + self.window

    @property
    def ratio(self) -> float:
        """How many times smaller than fp16."""
        return self.fp16 / self.total


def memory_report(
    seq_len: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    config: KVConfig = PROFILES[DEFAULT_PROFILE],
) -> MemoryReport:
    """Bytes of `seq_len` tokens of a 16-bit model whose layers all have plain KV caches.

    Raises:
        ConfigError: a size below 1, a head_dim that a format cannot take, or a budget that cannot be met.
    """
    for name, size in (("seq_len", seq_len), ("num_layers", num_layers), ("num_kv_heads", num_kv_heads)):
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be 1 or more.")
    get_format("fp16").check(head_dim)
    vectors = num_layers * num_kv_heads
    full_token = vectors * 2 * head_dim * mx.float16.size
    if config.is_off:
        return MemoryReport(body=0, prefix=0, window=seq_len * full_token, fp16=seq_len * full_token)
    specs = [
        CacheSpec.for_layer(config, layer, config.key_of(layer, num_layers), config.value)
        for layer in range(num_layers)
    ]
    live = _live(seq_len, specs, num_kv_heads, head_dim, config)
    packed = specs[0].packed_until(live)
    prefix = min(config.prefix, live)
    layouts = [spec.layout(head_dim, head_dim, mx.float16) for spec in specs]
    body = sum(spec.body_nbytes(packed, row, mx.float16) for spec, row in zip(specs, layouts, strict=True))
    kept = max(config.prefix, packed - BLOCK)
    return MemoryReport(
        body=body * num_kv_heads,
        prefix=prefix * full_token,
        window=max(0, live - kept) * full_token,
        fp16=seq_len * full_token,
    )


def _live(seq_len: int, specs: list[CacheSpec], heads: int, dim: int, config: KVConfig) -> int:
    """Of `seq_len` tokens, how many are stored at most between two forward passes."""
    if config.evict is None:
        return seq_len
    slots = [SlotFacts(layer, None, heads, dim, dim, "float16", 1.0, shared=False) for layer in range(len(specs))]
    layers = [LayerPlan(slot, spec, "") for slot, spec in zip(slots, specs, strict=True)]
    plan = Plan("", config, [], layers, list)
    return EvictionPlan(config.evict, budget_in_tokens(plan, config.evict), len(layers)).most(seq_len, config.window)
