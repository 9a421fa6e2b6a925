"""Caches of a sequence that are driven without a model: every layer stores the same, turned by its number."""

import mlx.core as mx
from cache.tools import make_spec, random_pair

from mlx_tq.config import Budget, EvictConfig
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.layer_group import EvictionPlan, LayerGroup, begin_pass, layer_group_of

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
        begin_pass(caches, last - first)
        for number, cache in enumerate(caches):
            keys, values = (mx.roll(x, number, axis=-1)[:, :, first + other : last + other] for x in (KEYS, VALUES))
            cache.append(keys, values)


def evicted(spec=None, policy="random:trigger=8:granularity=1", stop=300):
    """Caches of two layers that have read `stop` tokens with a budget of 90, and their group."""
    caches = layers(spec or make_spec("tq4", "tq4", sinks=4, window=20), 90, policy)
    append(caches, 0, stop, 20)
    return caches, layer_group_of(caches)
