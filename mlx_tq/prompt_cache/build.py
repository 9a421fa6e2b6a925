"""Builds caches from a plan: empty ones, or with what the model's own caches hold."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.headwise import HeadwiseKVCache
from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.shadow import ShadowKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.tiered import TieredKVCache
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.policies.policy import CalibratedPolicy
from mlx_tq.prompt_cache.layer_group import LayerGroup
from mlx_tq.prompt_cache.plan import LayerPlan, Plan


def build_caches(plan: Plan, *, shadow: bool = False) -> list[Any]:
    """Return empty caches for the model: compressed where the plan says so, the model's own elsewhere.

    With `shadow`, the model's own attend everywhere, and compressed ones run next to them.
    """
    make = _layer_maker(plan, shadow=shadow)
    return _replace(plan, plan.native_caches(), lambda layer, _: make(layer))


def make_cache(
    spec: CacheSpec, number: int = 0, group: LayerGroup | None = None, *, shadow: bool = False
) -> CompressedKVCache:
    """Return an empty cache of one layer; without a group it keeps all tokens."""
    if spec.head_window:
        if shadow:
            raise ConfigError(
                "shadow mode compares all heads of a layer, and --kv-evict heads keeps different tokens by head. Use "
                "another policy, or --kv-evict none."
            )
        return HeadwiseKVCache(spec, number, group)
    if spec.latent:
        if shadow:
            raise ConfigError(
                "shadow mode compares keys and values, but MLA caches latents. Drop --kv-shadow, and compare "
                "answers with `mlx_tq.evaluate trajectory`."
            )
        return LatentKVCache(spec, number, group)
    cache_class = TieredKVCache if spec.cold else ShadowKVCache if shadow else CompressedKVCache
    return cache_class(spec, number, group)


def adopt_caches(plan: Plan, caches: list[Any]) -> list[Any]:
    """Return compressed caches with what the model's own caches hold, such as those that mlx-lm saved.

    `without_queries` makes their plan.
    """
    if [type(cache).__name__ for cache in caches] != plan.classes:
        raise CacheFormatError(
            f"the saved caches are {sorted({type(cache).__name__ for cache in caches})}; {plan.model_type} has "
            f"{sorted(set(plan.classes))}. Make the file again with this model."
        )
    make = _layer_maker(plan)

    def adopt(layer: LayerPlan, source: Any) -> CompressedKVCache:
        cache = make(layer)
        if not source.empty():
            group, cache.group = cache.group, None  # there is no forward pass to announce
            cache.append(source.keys[:, :, : source.offset], source.values[:, :, : source.offset])
            cache.stop_learning()  # the queries of these tokens are not known
            cache.group = group
            mx.eval(cache.state)
        return cache

    return _replace(plan, caches, adopt)


def decode_caches(fresh: list[Any], caches: list[Any]) -> list[Any]:
    """Decode compressed caches into mlx-lm's own: the way back from `adopt_caches`.

    `fresh` are empty caches of the model. Caches that are not compressed are returned as they are.
    """

    def decode(native: Any, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(decode, native.caches, cache.caches))
        if not isinstance(cache, CompressedKVCache):
            return cache
        if cache.regions.evicted:
            raise CacheFormatError(
                f"tokens were evicted from the cache of {cache.offset:,}, and the others keep their positions, which "
                "mlx-lm's own caches cannot say. Read the text again without --kv-evict and --compact."
            )
        if not cache.empty():
            native.update_and_fetch(*(handle.materialize() for handle in cache.keys_and_values()))
        return native

    return list(map(decode, fresh, caches))


def empty_rows(native: Callable[[], list[Any]], batch: Sequence[Any]) -> list[Any]:
    """Return empty caches of one sequence, stored as those of a batch, but without eviction."""

    def empty(native_cache: Any, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(empty, native_cache.caches, cache.caches))
        return make_cache(cache.rows[0].spec) if isinstance(cache, BatchCompressedKVCache) else native_cache

    return list(map(empty, native(), batch))


def _layer_maker(plan: Plan, *, shadow: bool = False) -> Callable[[LayerPlan], CompressedKVCache]:
    """Return a function that creates each layer's cache for one sequence."""
    eviction = plan.eviction
    if eviction is None:
        return lambda layer: make_cache(layer.spec, shadow=shadow)
    evicting = [layer for layer in plan.layers if layer.evicts]
    numbers = {(layer.slot.index, layer.slot.part): number for number, layer in enumerate(evicting)}
    policy, calibrators = eviction.config.policy, {}
    if isinstance(policy, CalibratedPolicy):
        calibrators = {
            number: policy.make_calibrator(layer.rope, layer.queries)
            for number, layer in enumerate(plan.layers)
            if layer.rope is not None
        }
    group = LayerGroup(eviction, calibrators, ranks=plan.ranks)

    def make(layer: LayerPlan) -> CompressedKVCache:
        if not layer.evicts:
            return make_cache(layer.spec, shadow=shadow)
        return make_cache(layer.spec, numbers[layer.slot.index, layer.slot.part], group, shadow=shadow)

    return make


def _replace(plan: Plan, caches: list[Any], make: Callable[[LayerPlan, Any], CompressedKVCache]) -> list[Any]:
    """Replace each planned cache by what `make` returns for it."""
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
