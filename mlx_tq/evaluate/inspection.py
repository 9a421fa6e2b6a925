"""Report what a prompt cache holds: packed tokens, tokens of a needle, and what was evicted."""

from dataclasses import replace
from typing import Any

from mlx_tq.errors import ConfigError
from mlx_tq.policies import CalibratedPolicy, Random
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.statistics import tokens_seen


def packed_tokens(caches: list[Any]) -> int:
    """Return how many tokens attention reads packed in a layer; 0 for mlx-lm's own caches."""
    layers = compressed_caches(caches)
    return layers[0].packed_tokens if layers else 0


def count_needle_tokens(caches: list[Any], needle: tuple[int, int]) -> tuple[int, int]:
    """Return how many tokens of a needle a cache holds, and how many of them packed: the minimum over its layers."""
    span = range(*needle)
    layers = compressed_caches(caches)
    if not layers:
        return len(span), 0
    live, packed = [], []
    for layer in layers:
        positions, sinks = list(layer.positions), layer.spec.sinks
        live.append(len(set(span).intersection(positions)))
        packed.append(len(set(span).intersection(positions[sinks : sinks + layer.packed_tokens])))
    return min(live), min(packed)


def eviction_counts(caches: list[Any]) -> tuple[int, float]:
    """Return the number of eviction rounds, and the share of the tokens seen that is still in the cache."""
    sequence, layers = layer_group_of(caches), compressed_caches(caches)
    if sequence is None or not layers[0].offset:
        return 0, 1.0
    return sequence.stats.rounds, layers[0].size() / layers[0].offset


def check_evicted(name: str, caches: list[Any]) -> None:
    """Raise ConfigError if a configuration that evicts did not: its figures would be those of another one."""
    sequence = layer_group_of(caches)
    if sequence is not None and not sequence.stats.rounds:
        config = sequence.plan.config
        policy = config.policy
        warmup = f", a warm-up of {policy.warmup:,} tokens" if isinstance(policy, CalibratedPolicy) else ""
        raise ConfigError(
            f"{name} evicted nothing in {tokens_seen(caches):,} tokens, with a budget of {config.budget}{warmup} and a "
            f"trigger of {policy.trigger}. Use a longer text or a smaller budget, warm-up or trigger."
        )


def reseed_random(caches: list[Any], number: int) -> None:
    """Give the policy `random` another seed for each text; else all texts would lose the same positions."""
    sequence = layer_group_of(caches)
    policy = None if sequence is None else sequence.plan.config.policy
    if sequence is not None and isinstance(policy, Random):
        config = replace(sequence.plan.config, policy=replace(policy, seed=policy.seed + number))
        sequence.plan = replace(sequence.plan, config=config)
