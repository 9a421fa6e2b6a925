"""When a round comes, how much leaves, and that what stays is what was there, in every format."""

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from mlx_tq.cache import BatchCompressedKVCache
from mlx_tq.cache.factory import build_caches
from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.dispatch import plan_caches

PREFIX, WINDOW, TRIGGER = 4, 24, 8
LENGTH = 260
MODEL = build("qwen3")  # heads of 128 dims, which every format takes


def plan_of(key="q8", value="q8", budget=80, trigger=TRIGGER, evicts=True):
    evict = EvictConfig(policy="random", budget=budget, trigger=trigger) if evicts else None
    return plan_caches(MODEL, KVConfig(key=key, value=value, prefix=PREFIX, window=WINDOW, evict=evict))


def vectors(layers, heads, dim):
    """Keys and values of each layer, [1, H, LENGTH, D]."""
    rng = np.random.default_rng(7)
    shape = (layers, 2, 1, heads, LENGTH, dim)
    return [[mx.array(x) for x in pair] for pair in rng.standard_normal(shape).astype(np.float32)]


def step(caches, data, count):
    """What a forward pass does: the first mask, then each layer takes its part."""
    start = caches[0].offset
    caches[0].make_mask(count)
    for cache, pair in zip(caches, data, strict=True):
        cache.append(*(x[:, :, start : start + count] for x in pair))


@pytest.mark.parametrize("chunk", [1, 40])
@pytest.mark.parametrize("trigger", [1, 33])
@pytest.mark.parametrize("budget", [80, PREFIX + WINDOW + 1, "50%", "80%"])
def test_a_round_comes_above_budget_and_trigger_and_takes_the_excess(budget, trigger, chunk):
    plan = plan_of(budget=budget, trigger=trigger)
    caches = build_caches(plan)
    slot = plan.layers[0].slot
    data = vectors(len(caches), slot.heads, slot.key_dim)
    live = rounds = 0
    for start in range(0, LENGTH - chunk + 1, chunk):
        allowed = max(int(float(budget.rstrip("%")) / 100 * start) if isinstance(budget, str) else budget, WINDOW + 1)
        if live > allowed + trigger:
            packed = caches[0].body_positions
            gone = min(live - allowed, int((packed < start - WINDOW).sum()))
            live -= gone
            rounds += gone > 0
        step(caches, data, chunk)
        live += chunk
        for cache in caches:
            assert (cache.offset, cache.size(), cache.eviction.rounds) == (start + chunk, live, rounds)
    assert rounds > 0


@pytest.mark.parametrize("key", format_names())
def test_what_stays_is_what_was_there_in_every_format(key):
    """Rows move, none changes; alone and in a batch."""
    value = "tq3" if get_format(key).keys_only else key
    plan = plan_of(key, value)
    evicting, whole = build_caches(plan), build_caches(plan_of(key, value, evicts=False))
    slot = plan.layers[0].slot
    data = vectors(len(whole), slot.heads, slot.key_dim)
    for count in (60, 60, 60, 30, 1, 1):
        step(evicting, data, count)
        step(whole, data, count)
    batches = [BatchCompressedKVCache.merge([cache]) for cache in evicting]
    for count in (1, 40, 1):
        step(whole, data, count)
    for caches in (evicting, [batch.rows[0] for batch in batches]):
        for count in (1, 40, 1):
            step(caches, data, count)
        assert caches[0].eviction.rounds > 2
        for cache, full in zip(caches, whole, strict=True):
            kept = mx.array(cache.positions)
            assert len(kept) < full.offset == cache.offset
            for handle, all_of_it in zip(cache.keys_and_values(), full.keys_and_values(), strict=True):
                assert mx.array_equal(handle.materialize(), mx.take(all_of_it.materialize(), kept, axis=2))
