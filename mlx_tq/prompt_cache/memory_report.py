"""What a cache takes at a context length, from the shape of a model alone."""

from dataclasses import dataclass, replace

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import SlotFacts
from mlx_tq.prompt_cache.eviction import EvictionPlan
from mlx_tq.prompt_cache.footprint import layer_footprint, native_bytes
from mlx_tq.prompt_cache.plan import LayerPlan, Plan, budget_in_tokens


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of stored tokens; a cache's `nbytes` adds the spare capacity of its buffers.

    Attributes:
        body: packed tokens; with eviction the most that stay between two forward passes.
        sinks, window: tokens in the model's type; the window includes the block in progress and the slack for trims.
        fp16: all tokens in a 16-bit type, those too that would have been evicted.
    """

    body: int
    sinks: int
    window: int
    fp16: int

    @property
    def total(self) -> int:
        """Bytes of all regions."""
        return self.body + self.sinks + self.window

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
    get_format("fp16").bytes_per_vector(head_dim)  # refuses a head_dim that cannot be stored
    slots = [
        SlotFacts(layer, None, num_kv_heads, head_dim, head_dim, "float16", 1.0, shared=False)
        for layer in range(num_layers)
    ]
    full = sum(native_bytes(slot, seq_len) for slot in slots)
    if config.is_off:
        return MemoryReport(body=0, sinks=0, window=full, fp16=full)
    layers = [
        LayerPlan(slot, CacheSpec.for_layer(config, slot.index, *config.formats_of(slot.index, num_layers)), "")
        for slot in slots
    ]
    plan = Plan("", config, [], layers, list)
    if config.evict is not None:
        budget = budget_in_tokens(plan, config.evict)
        plan = replace(plan, eviction=EvictionPlan(config.evict, budget, num_layers))
    found = [layer_footprint(each.slot, each.spec, plan.live(seq_len), plan.left(seq_len)) for each in layers]
    return MemoryReport(
        body=sum(each.body for each in found),
        sinks=sum(each.sinks for each in found),
        window=sum(each.window for each in found),
        fp16=full,
    )
