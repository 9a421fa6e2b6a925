"""Decide how each layer of a model is stored, say so, and build its caches."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.compressed import HEALTH, STEP, CompressedKVCache
from mlx_tq.cache.facts import ModelFacts, SlotFacts
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.codec.formats import get_format
from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError
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
    """

    slot: SlotFacts
    spec: CacheSpec
    note: str

    @property
    def has_kernels(self) -> bool:
        """The GPU kernels have both formats at these sizes; else mlx's operations decode what attention reads."""
        slot = self.slot
        return can_run(self.spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype)))

    def nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the arrays after `tokens` tokens, unused capacity included."""
        slot, spec = self.slot, self.spec
        dtype = dtype_of(slot.dtype)
        layout = spec.layout(slot.key_dim, slot.value_dim, dtype)
        body = spec.packed_until(tokens) - spec.prefix
        full = spec.full_capacity * (slot.key_dim + slot.value_dim) * dtype.size
        return batch * (slot.heads * (full + -(-body // STEP) * STEP * layout.nbytes) + HEALTH)

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
    """

    model_type: str
    config: KVConfig
    classes: list[str]
    layers: list[LayerPlan]
    native_caches: Callable[[], list[Any]]

    def nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the compressed layers after `tokens` tokens."""
        return sum(layer.nbytes(tokens, batch) for layer in self.layers)

    def native_nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the same layers in the model's type."""
        return sum(layer.native_nbytes(tokens, batch) for layer in self.layers)


def make_plan(facts: ModelFacts, config: KVConfig) -> Plan:
    """Decide the storage of each plain KV cache.

    Raises:
        ConfigError: a head size that a configured format cannot take.
    """
    typical = statistics.median(slot.key_norm for slot in facts.slots)
    count = len(facts.slots)
    layers = []
    for number, slot in enumerate(facts.slots):
        key, value, note = config.key, config.value, ""
        if min(number, count - 1 - number) < config.boundary:
            key, value, note = _promote(key), _promote(value), "boundary layer"
        elif config.outlier and slot.key_norm > config.outlier * typical:
            key, note = _promote(key), f"key norm {slot.key_norm:.1f} is {slot.key_norm / typical:.1f}x the median"
        if (key, value) == (config.key, config.value):
            note = ""
        spec = CacheSpec.for_layer(config, slot.index, key, value, shared=slot.shared)
        try:
            spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype))
        except ConfigError as error:
            raise ConfigError(f"layer {slot.index} of {facts.model_type}: {error}") from error
        layers.append(LayerPlan(slot, spec, note))
    return Plan(facts.model_type, config, facts.classes, layers, facts.native_caches)


def _promote(name: str) -> str:
    return name if get_format(name).bits >= get_format(_PROMOTED).bits else _PROMOTED


def build_caches(plan: Plan) -> list[Any]:
    """Fresh caches for the model: compressed where the plan says so, the model's own elsewhere."""
    return _replace(plan, plan.native_caches(), lambda layer, _: CompressedKVCache(layer.spec))


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

    def adopt(layer: LayerPlan, source: Any) -> CompressedKVCache:
        cache = CompressedKVCache(layer.spec)
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
