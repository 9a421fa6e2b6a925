"""Positions that are held stay through every round, and their tokens do not take the place of others."""

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from mlx_tq.cache.factory import build_caches
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.dispatch import attention, plan_caches
from mlx_tq.evict.selection import Span

BUDGET, WINDOW, GRANULARITY = 128, 24, 8
HELD = Span(45, 190)  # more than the budget, and no whole blocks


def caches_of(model):
    evict = EvictConfig(policy="recency", budget=BUDGET, trigger=8, granularity=GRANULARITY)
    return build_caches(plan_caches(model, KVConfig(key="q8", value="q8", prefix=4, window=WINDOW, evict=evict)))


def read(model, caches, count):
    for _ in range(count):
        mx.eval(model(mx.array([[7, 8, 9, 10]]), cache=caches))


def live(caches):
    (positions,) = {tuple(map(int, cache.positions)) for cache in caches}  # the same in every layer
    return set(positions)


@pytest.mark.parametrize("copied", [False, True])
def test_held_positions_stay_until_they_are_let_go(copied):
    """Also in copies, which is how mlx-lm's batches take a cache in."""
    model = build("llama")
    held = set(range(*HELD))
    with attention(model):
        caches = caches_of(model)
        caches[0].hold(HELD)
        if copied:
            originals, caches = caches, [cache.fork() for cache in caches]
        for _ in range(24):
            read(model, caches, 5)
            seen = caches[0].offset
            assert held & set(range(seen)) <= live(caches)
        assert caches[0].eviction.rounds > 3
        others = live(caches) - held
        assert BUDGET - GRANULARITY <= len(others) <= BUDGET + 8 + 4 + 2 * GRANULARITY
        assert max(others - set(range(seen - WINDOW, seen))) > HELD.stop  # the newest of them, as without
        caches[0].hold(None)
        read(model, caches, 60)
        assert not held & live(caches)
        if copied:
            assert originals[0].coordinator.held == HELD


def test_a_hold_beyond_what_was_read_changes_nothing():
    model = build("llama")
    with attention(model):
        plain, holding = caches_of(model), caches_of(model)
        holding[0].hold(Span(1000, 1100))
        for caches in (plain, holding):
            read(model, caches, 60)
    assert plain[0].eviction.rounds == holding[0].eviction.rounds > 0
    assert np.array_equal(plain[0].positions, holding[0].positions)
