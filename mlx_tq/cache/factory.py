"""Decide how each layer of a model is stored, say so, and build its caches."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.compressed import HEALTH, STEP, CompressedKVCache
from mlx_tq.cache.coordinator import Coordinator, EvictionPlan
from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.facts import ModelFacts, SlotFacts
from mlx_tq.cache.mixed import MixedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK, COLD, Budget, EvictConfig, KVConfig, parse_budget
from mlx_tq.errors import CacheFormatError, ConfigError, UnsupportedModelError
from mlx_tq.evict.calibration import Calibration
from mlx_tq.evict.policy import get_policy
from mlx_tq.evict.queries import Calibrator, QueryStats
from mlx_tq.evict.rope import Rope, learn_rope
from mlx_tq.kernels.constants import can_run

# What layers are promoted to where low-bit keys would hurt.
_PROMOTED = "q8"


@dataclass(frozen=True)
class LayerPlan:
    """How one plain KV cache is stored.

    Attributes:
        slot: the cache and its sizes.
        spec: its storage.
        note: why it differs from the configuration, or "".
        rope: of the layer, where an eviction policy needs its queries.
        queries: their statistics, where a file gave them.
    """

    slot: SlotFacts
    spec: CacheSpec
    note: str
    rope: Rope | None = None
    queries: QueryStats | None = None

    @property
    def has_kernels(self) -> bool:
        """The GPU kernels have all formats at these sizes; else mlx's operations decode what attention reads."""
        return not self.spec.cold and can_run(self._layout)

    def nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the arrays after `tokens` tokens, unused capacity included."""
        slot, spec = self.slot, self.spec
        packed = spec.packed_until(tokens)
        full = (spec.full_capacity + BLOCK) * (slot.key_dim + slot.value_dim) * dtype_of(slot.dtype).size
        body = spec.body_nbytes(packed, self._layout, dtype_of(slot.dtype), STEP)
        learned = self._layout.learned_bytes if body else 0
        return batch * (slot.heads * (full + body + learned) + HEALTH)

    @property
    def row_bytes(self) -> int:
        """Of a packed token and KV head, a recent one."""
        return self._layout.nbytes

    @property
    def _layout(self) -> RowLayout:
        return self.spec.layout(self.slot.key_dim, self.slot.value_dim, dtype_of(self.slot.dtype))

    def native_nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the same tokens in the model's type."""
        slot = self.slot
        return batch * slot.heads * tokens * (slot.key_dim + slot.value_dim) * dtype_of(slot.dtype).size


@dataclass(frozen=True)
class Plan:
    """How a model's caches are stored.

    Attributes:
        model_type: mlx-lm's name of the architecture.
        config: what was asked for.
        classes: class name of each of the model's own caches; those not in `layers` are kept as they are.
        layers: the compressed ones.
        native_caches: makes a fresh list of the model's own caches.
        eviction: what evicting caches agree on, or None where all tokens stay.
    """

    model_type: str
    config: KVConfig
    classes: list[str]
    layers: list[LayerPlan]
    native_caches: Callable[[], list[Any]]
    eviction: EvictionPlan | None = None

    def live(self, tokens: int) -> int:
        """Of `tokens` tokens, how many are stored at most before a forward pass."""
        return tokens if self.eviction is None else self.eviction.most(tokens, self.config.window)

    def nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the compressed layers after `tokens` tokens, those that were evicted left out."""
        return sum(layer.nbytes(self.live(tokens), batch) for layer in self.layers)

    def native_nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the same layers in the model's type."""
        return sum(layer.native_nbytes(tokens, batch) for layer in self.layers)


