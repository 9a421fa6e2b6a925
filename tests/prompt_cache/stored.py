"""Caches of a sequence that are driven without a model: every layer stores the same, turned by its number."""

import mlx.core as mx
from cache.tools import random_pair

from mlx_tq.config import Budget, EvictConfig
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.eviction import EvictionPlan
from mlx_tq.prompt_cache.layer_group import LayerGroup
from mlx_tq.prompt_cache.passes import before_pass

KEYS, VALUES = random_pair(700, dtype=mx.float16, dims=(128, 64))
LAYERS = 2


def layers(spec, budget=None, policy="random:trigger=8:granularity=1", count=LAYERS):
    sequence = None
    if budget is not None:
        config = EvictConfig(policy, recall="auto")
        sequence = LayerGroup(EvictionPlan(config, Budget(tokens=budget), count), {})
    return [make_cache(spec, number, sequence) for number in range(count)]


def append(caches, start, stop, step, other=0):
    """Tokens at positions [start, stop): those at the same places of KEYS, or so many behind."""
    for first in range(start, stop, step):
        last = min(first + step, stop)
        before_pass(caches, last - first)
        for number, cache in enumerate(caches):
            keys, values = (mx.roll(x, number, axis=-1)[:, :, first + other : last + other] for x in (KEYS, VALUES))
            cache.append(keys, values)
