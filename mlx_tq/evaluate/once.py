"""One reading of a text for all settings: nothing leaves while it is read, and copies evict in one round afterwards.

As kvpress measures. Beside rounds in the middle of reading it takes a fraction of the time, and differences between
settings are those of their choice alone: the keys are the same.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.factory import Plan, build_caches, compressed_caches
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.asking import read_text
from mlx_tq.evict.policy import get_policy


class Readings:
    """Texts that were read under `configs`, which may differ in prefix and eviction."""

    def __init__(self, model: Any, plan: Callable[[KVConfig], Plan], configs: Sequence[KVConfig], step: int) -> None:
        """Plan all of them, with the model's `dispatch.planner`.

        Raises:
            ConfigError: one calibrates while it reads on, or an eviction that the model cannot meet.
        """
        for config in configs:
            evict = config.evict
            if evict is not None and (evict.ema or evict.recalibrate):
                raise ConfigError("ema and recalibrate change the scores while a text is read. Measure without --once.")
        self._model, self._step = model, step
        self._plans = {config: plan(config) for config in configs}
        by_prefix = {config.prefix: config for config in configs}
        self._readers = {prefix: plan(self._reading(config)) for prefix, config in by_prefix.items()}
        self._ids: list[int] = []
        self._read: dict[int, list[Any]] = {}

    def _reading(self, config: KVConfig) -> KVConfig:
        """What reads for all configurations of a prefix: calibrates for each, and evicts nothing."""
        evicts = [found.evict for found in self._plans if found.evict is not None]
        asks = [evict for evict in evicts if get_policy(evict).needs_queries]
        covariance = any(evict.aggregation == "expected_attention" and evict.stats is None for evict in asks)
        policy, warmup = ("triattention", asks[0].warmup) if asks else ("recency", 1)
        aggregation = "expected_attention" if covariance else "paper"
        evict = EvictConfig(policy, budget="100%", warmup=warmup, aggregation=aggregation)
        return replace(config, evict=evict)

    def maker(self, config: KVConfig) -> Callable[[list[int]], list[Any]]:
        """Caches that hold a text, from which was evicted as `config` says."""

        def make(ids: list[int]) -> list[Any]:
            caches = under(self._plans[config], self._caches(ids, config.prefix))
            for cache in compressed_caches(caches)[:1]:
                cache.begin(1)  # the round comes here, once, and not with every question
            return caches

        return make

    def _caches(self, ids: list[int], prefix: int) -> list[Any]:
        if ids != self._ids:
            self._ids, self._read = ids, {}
        if prefix not in self._read:
            caches = build_caches(self._readers[prefix])
            read_text(self._model, ids, caches, self._step)
            self._read[prefix] = caches
        return self._read[prefix]


def under(plan: Plan, caches: list[Any]) -> list[Any]:
    """Copies of caches from which nothing was evicted, under another plan of eviction for the same storage."""
    twins = copy.deepcopy(caches)
    for layer, twin in zip(plan.layers, compressed_caches(twins), strict=True):
        if not isinstance(twin, EvictingKVCache) or plan.eviction is None:
            raise ConfigError("only caches that evict can change their eviction.")
        if layer.queries is not None and twin.calibrator is not None:
            twin.calibrator.stats = layer.queries
        twin.coordinator.plan, twin.coordinator.policy = plan.eviction, get_policy(plan.eviction.config)
    return twins