def make_plan(facts: ModelFacts, config: KVConfig, calibration: Calibration | None = None) -> Plan:
    """Decide the storage of each plain KV cache.

    Args:
        facts: of the model.
        config: what is asked for.
        calibration: of the model, from a file.

    Raises:
        ConfigError: a head size that a configured format cannot take, or an eviction that the model cannot meet.
        UnsupportedModelError: a model whose tokens the eviction policy cannot score; the message names it.
    """
    typical = statistics.median(slot.key_norm for slot in facts.slots)
    count = len(facts.slots)
    layers = []
    for number, slot in enumerate(facts.slots):
        chosen = key = config.key_of(number, count)
        value, note = config.value, ""
        if min(number, count - 1 - number) < config.boundary:
            key, value, note = _promote(key), _promote(value), "boundary layer"
        elif config.outlier and slot.key_norm > config.outlier * typical:
            key, note = _promote(key), f"key norm {slot.key_norm:.1f} is {slot.key_norm / typical:.1f}x the median"
        if (key, value) == (chosen, config.value):
            note = ""
        spectral = any(get_format(part).keys_only for part in key.split(COLD))
        pairs = _rope_pairs(facts, slot) if spectral else None
        spec = CacheSpec.for_layer(config, slot.index, key, value, shared=slot.shared, pairs=pairs)
        try:
            layout = spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype))
            if spec.cold:
                spec.cold_layout(layout, dtype_of(slot.dtype))
        except ConfigError as error:
            raise ConfigError(f"layer {slot.index} of {facts.model_type}: {error}") from error
        layers.append(LayerPlan(slot, spec, note))
    plan = Plan(facts.model_type, config, facts.classes, layers, facts.native_caches)
    return plan if config.evict is None else _with_eviction(plan, facts, config.evict, calibration)


def _rope_pairs(facts: ModelFacts, slot: SlotFacts) -> tuple[tuple[int, int], ...]:
    """The two dims of each pair that the RoPE of a layer turns: half or interleaved, all dims or some."""
    if slot.rope is None:
        raise UnsupportedModelError(
            f"keys of {facts.model_type} cannot be stored by their RoPE pairs: in layer {slot.index}, {slot.no_rope}. "
            "Use q8 or tq4."
        )
    first, second = np.array(learn_rope(slot.rope, slot.key_dim).pairs).tolist()
    return tuple(zip(first, second, strict=True))


def _with_eviction(plan: Plan, facts: ModelFacts, config: EvictConfig, calibration: Calibration | None) -> Plan:
    name = facts.model_type
    if facts.counts_keys:
        raise UnsupportedModelError(
            f"{name} takes positions from the number of keys it fetched, which eviction changes. Use --kv-evict none."
        )
    source = ""
    if get_policy(config).needs_queries:
        ropes = _learn_ropes(facts)
        source = f"the first {config.warmup:,} tokens"
        found: list[QueryStats | None] = [None] * len(ropes)
        if calibration is not None:
            needs_covariance = config.aggregation == "expected_attention"
            found, source = list(calibration.check(ropes, covariance=needs_covariance)), str(config.stats)
        layers = [
            replace(layer, rope=rope, queries=queries)
            for layer, rope, queries in zip(plan.layers, ropes, found, strict=True)
        ]
        plan = replace(plan, layers=layers)
    budget = budget_in_tokens(plan, config)
    return replace(plan, eviction=EvictionPlan(config, budget, len(plan.layers), facts.positions, source))


def _learn_ropes(facts: ModelFacts) -> list[Rope]:
    """The RoPE of each layer; layers with the same module share what was learned."""
    learned: dict[int, Rope] = {}
    for slot in facts.slots:
        if slot.rope is None:
            raise UnsupportedModelError(
                f"{facts.model_type} cannot be scored by TriAttention: in layer {slot.index}, {slot.no_rope}. Use "
                "another policy, such as --kv-evict knorm, or --kv-evict none."
            )
        if id(slot.rope) not in learned:
            try:
                learned[id(slot.rope)] = learn_rope(slot.rope, slot.key_dim)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{facts.model_type}, layer {slot.index}: {error}") from error
    return [learned[id(slot.rope)] for slot in facts.slots]


