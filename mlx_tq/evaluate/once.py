"""One reading of a text for all settings: nothing leaves while it is read, and copies evict in one round afterwards.

As kvpress measures. Beside rounds in the middle of reading it takes a fraction of the time, and differences between
settings are those of their choice alone: the keys are the same.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.asking import read_text
from mlx_tq.evaluate.draws import draw_anew
from mlx_tq.policies import CalibratedPolicy, ExpectedAttention, Recency, TriAttention
from mlx_tq.policies.policy import TEXT
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.passes import before_pass, sequence_in
from mlx_tq.prompt_cache.plan import Plan

# Makes caches that hold a text, from its tokens and its number.
Make = Callable[[list[int], int], list[Any]]


class Readings:
    """Texts that were read under `configs`, which may differ in sinks and eviction."""

    def __init__(self, model: Any, plan: Callable[[KVConfig], Plan], configs: Sequence[KVConfig], step: int) -> None:
        """Plan all of them, with the model's `sequence.compressed.planner`.

        Raises:
            ConfigError: one calibrates while it reads on, or an eviction that the model cannot meet.
        """
        for config in configs:
            policy = None if config.evict is None else config.evict.policy
            if isinstance(policy, CalibratedPolicy) and policy.recalibrates:
                raise ConfigError(f"the policy {policy} calibrates again while a text is read. Measure without --once.")
        self._model, self._step = model, step
        self._plans = {config: plan(config) for config in configs}
        by_sinks = {config.sinks: config for config in configs}
        self._readers = {sinks: plan(self._reading(config)) for sinks, config in by_sinks.items()}
        self._ids: list[int] = []
        self._read: dict[int, list[Any]] = {}

    def _reading(self, config: KVConfig) -> KVConfig:
        """What reads for all configurations of a sinks: calibrates for each, and evicts nothing."""
        policies = [found.evict.policy for found in self._plans if found.evict is not None]
        calibrated = [policy for policy in policies if isinstance(policy, CalibratedPolicy)]
        if not calibrated:
            return replace(config, evict=EvictConfig(Recency(), "100%", "off"))
        covariance = any(policy.needs_covariance and policy.file is None for policy in calibrated)
        reader = ExpectedAttention if covariance else TriAttention
        return replace(config, evict=EvictConfig(reader(warmup=calibrated[0].warmup, calibration=TEXT), "100%", "off"))

    def maker(self, config: KVConfig) -> Make:
        """Caches that hold a text, from which was evicted as `config` says."""

        def make(ids: list[int], number: int) -> list[Any]:
            caches = under(self._plans[config], self._caches(ids, config.sinks))
            draw_anew(caches, number)
            before_pass(caches, 1)  # the round comes here, once, and not with every question
            return caches

        return make

    def _caches(self, ids: list[int], sinks: int) -> list[Any]:
        if ids != self._ids:
            self._ids, self._read = ids, {}
        if sinks not in self._read:
            caches = build_caches(self._readers[sinks])
            read_text(self._model, ids, caches, self._step)
            self._read[sinks] = caches
        return self._read[sinks]


def under(plan: Plan, caches: list[Any]) -> list[Any]:
    """Copies of caches from which nothing was evicted, under another plan of eviction for the same storage."""
    twins = copy.deepcopy(caches)
    sequence = sequence_in(twins)
    if sequence is None or plan.eviction is None:
        raise ConfigError("only caches that evict can change their eviction.")
    sequence.replan(plan.eviction, [layer.queries for layer in plan.layers])
    return twins
