"""Chance, the control of a measurement: drawn anew for each text, or all would lose the same positions."""

from dataclasses import replace
from typing import Any

from mlx_tq.policies import Random
from mlx_tq.prompt_cache.passes import sequence_in


def draw_anew(caches: list[Any], number: int) -> None:
    """Let caches that evict at random do so from another seed, that of text `number`; others stay as they are."""
    sequence = sequence_in(caches)
    policy = None if sequence is None else sequence.plan.config.policy
    if sequence is not None and isinstance(policy, Random):
        config = replace(sequence.plan.config, policy=replace(policy, seed=policy.seed + number))
        sequence.plan = replace(sequence.plan, config=config)