def budget_in_tokens(plan: Plan, config: EvictConfig) -> Budget:
    """The budget with bytes turned into the tokens that they hold, counting what gathers before a round.

    Raises:
        ConfigError: the bytes do not hold prefix, window and one round.
    """
    budget = parse_budget(config.budget)
    if budget.nbytes is None:
        return budget
    gathers = config.trigger + BLOCK
    least = plan.config.prefix + plan.config.window + 1
    per_token = sum(layer.slot.heads * layer.row_bytes for layer in plan.layers)
    tokens = least + max(0, budget.nbytes - plan.nbytes(least + gathers)) // per_token
    if plan.nbytes(least + gathers) > budget.nbytes:
        raise ConfigError(
            f"a budget of {budget.nbytes:,} bytes is below the {plan.nbytes(least + gathers):,} that prefix "
            f"{plan.config.prefix}, window {plan.config.window} and a round of {gathers} tokens take. Raise the budget."
        )
    while plan.nbytes(tokens + gathers) > budget.nbytes:
        tokens -= STEP
    return Budget(tokens=max(tokens, least))


def _promote(name: str) -> str:
    least = min(get_format(part).bits for part in name.split(COLD))
    return name if least >= get_format(_PROMOTED).bits else _PROMOTED


def build_caches(plan: Plan) -> list[Any]:
    """Fresh caches for the model: compressed where the plan says so, the model's own elsewhere."""
    make = _maker(plan)
    return _replace(plan, plan.native_caches(), lambda layer, _: make(layer))


def make_cache(spec: CacheSpec) -> CompressedKVCache:
    """An empty cache of one layer that keeps all tokens."""
    return MixedKVCache(spec) if spec.cold else CompressedKVCache(spec)


def _maker(plan: Plan) -> Callable[[LayerPlan], CompressedKVCache]:
    """Makes the caches of one sequence."""
    eviction = plan.eviction
    if eviction is None:
        return lambda layer: make_cache(layer.spec)
    coordinator = Coordinator(eviction)
    numbers = {(layer.slot.index, layer.slot.part): number for number, layer in enumerate(plan.layers)}

    def make(layer: LayerPlan) -> CompressedKVCache:
        calibrator = None
        if layer.rope is not None:
            calibrator = Calibrator(layer.rope, eviction.config, layer.queries)
        return EvictingKVCache(layer.spec, numbers[layer.slot.index, layer.slot.part], coordinator, calibrator)

    return make


def _replace(plan: Plan, caches: list[Any], make: Callable[[LayerPlan, Any], CompressedKVCache]) -> list[Any]:
    """`caches` with each planned one replaced by what `make` returns for it."""
    replaced = list(caches)
    for layer in plan.layers:
        index, part = layer.slot.index, layer.slot.part
        if part is None:
            replaced[index] = make(layer, replaced[index])
        else:
            parts = list(replaced[index].caches)
            parts[part] = make(layer, parts[part])
            replaced[index] = CacheList(*parts)
    return replaced


def adopt_caches(plan: Plan, caches: list[Any]) -> list[Any]:
    """Compressed caches with what the model's own caches hold, such as those that mlx-lm saved.

    Raises:
        CacheFormatError: they are not of this model.
    """
    if [type(cache).__name__ for cache in caches] != plan.classes:
        raise CacheFormatError(
            f"the saved caches are {sorted({type(cache).__name__ for cache in caches})}; {plan.model_type} has "
            f"{sorted(set(plan.classes))}. Make the file again with this model, without --kv-bits."
        )

    make = _maker(plan)

    def adopt(layer: LayerPlan, source: Any) -> CompressedKVCache:
        cache = make(layer)
        if not source.empty():
            cache.append(source.keys[:, :, : source.offset], source.values[:, :, : source.offset])
            mx.eval(cache.state)
        return cache

    return _replace(plan, caches, adopt)


def cache_parts(caches: Sequence[Any]) -> list[Any]:
    """The caches of a prompt cache, those inside a CacheList one by one."""
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]


def compressed_caches(caches: Sequence[Any]) -> list[CompressedKVCache]:
    """The compressed caches of a prompt cache, also those inside a CacheList."""
    return [part for part in cache_parts(caches) if isinstance(part, CompressedKVCache)]
